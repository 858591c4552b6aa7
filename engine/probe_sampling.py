"""The probe's part on sampling: one row of logits through every sample program.

A row must give the same token and log-probability in each program that can serve it,
whatever its neighbours ask for; see probe.py for what is made of the prints.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from headrace.engine.model_runner import ModelRunner
from headrace.engine.programs import VARIANTS, ProgramKey, program_name
from headrace.engine.slots import empty_slots


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Ask:
    """What a row asks for; the others of its program always ask for something else."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    has_extras: bool = False


# Each variant serves its own and those before it.
_ASKS: dict[str, tuple[_Ask, ...]] = {
    "greedy": (_Ask(),),
    "sampled": (
        _Ask(temperature=0.8),
        _Ask(temperature=0.8, top_k=40, top_p=0.9),
        _Ask(temperature=0.8, min_p=0.1),
    ),
    "full": (
        _Ask(has_extras=True, presence=0.5, frequency=0.3, repetition=1.2),
        _Ask(has_extras=True, repetition=0.8, temperature=1.3, top_p=0.7),
    ),
}
_COMPANY = _Ask(has_extras=True, presence=1.5, repetition=1.7, temperature=2.0, top_k=3)


def probe_sampling(runner: ModelRunner) -> dict[str, set[str]]:
    """What each sample program gives, once as first row and once as last.

    Returns:
      Prints by program. One that serves fewer asks has the print of those that serve
      all, if it agrees as far as it goes.
    """
    buckets = runner.config.decode_batch_sizes or ()
    found: dict[str, set[tuple[str, ...]]] = {}
    for variant in VARIANTS:
        for bucket in buckets:
            key = ("sample", variant, bucket)
            rows = {_draw_all(runner, key, slot) for slot in (0, bucket - 1)}
            found[program_name(key)] = rows
    # The log-probabilities are those of "full" alone, and all of its buckets agree.
    whole = found[program_name(("sample", "full", buckets[-1]))]
    prints = {}
    for name, rows in found.items():
        agrees = all(any(_begins(row, full) for full in whole) for row in rows)
        same = whole if agrees and len(rows) == 1 else rows
        prints[name] = {"; ".join(row) for row in same}
    runner.slots = empty_slots(runner.layout)
    return prints


def _begins(row: tuple[str, ...], full: tuple[str, ...]) -> bool:
    """Whether each part of a row is how that of the full one begins."""
    return all(
        theirs.startswith(mine)
        for mine, theirs in zip(row, full[: len(row)], strict=True)
    )


def _draw_all(runner: ModelRunner, key: ProgramKey, slot: int) -> tuple[str, ...]:
    served = VARIANTS[: VARIANTS.index(key[1]) + 1]
    asks = [ask for variant in served for ask in _ASKS[variant]]
    return tuple(_draw(runner, key, slot, ask) for ask in asks)


def _draw(runner: ModelRunner, key: ProgramKey, slot: int, ask: _Ask) -> str:
    """The token, and from "full" its scores: "token logprob rank ids values"."""
    B, Q, V = runner.logits_BQV.shape
    rng = np.random.default_rng(7)
    row_V = rng.standard_normal(V, dtype=np.float32) * 3
    runner.logits_BQV = jnp.tile(jnp.array(row_V), (B, Q, 1))
    # Greedy programs see greedy rows only, others any company that they can serve.
    company = ask if key[1] == "greedy" else _COMPANY
    company = dataclasses.replace(company, has_extras=key[1] == "full")

    def column(name: str, dtype: np.dtype | type) -> jnp.ndarray:
        values = np.full(B, getattr(company, name), dtype)
        values[slot] = getattr(ask, name)
        return jnp.array(values)

    if key[1] == "full":
        counts_BV = rng.integers(0, 3, (1, V), dtype=np.int32).repeat(B, 0)
        runner.extras = dataclasses.replace(
            runner.extras,
            count_BV=jnp.array(counts_BV),
            bias_BV=jnp.zeros((B, V), jnp.float32),
        )
    runner.slots = dataclasses.replace(
        empty_slots(runner.layout),
        active_B=jnp.array(np.arange(B) < key[2]),
        remaining_B=jnp.full(B, 1000, jnp.int32),
        seed_B2=jnp.full((B, 2), 11, jnp.uint32),
        position_B=jnp.full(B, 5, jnp.int32),
        temperature_B=column("temperature", np.float32),
        top_k_B=column("top_k", np.int32),
        top_p_B=column("top_p", np.float32),
        min_p_B=column("min_p", np.float32),
        presence_B=column("presence", np.float32),
        frequency_B=column("frequency", np.float32),
        repetition_B=column("repetition", np.float32),
        has_extras_B=column("has_extras", bool),
    )
    packed = jnp.asarray(runner.layout.unchanged(does_decode=True))
    output = runner.read(runner.sample(key, packed))
    if output.live_B is not None:
        output = jax.tree.map(lambda leaf: leaf[0], output)
    if output.scores is None:
        return f"{output.token_B[slot]} "
    scores = [leaf[slot].tobytes().hex() for leaf in output.scores]
    return " ".join([str(output.token_B[slot]), *scores])
