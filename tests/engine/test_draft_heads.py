"""Medusa and EAGLE heads: they draft what their papers say, and change nothing.

The reference here is float64, one sequence, without cache or pages, from the published
tensors as they lie in the file.
"""

import dataclasses
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from draft_heads import write_eagle, write_eagle3, write_medusa
from draft_waves import Whim, bits, in_waves, requests

from headrace import LLM, SamplingParams
from headrace.checkpoints.draft_heads import load_eagle, load_medusa
from headrace.engine.proposer import DRAFT
from headrace.layers import kv_cache as kv
from headrace.layers.inputs import whole_prompt
from headrace.layers.models import build_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_config, tiny_checkpoint):
    """By kind, a head for the tiny model."""
    folder, model = tmp_path_factory.mktemp("heads"), tiny_config[0]
    params = tiny_checkpoint.params
    return {
        "medusa": write_medusa(folder / "medusa", model, params),
        "eagle": write_eagle(folder / "eagle", model),
        "eagle3": write_eagle3(folder / "eagle3", model, params),
        "eagle far": write_eagle(folder / "eagle far", model, scale=0.2),
        "eagle3 far": write_eagle3(folder / "eagle3 far", model, params, scale=0.2),
    }


@pytest.fixture(scope="module", params=["medusa", "eagle", "eagle3"])
def drafts(request, folders, text_llm, tiny_checkpoint, byte_tokenizer):
    """(kind, engine)."""
    checkpoint = dataclasses.replace(tiny_checkpoint, tokenizer=byte_tokenizer)
    prefix = "medusa" if request.param == "medusa" else "eagle"
    config = dataclasses.replace(
        text_llm.engine_config, draft=f"{prefix}:{folders[request.param]}",
        scoring=False, num_pages=34, host_kv_bytes=2**24,
    )  # fmt: skip
    llm = LLM.from_checkpoint(checkpoint, config=config)
    yield request.param, llm
    llm.close()


def test_output_is_that_without_drafts(text_llm, drafts):
    llm = drafts[1]
    asked = requests(33, seed=4)
    alone = [
        bits(text_llm.generate(dict(prompt_token_ids=p), s, use_tqdm=False)[0])
        for p, s in asked
    ]
    llm._loop._control = Whim(always=True)
    assert in_waves(llm, asked, 1) == alone
    llm._loop._control = whim = Whim(always=False)
    assert in_waves(llm, asked, 2) == alone
    assert min(whim.choices.values()) > 20
    stats = llm.stats()
    assert stats["counters"]["num_preemptions"] > 0
    assert stats["speculation"]["num_accepted_tokens"] > 50


def test_drafts_are_those_of_the_published_equations(
    drafts, folders, tiny_config, tiny_checkpoint
):
    kind, llm = drafts
    llm._loop._control, runner, seen = Whim(always=True), llm._runner, []
    propose, params = runner.propose, runner.params
    if kind != "medusa":
        # The engine's programs with the weights of a head that looks far back.
        head = load_eagle(folders[f"{kind} far"], tiny_config[0], jnp.asarray)
        runner.params = {**params, DRAFT: head.params}

    def watched(bucket, packed):
        propose(bucket, packed)
        # The request's slot is the first.
        seen.append(runner.read(runner.drafting.drafts_BK)[0])
        row = int(runner.read(runner.slots.extra_row_B)[0])
        history = runner.read(runner.drafting.history_BL)[row]
        seen[-1] = (int(runner.read(runner.slots.position_B)[0]), history, seen[-1])

    runner.propose = watched
    prompt = np.random.default_rng(5).integers(1, 500, 45).tolist()
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    llm.generate(dict(prompt_token_ids=prompt), params, use_tqdm=False)
    runner.propose, runner.params = propose, params
    folder = folders[kind if kind == "medusa" else f"{kind} far"]
    reference = REFERENCES[kind](folder, tiny_config[0], tiny_checkpoint.params)
    checked = 0
    for position, history, found in seen:
        length = int((found >= 0).sum())
        wanted = reference(history[: position + 1], length)
        assert found[:length].tolist() == wanted
        checked += length
    assert len(seen) > 5 and checked > 15


def hidden_states(model, params, ids, aux_layers=()):
    """The target's, normed, and those that go into inner layers, [T, D] each."""
    cache = kv.allocate(
        model, num_pages=40, page_size=16, storage=kv.KVStorage(dtype="float32")
    )
    target = build_model(model, "float32", (), tuple(aux_layers))
    inputs = whole_prompt(np.asarray(ids, np.int32), 16)
    output, _ = target.apply({"params": params}, cache, inputs)
    return np.asarray(output.hidden_BTD[0], np.float64), [
        np.asarray(inner[0], np.float64) for inner in output.aux_hidden
    ]


def tensors_of(folder):
    (path,) = pathlib.Path(folder).glob("*.safetensors")
    tensors = safetensors.numpy.load_file(path)
    return {name: value.astype(np.float64) for name, value in tensors.items()}


def medusa_reference(folder, model, params):
    """Cai et al. 2024: head i guesses token t + i + 1 from the state at t - 1."""
    w = tensors_of(folder)

    def drafts_for(ids, count):
        hidden = hidden_states(model, params, ids)[0][-2]
        found = []
        for i in range(count):
            inner = w[f"{i}.0.linear.weight"] @ hidden + w[f"{i}.0.linear.bias"]
            x = hidden + inner / (1 + np.exp(-inner))
            found.append(int(np.argmax(w[f"{i}.1.weight"] @ x)))
        return found

    return drafts_for


