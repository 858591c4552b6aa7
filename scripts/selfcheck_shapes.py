"""Shapes of attention that the self-check runs: those of published models.

Without a GPU they are tiny, for the interpreter.
"""

import functools
from typing import Any

from headrace.scripts.selfcheck_cases import Shape, ragged

_LLAMA = {"K": 8, "G": 4, "H": 128}
_QWEN = {"K": 4, "G": 7, "H": 128}
_GEMMA = {"K": 8, "G": 2, "H": 256}
_SMOLLM = {"K": 3, "G": 3, "H": 64}
_GPT_OSS = {"K": 8, "G": 8, "H": 64}


def prefill_256_shapes(is_smoke: bool) -> list[Shape]:
    """Chunks with head dim 256: softmax weights go from registers into the product."""
    if is_smoke:
        rows = ((50, 20),)
        return [Shape(name="H256", T=64, K=1, G=1, H=256, C=64, rows=rows)]
    chunks = ((0, 0), (0, 1), (0, 63), (0, 64), (0, 65), (513, 128), (1500, 127))
    make = functools.partial(Shape, T=128, rows=chunks, **_GEMMA)
    return [
        make(name="Gemma, C64", C=64),
        make(name="Gemma, C16", C=16),
        make(name="Gemma, C32, soft cap", C=32, soft_cap=50.0),
        make(name="Gemma, C64, window, soft cap", C=64, window=300, soft_cap=50.0),
        make(name="Gemma, C64, window 1, sinks", C=64, window=1, has_sinks=True),
    ]


def decode_shapes(is_smoke: bool) -> list[Shape]:
    """Decode, verify, trees, 8-bit pages."""
    if is_smoke:
        rows = ((0, 0), (0, 1), (16, 1))
        return [
            Shape(name="decode", T=1, K=1, G=4, H=64, C=16, rows=rows),
            Shape(
                name="tree, sinks, int8", T=4, K=1, G=2, H=64, C=32, rows=((40, 4),),
                has_tree=True, has_sinks=True, pool="int8",
            ),
        ]  # fmt: skip
    shapes = []

    def add(name: str, T: int, C: int, longest: int = 1600, **more: Any) -> None:
        shapes.append(Shape(name=name, T=T, C=C, rows=ragged(C, T, longest), **more))

    add("Llama 3.1 8B, decode", 1, 64, 4200, **_LLAMA)
    add("Llama 3.1 8B, decode, C16", 1, 16, **_LLAMA)
    add("Llama 3.1 8B, verify 5", 5, 64, **_LLAMA)
    add("Llama 3.1 8B, verify 8, C32", 8, 32, **_LLAMA)
    add("Qwen 2.5 7B, decode", 1, 64, **_QWEN)
    add("Qwen 2.5 7B, verify 8", 8, 32, **_QWEN)
    add("Gemma 2, decode, soft cap", 1, 64, soft_cap=50.0, **_GEMMA)
    add("Gemma 2, verify 8, window", 8, 16, window=700, soft_cap=50.0, **_GEMMA)
    add("Mistral, decode, window 4096", 1, 64, 4700, window=4096, **_LLAMA)
    add("Mistral, verify 4, window 40", 4, 32, window=40, **_LLAMA)
    add("SmolLM2, decode", 1, 64, **_SMOLLM)
    add("gpt-oss, decode, sinks, window", 1, 64, window=128, has_sinks=True, **_GPT_OSS)
    add("gpt-oss, verify 8, sinks", 8, 16, has_sinks=True, **_GPT_OSS)
    add("Llama 3.1 8B, tree of 8", 8, 64, has_tree=True, **_LLAMA)
    add("SmolLM2, tree of 7, window", 7, 16, has_tree=True, window=600, **_SMOLLM)
    for pool in ("int8", "float8_e4m3fn"):
        add(f"Llama 3.1 8B, decode, {pool}", 1, 64, pool=pool, **_LLAMA)
        add(f"Gemma, verify 4, {pool}", 4, 32, pool=pool, **_GEMMA)
        add(f"gpt-oss, decode, {pool}", 1, 32, pool=pool, has_sinks=True, **_GPT_OSS)
    return shapes


def prefill_shapes(is_smoke: bool) -> list[Shape]:
    """Chunks of prompts, head dims 64 and 128."""
    if is_smoke:
        rows = ((0, 17),)
        return [Shape(name="chunk", T=64, K=1, G=1, H=64, C=16, rows=rows)]
    chunks = ((0, 0), (0, 1), (0, 127), (0, 128), (0, 129), (513, 200), (1500, 199))
    make = functools.partial(Shape, T=200, rows=chunks)
    return [
        make(name="Llama 3.1 8B, C64", C=64, **_LLAMA),
        make(name="Llama 3.1 8B, C16", C=16, **_LLAMA),
        make(name="Qwen 2.5 7B, C32", C=32, **_QWEN),
        make(name="Mistral, C64, window", C=64, window=1024, **_LLAMA),
        make(name="Llama 3.1 8B, C32, soft cap", C=32, soft_cap=30.0, **_LLAMA),
        make(name="gpt-oss, C64, sinks, window", C=64, window=128, has_sinks=True,
             **_GPT_OSS),
        make(name="SmolLM2, C64", C=64, **_SMOLLM),
        make(name="SmolLM2, C16, window 64", C=16, window=64, **_SMOLLM),
    ]  # fmt: skip


def bits_shapes(is_smoke: bool) -> list[Shape]:
    """Ragged batches whose rows are moved, left alone and joined by others."""
    if is_smoke:
        rows = ((20, 1), (0, 0), (30, 1))
        return [Shape(name="decode", T=1, K=1, G=2, H=64, C=16, rows=rows)]
    decode_rows = tuple((97 * i % 1500, 1) for i in range(16))
    verify_rows = tuple((311 * i % 1500, 4) for i in range(8))
    chunks = ((0, 128), (700, 128), (0, 0), (1333, 77))
    return [
        Shape(name="Llama 3.1 8B, decode", T=1, C=64, rows=decode_rows, **_LLAMA),
        Shape(name="Llama 3.1 8B, verify 4", T=4, C=16, rows=verify_rows, **_LLAMA),
        Shape(name="Qwen 2.5 7B, decode", T=1, C=32, rows=decode_rows, **_QWEN),
        Shape(name="Gemma, decode, window", T=1, C=64, rows=decode_rows, window=600,
              **_GEMMA),
        Shape(name="Llama 3.1 8B, chunk", T=128, C=64, rows=chunks, **_LLAMA),
        Shape(name="Gemma, chunk", T=128, C=32, rows=chunks, **_GEMMA),
    ]  # fmt: skip
