"""Every file in configs/ parses, and describes the model that it names."""

import math

import jax
import ml_collections
import pytest

from headrace.configs import config_names, load_config, parse_config
from headrace.layers.models import llama

# Parameters of the published checkpoints, the head counted once where it is tied.
PUBLISHED = {
    "smollm2_135m": 134_515_008,
    "llama3_2_1b": 1_235_814_400,
    "llama3_1_8b": 8_030_261_248,
    "llama3_3_70b": 70_553_706_496,
}


@pytest.mark.parametrize("name", config_names())
def test_every_config_parses(name):
    model, engine = parse_config(load_config(name))
    assert model.head_dim * model.num_heads == model.model_dim or name == "tiny"
    assert engine.max_context_len is None or (
        engine.max_context_len <= model.context_len
    )


@pytest.mark.parametrize("name, count", PUBLISHED.items())
def test_parameter_count_is_that_of_the_published_model(name, count):
    model, _ = parse_config(load_config(name))
    shapes = llama.param_shapes(model)
    leaves = jax.tree.leaves(shapes, is_leaf=lambda x: isinstance(x, tuple))
    assert sum(math.prod(shape) for shape in leaves) == count


def test_unknown_config_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="'huge'.*smollm2_135m"):
        load_config("huge")


def test_schema_is_not_a_config():
    assert "schema" not in config_names()
    assert {"tiny", *PUBLISHED} <= set(config_names())


def test_config_with_a_foreign_section_or_without_a_model_is_refused():
    config = load_config("tiny")
    config.trainer = {"steps": 1}
    with pytest.raises(ValueError, match="trainer"):
        parse_config(config)
    with pytest.raises(ValueError, match="'model'"):
        parse_config(ml_collections.ConfigDict({"engine": {}}))


def test_tiny_has_grouped_heads_and_a_pool_that_its_longest_request_fits():
    model, engine = parse_config(load_config("tiny"))
    assert model.group_size == 2
    assert (engine.num_pages - 1) * engine.page_size >= engine.max_context_len
