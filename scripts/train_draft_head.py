"""Distils an EAGLE head for a model from text that the model itself generates.

    python -m headrace.scripts.train_draft_head --head=HEAD
    python -m headrace.scripts.generate --draft=eagle:HEAD --prompt="..."

The target writes texts (half greedy, half sampled), its hidden states over them are
what the head learns to guess (Li et al. 2024), and the head is saved in the public
layout. Nothing else is needed: no data, no other package. Prints the loss, and how
often the first draft is right on texts that were held out.
"""

import dataclasses
import json
import pathlib
import time
from typing import Any

import numpy as np
from absl import app, flags

from headrace.configs.schema import EngineConfig, ModelConfig
from headrace.engine.sampling_params import SamplingParams
from headrace.scripts import engine_flags
from headrace.scripts.bench_throughput import load_workload

FLAGS = flags.FLAGS

flags.DEFINE_string("head", None, "Folder for the head; must not exist.")
flags.DEFINE_integer("num_texts", 320, "Texts that the model writes.", lower_bound=2)
flags.DEFINE_integer(
    "text_len", 256, "Tokens of each, prompt included.", lower_bound=16
)
flags.DEFINE_integer("num_steps", 600, "Steps of training.", lower_bound=1)
flags.DEFINE_integer("batch_size", 8, "Texts of a step.", lower_bound=1)
flags.DEFINE_float("learning_rate", 1e-3, "At its highest.", lower_bound=1e-8)
flags.DEFINE_integer("train_seed", 0, "Of prompts, noise and order.")

_HELD_OUT = 0.1
_PROMPT_LEN = 24
_SAY_EVERY = 20


def write_texts(llm: Any, count: int, length: int, seed: int) -> np.ndarray:
    """[count, length] token ids that the model wrote, each behind its own prompt."""
    rng = np.random.default_rng(seed)
    known = load_workload("offline").prompts
    vocab_size = llm.model_config.vocab_size
    prompts, params = [], []
    for index in range(count):
        ids = known[int(rng.integers(len(known)))]
        # A text of its own even where two begin alike.
        cut = int(rng.integers(min(8, len(ids)), 1 + min(len(ids), _PROMPT_LEN)))
        prompts.append([i % vocab_size for i in ids[:cut]])
        params.append(
            SamplingParams(
                temperature=0.0 if index % 2 else 0.8, top_p=0.95,
                seed=int(rng.integers(2**60)), max_tokens=length - cut,
                ignore_eos=True, detokenize=False,
            )
        )  # fmt: skip
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(asked, params)
    rows = zip(prompts, outputs, strict=True)
    return np.array([ids + o.outputs[0].token_ids for ids, o in rows], np.int32)


def hidden_states(
    model: ModelConfig, params: dict, tokens_NT: np.ndarray
) -> np.ndarray:
    """[N, T, D] normed, of the target over whole texts."""
    import jax

    from headrace.layers import kv_cache as kv
    from headrace.layers.inputs import pages_of, whole_prompt
    from headrace.layers.models import build_model

    page = 64
    target = build_model(model, "float32")
    num_pages = 1 + pages_of(tokens_NT.shape[1], page)
    storage = kv.KVStorage(dtype="float32")

    @jax.jit
    def run(params: dict, tokens_T: jax.Array) -> jax.Array:
        cache = kv.allocate(model, num_pages=num_pages, page_size=page, storage=storage)
        inputs = whole_prompt(tokens_T, page)
        return target.apply({"params": params}, cache, inputs)[0].hidden_BTD[0]

    return np.stack([np.asarray(run(params, row)) for row in tokens_NT])


