"""The engine flags: what config they give, and what they refuse and print."""

import logging

import pytest
from absl import flags
from absl.testing import flagsaver

from headrace.checkpoints.synthetic import synthetic_checkpoint
from headrace.configs import config_names, load_config, parse_config
from headrace.scripts import engine_flags


def settings(*arguments):
    with flagsaver.flagsaver():
        flags.FLAGS(["script", *arguments])
        return engine_flags.engine_settings()


def test_no_flags_leave_every_size_open():
    model, engine = settings()
    assert model is None
    assert engine.num_slots is None and engine.max_context_len is None


def test_config_gives_model_and_engine():
    assert settings("--config=tiny") == parse_config(load_config("tiny"))


def test_every_config_name_is_a_choice_and_no_other():
    for name in config_names():
        assert settings(f"--config={name}")[0].vocab_size > 0
    with pytest.raises(flags.IllegalFlagValueError):
        settings("--config=huge")


def test_flags_override_the_config():
    _, engine = settings(
        "--config=tiny", "--max_context_len=64", "--numerics=fast", "--policy=static"
    )
    assert engine.max_context_len == 64
    assert (engine.numerics, engine.policy) == ("fast", "static")
    assert engine.num_slots == 12


def test_number_of_slots_replaces_the_decode_buckets_that_end_with_it():
    _, engine = settings("--config=tiny", "--num_slots=24")
    assert engine.num_slots == 24
    assert engine.decode_batch_sizes is None


def test_value_out_of_range_is_refused():
    with pytest.raises(ValueError, match="num_slots must be at least 1"):
        settings("--num_slots=0")


def test_weights_of_another_shape_than_the_config_are_refused(monkeypatch):
    tiny, _ = parse_config(load_config("tiny"))

    class Fake:
        model_config = tiny

        def __init__(self, model, **_):
            pass

    monkeypatch.setattr("headrace.LLM", Fake, raising=False)
    with flagsaver.flagsaver():
        flags.FLAGS(["script", "--model=some.gguf", "--config=smollm2_135m"])
        with pytest.raises(ValueError, match="num_layers 30, the weights of .* have 2"):
            engine_flags.build_llm()
        flags.FLAGS(["script", "--model=some.gguf", "--config=tiny"])
        assert engine_flags.build_llm().model_config == tiny


def test_config_alone_gives_random_weights_of_its_model(monkeypatch):
    class Fake:
        @staticmethod
        def from_checkpoint(checkpoint, *, config, cache_dir):
            return checkpoint, config, cache_dir

    monkeypatch.setattr("headrace.LLM", Fake, raising=False)
    with flagsaver.flagsaver():
        flags.FLAGS(["script", "--config=tiny", "--weights_seed=5", "--cache_dir=/c"])
        checkpoint, engine, cache_dir = engine_flags.build_llm()
    tiny, tiny_engine = parse_config(load_config("tiny"))
    assert (engine, cache_dir) == (tiny_engine, "/c")
    assert checkpoint.tokenizer is None
    assert checkpoint.identity == synthetic_checkpoint(tiny, seed=5).identity


@pytest.mark.parametrize("verbosity, shows", [(0, False), (1, True)])
def test_lines_about_compiled_programs_are_shown_when_asked_for(
    monkeypatch, capsys, verbosity, shows
):
    """A start used to print some 25 of them before the answer."""

    class Fake:
        @staticmethod
        def from_checkpoint(*_, **__):
            pass

    monkeypatch.setattr("headrace.LLM", Fake, raising=False)
    with flagsaver.flagsaver():
        flags.FLAGS(["script", "--config=tiny", f"--verbosity={verbosity}"])
        engine_flags.build_llm()
    logger = logging.getLogger("headrace.engine.model_runner")
    assert logger.isEnabledFor(logging.INFO) == shows
    assert capsys.readouterr().err.count("starting; the first time") == (not shows)