def layer(w, name, model, asks, x):
    """A decoder layer over all pairs, causal; `asks` is what attention reads."""
    T, H, K = len(x), model.head_dim, model.num_kv_heads
    half, N = H // 2, model.num_heads
    angle = np.arange(T)[:, None] * model.rope_base ** (-np.arange(half) / half)

    def rope(y):
        a, b = y[..., :half], y[..., half:]
        c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
        return np.concatenate([a * c - b * s, b * c + a * s], -1)

    q, k, v = (asks @ w[f"{name}.self_attn.{y}_proj.weight"].T for y in "qkv")
    q, k = rope(q.reshape(T, N, H)), rope(k.reshape(T, K, H))
    k, v = (np.repeat(y.reshape(T, K, H), N // K, axis=1) for y in (k, v))
    score = np.einsum("tnh,snh->nts", q, k) / np.sqrt(H)
    score = np.where(np.tri(T, dtype=bool), score, -np.inf)
    weight = np.exp(score - score.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    out = np.einsum("nts,snh->tnh", weight, v).reshape(T, N * H)
    x = x + out @ w[f"{name}.self_attn.o_proj.weight"].T
    h = norm(x, w[f"{name}.post_attention_layernorm.weight"], model)
    gate = h @ w[f"{name}.mlp.gate_proj.weight"].T
    up = h @ w[f"{name}.mlp.up_proj.weight"].T
    return x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{name}.mlp.down_proj.weight"].T


def norm(x, scale, model):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + model.norm_eps) * scale


def eagle_reference(folder, model, params):
    """Li et al. 2024: the layer over fc([token; hidden state]), the target's head."""
    w, table = tensors_of(folder), np.asarray(params["embedding"], np.float64)

    def drafts_for(ids, count):
        states, tokens, found = hidden_states(model, params, ids)[0][:-1], list(ids), []
        for _ in range(count):
            both = np.concatenate([table[tokens[1:]], states], axis=1)
            x = both @ w["fc.weight"].T + w["fc.bias"]
            guessed = layer(w, "layers.0", model, x, x)[-1]
            found.append(int(np.argmax(table @ guessed)))
            states, tokens = np.vstack([states, guessed]), [*tokens, found[-1]]
        return found

    return drafts_for


def eagle3_reference(folder, model, params):
    """Li et al. 2025: attention over [norm(token); norm(fused states)], own head."""
    w, table = tensors_of(folder), np.asarray(params["embedding"], np.float64)

    def drafts_for(ids, count):
        inner = hidden_states(model, params, ids, aux_layers=(0, 1))[1]
        states = np.concatenate(inner, axis=1)[:-1] @ w["fc.weight"].T
        tokens, found = list(ids), []
        for _ in range(count):
            asks = [
                norm(table[tokens[1:]], w["midlayer.input_layernorm.weight"], model),
                norm(states, w["midlayer.hidden_norm.weight"], model),
            ]
            asks = np.concatenate(asks, axis=1)
            guessed = layer(w, "midlayer", model, asks, states)[-1]
            z = w["lm_head.weight"] @ norm(guessed, w["norm.weight"], model)
            found.append(int(np.argmax(z) + w["d2t"][np.argmax(z)]))
            states, tokens = np.vstack([states, guessed]), [*tokens, found[-1]]
        return found

    return drafts_for


REFERENCES = {
    "medusa": medusa_reference,
    "eagle": eagle_reference,
    "eagle3": eagle3_reference,
}


def test_heads_for_another_model_are_refused(tmp_path, tiny_config, tiny_checkpoint):
    model, params = tiny_config[0], tiny_checkpoint.params
    wide = dataclasses.replace(model, model_dim=320)
    eagle = write_eagle(tmp_path / "e", model, has_bias=False)
    with pytest.raises(
        ValueError, match="hidden_size 256, the target has 320: .*anoth"
    ):
        load_eagle(eagle, wide, np.asarray)
    assert not load_eagle(eagle, model, np.asarray).params["fc_bias"].any()
    deep = dataclasses.replace(model, num_layers=9)
    layers = write_eagle3(tmp_path / "e3", deep, params, aux_layers=(2, 4, 6))
    assert load_eagle(layers, deep, np.asarray).aux_layers == (2, 4, 6)
    with pytest.raises(ValueError, match="below the target's 2 layers, got .2, 4, 6"):
        load_eagle(layers, model, np.asarray)
    many = write_eagle3(tmp_path / "e4", model, params, vocab=300)
    with pytest.raises(ValueError, match="ids from 0 to 598, the target has .* 512"):
        load_eagle(many, model, np.asarray)
    medusa = write_medusa(tmp_path / "m", model, params, heads=2, prefix="medusa_head.")
    assert len(load_medusa(medusa, model, np.asarray).params) == 2
    words = dataclasses.replace(model, vocab_size=640)
    with pytest.raises(
        ValueError, match=r"shape .512, 256., .* made for another model"
    ):
        load_medusa(medusa, words, np.asarray)
    with pytest.raises(ValueError, match="must say medusa_num_heads .* got None"):
        load_medusa(eagle, model, np.asarray)
    config = dataclasses.replace(tiny_config[1], draft=f"medusa:{medusa}")
    with pytest.raises(ValueError, match="num_drafts must be at most 2, the number"):
        LLM.from_checkpoint(tiny_checkpoint, config=config)
    path = pathlib.Path(eagle) / "model.safetensors"
    found = safetensors.numpy.load_file(path)
    safetensors.numpy.save_file(found | {"layers.1.x": np.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"that no such head has: layers\.1\.x"):
        load_eagle(eagle, model, np.asarray)
    del found["fc.weight"]
    safetensors.numpy.save_file(found, path)
    with pytest.raises(ValueError, match=r"lacks fc\.weight"):
        load_eagle(eagle, model, np.asarray)
