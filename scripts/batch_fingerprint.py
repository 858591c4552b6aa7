"""What the bytes of an offline job's output depend on, as named facts and one hash.

Covered: the input's bytes, the flags that shape records, weights, tokenizer and chat
template, the resolved engine config but for what invariant mode keeps out of the bits,
device kind and count, threads, processor, compiler flags, the code that programs are
traced from, versions of jax, jaxlib, headrace and of the packages that cut, shape and
render text, and of each program the optimized HLO that its executable carries, cold or
warm start: with the algorithms that the compiler chose, without source lines. The
host's own code (scheduler, detokenizer, this script) is covered by headrace's version
alone. No path, host name or clock is.
"""

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Mapping
from typing import Any

import headrace
from headrace.configs.schema import EngineConfig
from headrace.engine.num_threads import num_threads

# Settings that change no byte in invariant mode; in fast mode rows alone are promised.
_NO_BITS = frozenset(
    {
        "ageing_s", "compile_threads", "host_kv_bytes", "max_queue_delay_s",
        "max_tokens_per_step", "memory_fraction", "policy", "prefill_calls_per_decode",
        "prefix_cache", "share_queue",
    }
)  # fmt: skip
_PACKAGES = ("jax", "jaxlib", "numpy", "tokenizers", "llguidance", "jinja2")

# Places in source files: the tables before the program, and what refers to them.
_TABLES = re.compile(
    r"^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)*", re.MULTILINE
)
_METADATA = re.compile(r',? metadata=\{(?:"(?:[^"\\]|\\.)*"|[^}"])*\}')


def early_facts(*, input_sha256: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What is known before an engine is built.

    Args:
      input_sha256: hex digest of the input's bytes.
      parameters: flags that shape records, JSON-ready.
    """
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {
        "input_sha256": input_sha256,
        "parameters": dict(parameters),
        "threads": num_threads(),
        "versions": {"headrace": headrace.__version__} | versions,
    }


def engine_facts(llm: Any) -> dict[str, Any]:
    """What an engine adds: weights, text, config, device, programs."""
    import jax

    from headrace.engine.device_facts import layout_of_quantized
    from headrace.engine.program_store import program_key

    device = jax.devices()[0]
    runner = llm._runner
    return {
        "weights": llm._loop._identity,
        "tokenizer": _tokenizer_sha256(llm.tokenizer),
        "model": llm.model_config.to_mapping(),
        "engine": engine_settings(llm.engine_config),
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": jax.device_count(),
        },
        "code_processor_and_flags": program_key(
            llm.model_config, runner.config, layout_of_quantized(runner.params)
        ),
        "programs": {
            "-".join(map(str, key)): hlo_sha256(runner.program(key).as_text())
            for key in runner.program_keys()
        },
    }


def engine_settings(config: EngineConfig) -> dict[str, Any]:
    """The settings that bits depend on."""
    settings = config.to_mapping().items()
    return {name: value for name, value in settings if name not in _NO_BITS}


def hlo_sha256(text: str) -> str:
    """Hash of a compiled program's text, free of where its code stands.

    A program that was just compiled and the same one loaded from the store differ in
    their tables of source lines.
    """
    bare = _METADATA.sub("", _TABLES.sub("", text))
    lines = [line for line in bare.splitlines() if line.strip()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def fingerprint(facts: Mapping[str, Any]) -> str:
    """One hash of all facts."""
    return hashlib.sha256(_canonical(facts).encode()).hexdigest()


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What has changed, each as "name: old -> new"; names of parts are dotted.

    Only the names that `new` has at its top are looked at: early facts can be compared
    before the others are known.
    """
    found: list[str] = []
    # Through JSON, since what was stored has its tuples as lists.
    plain = json.loads(_canonical(new))
    for name, value in plain.items():
        _compare(name, old.get(name), value, found)
    return found


def _compare(name: str, old: Any, new: Any, found: list[str]) -> None:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            _compare(f"{name}.{key}", old.get(key), new.get(key), found)
    elif old != new:
        found.append(f"{name}: {_shown(old)} -> {_shown(new)}")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:24]}..."


def _tokenizer_sha256(tokenizer: Any) -> str | None:
    if tokenizer is None:
        return None
    parts = [
        tokenizer.to_json(),
        tokenizer.chat_template,
        tokenizer.bos_token,
        tokenizer.eos_token,
        # Whether a prompt gets a first token is no part of the JSON.
        tokenizer.encode("a"),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _canonical(facts: Mapping[str, Any]) -> str:
    return json.dumps(facts, sort_keys=True, separators=(",", ":"))