def train(
    model: ModelConfig,
    params: dict,
    tokens_NT: np.ndarray,
    hidden_NTD: np.ndarray,
) -> tuple[dict[str, np.ndarray], float]:
    """The head, and the share of first drafts that are right on held-out texts."""
    import jax
    import jax.numpy as jnp

    from headrace.scripts import eagle_training as eagle

    head = params["embedding" if model.tie_embeddings else "head"]
    weights = {"head_VD": head, "table_VD": params["embedding"]}
    config = dataclasses.replace(model, num_layers=1)
    held = max(1, int(_HELD_OUT * len(tokens_NT)))
    rng = np.random.default_rng(FLAGS.train_seed)
    optimizer, step = eagle.training_step(
        config, weights, FLAGS.num_steps, FLAGS.learning_rate
    )
    found = eagle.first_params(config, FLAGS.train_seed)
    state, begun_s = optimizer.init(found), time.perf_counter()
    for index in range(1, 1 + FLAGS.num_steps):
        rows = rng.integers(held, len(tokens_NT), FLAGS.batch_size)
        batch = {
            "tokens": jnp.asarray(tokens_NT[rows]),
            "hidden": jnp.asarray(hidden_NTD[rows]),
        }
        found, state, loss = step(found, state, batch, jax.random.key(index))
        if index % _SAY_EVERY == 0 or index == FLAGS.num_steps:
            passed = time.perf_counter() - begun_s
            print(f"step {index}: loss {float(loss):.4f}, {passed:.0f} s", flush=True)
    right = total = 0
    drafts = jax.jit(
        lambda *args: eagle.draft_tokens(args[0], config, *args[1:], **weights)
    )
    for row in range(held):
        guessed = np.asarray(drafts(found, hidden_NTD[row], tokens_NT[row]))
        wanted = np.argmax(hidden_NTD[row, 1:] @ np.asarray(head).T, axis=-1)
        right, total = right + int((guessed == wanted).sum()), total + len(wanted)
    return {name: np.asarray(value) for name, value in found.items()}, right / total


def save(folder: pathlib.Path, head: dict[str, np.ndarray], model: ModelConfig) -> None:
    """Writes the public layout, in bfloat16."""
    import ml_dtypes
    import safetensors.numpy

    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": model.model_dim,
        "intermediate_size": model.ffw_dim,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": model.norm_eps,
        "vocab_size": model.vocab_size,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    narrow = {name: value.astype(ml_dtypes.bfloat16) for name, value in head.items()}
    safetensors.numpy.save_file(narrow, folder / "model.safetensors")


def small(engine: EngineConfig) -> EngineConfig:
    """An engine for the texts alone."""
    slots = engine.num_slots or 32
    return dataclasses.replace(
        engine,
        numerics="fast",
        num_slots=slots,
        decode_batch_sizes=(slots,),
        prefill_shapes=((1, 64),),
        max_context_len=FLAGS.text_len,
        draft=None,
    )


def run(words: list[str]) -> int:
    """Writes texts, trains, saves.

    Raises:
      ValueError: no folder to save to, or a target that cannot be distilled.
    """
    if words:
        raise ValueError(f"unknown arguments {words}")
    if FLAGS.head is None:
        raise ValueError("--head must name a folder for the head")
    folder = pathlib.Path(FLAGS.head).expanduser()
    if folder.exists():
        raise ValueError(f"--head={folder} exists already")
    llm = engine_flags.build_llm(small)
    if llm.engine_config.quantization is not None:
        raise ValueError("the target must not be quantized: the head shares its tables")
    model, params = llm.model_config, llm._runner.params
    begun_s = time.perf_counter()
    tokens_NT = write_texts(llm, FLAGS.num_texts, FLAGS.text_len, FLAGS.train_seed)
    wrote_s = time.perf_counter() - begun_s
    hidden_NTD = hidden_states(model, params, tokens_NT)
    head, right = train(model, params, tokens_NT, hidden_NTD)
    save(folder, head, model)
    facts = {
        "out": str(folder),
        "first_draft_right": round(right, 4),
        "texts": len(tokens_NT),
        "steps": FLAGS.num_steps,
        "writing_s": round(wrote_s),
        "total_s": round(time.perf_counter() - begun_s),
    }
    print(f"the first draft is right at {right:.1%} of the places of held-out texts")
    print(json.dumps(facts))
    llm.close()
    return 0


def main(argv: list[str]) -> int:
    """Returns the exit code: 0, or 1 where something was refused."""
    return engine_flags.exit_code(lambda: run(argv[1:]))


if __name__ == "__main__":
    app.run(main)
