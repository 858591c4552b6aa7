"""How near the attention kernels of Llama 3.1 8B come to the card's roofs.

A call of the program attends in several layers one after the other, each on the output
of the one before, over pools that are larger than the L2.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.scripts.selfcheck_cases import Shape
from headrace.scripts.selfcheck_device import (
    Setup,
    compile_program,
    error_text,
    require_device,
    time_chain,
)
from headrace.scripts.selfcheck_kernels import attention
from headrace.scripts.selfcheck_report import Part, share

_PAGE_SIZE = 64


def bandwidth(part: Part, setup: Setup) -> None:
    """Decode by bytes a second, chunks by products a second.

    Raises:
      DeviceLost: the device answers no more.
    """
    decodes, chunks = _sizes(setup.is_smoke)
    tasks = [
        *(functools.partial(_decode, part, setup, **sizes) for sizes in decodes),
        *(functools.partial(_chunk, part, setup, **sizes) for sizes in chunks),
    ]
    for task in tasks:
        try:
            task()
        except Exception as error:  # noqa: BLE001 - the others still run
            part.check(f"{task.keywords}", False, error=error_text(error))
            require_device()


def _sizes(is_smoke: bool) -> tuple[list[dict], list[dict]]:
    if is_smoke:
        return [{"rows": 1, "context": 20}], []
    decodes = [
        {"rows": rows, "context": context}
        for rows, context in ((64, 1024), (64, 4096), (8, 1024), (8, 4096), (1, 4096))
    ]
    # Splits that no row reaches: a table of the model's whole context.
    decodes.append({"rows": 64, "context": 1024, "table_tokens": 131072})
    chunks = [
        {"start": start, "tokens": tokens}
        for start, tokens in ((0, 512), (0, 2048), (6144, 2048))
    ]
    return decodes, chunks


def live_bytes(rows: int, context: int, num_kv_heads: int, head_dim: int) -> int:
    """Keys and values in bfloat16 that a layer's decode has to read."""
    return rows * context * num_kv_heads * head_dim * 2 * 2


def chunk_flops(start: int, tokens: int, num_heads: int, head_dim: int) -> int:
    """Products of a layer's chunk with the keys and values that it sees; two each."""
    pairs = tokens * start + tokens * (tokens + 1) // 2
    return 4 * pairs * num_heads * head_dim


def _decode(
    part: Part,
    setup: Setup,
    *,
    rows: int,
    context: int,
    table_tokens: int | None = None,
) -> None:
    shape = _shape(setup, 1, ((context - 1, 1),) * rows)
    seconds = _seconds_of_layer(shape, setup, table_tokens or context)
    per_s = live_bytes(rows, context, shape.K, shape.H) / seconds
    suffix = f", table of {table_tokens}" if table_tokens else ""
    part.measure(
        f"decode, {rows} rows of {context}{suffix}",
        per_s,
        "B/s",
        share=share(per_s, setup.roofs.copy_bytes_per_s),
        layer_us=seconds * 1e6,
    )


def _chunk(part: Part, setup: Setup, *, start: int, tokens: int) -> None:
    shape = _shape(setup, tokens, ((start, tokens),))
    seconds = _seconds_of_layer(shape, setup, start + tokens)
    per_s = chunk_flops(start, tokens, shape.K * shape.G, shape.H) / seconds
    part.measure(
        f"chunk of {tokens} after {start}",
        per_s,
        "FLOP/s",
        share=share(per_s, setup.roofs.matmul_flops_per_s),
        layer_us=seconds * 1e6,
    )


def _shape(setup: Setup, T: int, rows: tuple) -> Shape:
    K, G, H = (1, 4, 64) if setup.is_smoke else (8, 4, 128)
    return Shape(name="", T=T, K=K, G=G, H=H, C=_PAGE_SIZE, rows=rows)


def _seconds_of_layer(shape: Shape, setup: Setup, table_tokens: int) -> float:
    """Best time of a layer's attention; every row has the same context."""
    C, B = shape.C, len(shape.rows)
    start, length = shape.rows[0]
    used, M = -(-(start + length) // C), -(-table_tokens // C)
    P = B * used + 1
    # So much that no layer finds its pages in the L2: 64 MB and more between two.
    pool_bytes = 2 * P * shape.K * C * shape.H * 2
    num_layers = 1 if setup.is_smoke else int(np.clip(6e8 // pool_bytes, 4, 32))
    rng = np.random.default_rng(setup.seed)
    table_BM = np.zeros((B, M), np.int32)
    table_BM[:, :used] = rng.permutation(np.arange(1, P)).reshape(B, used)
    arrays = {
        "page_table_BM": table_BM,
        "positions_BT": np.tile(start + np.arange(shape.T, dtype=np.int32), (B, 1)),
        "context_len_B": np.full(B, start + length, np.int32),
    }
    size = (num_layers, P, shape.K, C, shape.H)
    keys = jax.random.split(jax.random.key(setup.seed), 3)
    pools = tuple(_normal(key, size) for key in keys[:2])
    q_BTKGH = _normal(keys[2], (B, shape.T, shape.K, shape.G, shape.H))
    # Nobody looks at the times of a smoke test, so it need not interpret.
    implementation = "xla" if setup.is_smoke else "mosaic_gpu"
    attend = attention(shape, implementation=implementation, is_smoke=setup.is_smoke)

    def layers(q_BTKGH: Any, pools: Any, arrays: Any) -> Any:
        for layer in range(num_layers):
            q_BTKGH = attend(q_BTKGH, pools, arrays, layer)
        return q_BTKGH

    arrays = jax.tree.map(jnp.asarray, arrays)
    program = compile_program(layers, (q_BTKGH, pools, arrays))
    calls, repeats = (1, 1) if setup.is_smoke else (10, 7)
    timing, _ = time_chain(
        lambda q: program(q, pools, arrays), q_BTKGH, calls=calls, repeats=repeats
    )
    return timing.best_s / num_layers


@functools.partial(jax.jit, static_argnums=1)
def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16)
