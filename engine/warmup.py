"""The bit-class probe: runs the same tokens through every program at start.

Programs of one role that give the same logit bits form a bit class. In invariant mode
an engine keeps to one class per role, so a request's bits do not depend on which
bucket its company led to. The probe is evidence, not a proof.
"""

import dataclasses
import hashlib
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.configs.schema import EngineConfig
from headrace.engine.ledger import Ledger
from headrace.engine.model_runner import VARIANTS, ModelRunner, program_name
from headrace.engine.slots import SlotState, empty_slots

logger = logging.getLogger(__name__)

_DECODE_STEPS = 2
# Marks a program whose own bits depend on the row or on its neighbours.
_UNSTEADY = "*"
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def warm_up(runner: ModelRunner, classes: dict[str, str] | None) -> EngineConfig:
    """Probes, writes the verdict into the ledger, and narrows the buckets.

    Args:
      runner: with every program compiled and no request in it.
      classes: program name to bit class as stored by an earlier start of the same
        programs; None probes.

    Returns:
      The config whose buckets the engine may use.

    Raises:
      ValueError: invariant mode cannot be had with these buckets.
    """
    if classes is None:
        classes = probe(runner)
    ledger = runner.ledger
    for name, letter in classes.items():
        ledger.entries[name].bit_class = letter
    config = runner.config
    if config.numerics == "invariant":
        config = _narrow(config, ledger)
    for role in ("generating", "filling", "sampling"):
        ledger.verdict[role] = _verdict(ledger, role)
        logger.info("%s: %s", role, ledger.verdict[role])
    return config


def probe(runner: ModelRunner) -> dict[str, str]:
    """Returns a letter per program; equal letters within a role mean equal bits."""
    case, config = _ProbeCase.make(runner), runner.config
    prints: dict[str, set[str]] = {}
    for shape in config.prefill_shapes or ():
        prints[program_name(("prefill", shape))] = case.fill(shape)
    for bucket in config.decode_batch_sizes or ():
        prints[program_name(("decode", bucket))] = case.generate(bucket)
    prints |= _probe_sampling(case)
    letters: dict[tuple[str, str], str] = {}
    classes = {}
    for name, found in prints.items():
        role = runner.ledger.entries[name].role
        taken = sum(1 for known, _ in letters if known == role)
        key = (role, "|".join(sorted(found)))
        letter = letters.setdefault(key, _LETTERS[taken % 26])
        classes[name] = letter if len(found) == 1 else letter + _UNSTEADY
    runner.slots = empty_slots(runner.layout)
    return classes


def _probe_sampling(case: "_ProbeCase") -> dict[str, set[str]]:
    """A greedy program serves greedy rows only, so only those are compared."""
    buckets = case.runner.config.decode_batch_sizes or ()
    prints = {}
    for variant in VARIANTS:
        for bucket in buckets:
            key = ("sample", variant, bucket)
            prints[program_name(key)] = case.draw(key)
    full = prints[program_name(("sample", "full", buckets[-1]))]
    for bucket in buckets:
        name = program_name(("sample", "greedy", bucket))
        if all(f.split(",")[0] in prints[name] for f in full):
            prints[name] = full
    return prints


@dataclasses.dataclass(frozen=True)
class _ProbeCase:
    """One request, its pages, and company to run it with."""

    runner: ModelRunner
    tokens: np.ndarray  # [n + _DECODE_STEPS]
    prompt_len: int
    table_M: np.ndarray

    @classmethod
    def make(cls, runner: ModelRunner) -> "_ProbeCase":
        config, layout = runner.config, runner.layout
        assert config.num_pages and config.prefill_shapes and config.max_context_len
        longest = max(tokens for _, tokens in config.prefill_shapes)
        room = min((config.num_pages - 1) * config.page_size, config.max_context_len)
        prompt_len = max(1, min(longest + longest // 2 + 3, room - _DECODE_STEPS - 1))
        rng = np.random.default_rng(20240229)
        tokens = rng.integers(
            0, runner.model_config.vocab_size, prompt_len + _DECODE_STEPS
        )
        table_M = np.zeros(layout.pages_per_request, np.int32)
        used = -(-(prompt_len + _DECODE_STEPS) // config.page_size)
        table_M[:used] = 1 + np.arange(used)
        return cls(runner, tokens.astype(np.int32), prompt_len, table_M)

    def fill(self, shape: tuple[int, int]) -> set[str]:
        """Prefills in chunks of this shape, as the last row and then as the first.

        The other rows hold shorter prompts whose pages are all the dummy page. Once
        the first chunk is one page long, since a prefix found in the cache makes the
        others start at any page.
        """
        R, T = shape
        prints = set()
        for row, first in {(R - 1, T), (0, T), (0, min(T, self._page_size))}:
            start, length = 0, first
            while start < self.prompt_len:
                length = min(length, self.prompt_len - start)
                packed = self._chunk(shape, row, start, length)
                self.runner.forward(("prefill", shape), jnp.asarray(packed))
                start, length = start + length, T
            prints.add(self._fingerprint([self.runner.logits_BQV[0, 0]]))
        return prints

    @property
    def _page_size(self) -> int:
        return self.runner.config.page_size

    def _chunk(
        self, shape: tuple[int, int], row: int, start: int, length: int
    ) -> np.ndarray:
        layout = self.runner.layout
        packed = layout.unchanged(does_decode=False)
        rows, tokens = layout.rows(packed), layout.tokens(packed, *shape)
        for other in range(shape[0]):
            rows[other, :4] = (0, 0, max(1, length // 2), 0)
        rows[row, :4] = (0, start, length, start + length == self.prompt_len)
        layout.page_table(rows)[row] = self.table_M
        tokens[row, :length] = self.tokens[start : start + length]
        return packed

    def generate(self, bucket: int) -> set[str]:
        """Decodes after the prefill: alone in slot 0, in company in the last slot."""
        prints = set()
        for slot, company in ((0, False), (bucket - 1, True)):
            rows = []
            for step in range(_DECODE_STEPS):
                self.runner.slots = self._slots(bucket, slot, company, step)
                self.runner.forward(("decode", bucket), self._decode_flag())
                rows.append(self.runner.read(self.runner.logits_BQV[slot, 0]))
            prints.add(self._fingerprint(rows))
        return prints

    def draw(self, key: tuple) -> set[str]:
        """Samples fixed logits: as a greedy row, and with noise and every filter."""
        B, _, V = self.runner.logits_BQV.shape
        rng = np.random.default_rng(7)
        row_QV = rng.standard_normal((1, V), dtype=np.float32) * 3
        self.runner.logits_BQV = jnp.tile(jnp.array(row_QV), (B, 1, 1))
        filters = [(0.0, 0, 1.0)]
        if key[1] != "greedy":
            filters += [(0.8, 0, 1.0), (0.8, 40, 0.9)]
        return {
            ",".join(str(self._draw_one(key, slot, one)) for one in filters)
            for slot in (0, key[2] - 1)
        }

    def _draw_one(
        self, key: tuple, slot: int, filters: tuple[float, int, float]
    ) -> int:
        runner, B = self.runner, self.runner.layout.num_slots
        runner.slots = dataclasses.replace(
            self._slots(key[2], slot, True, 0),
            temperature_B=jnp.full(B, filters[0], jnp.float32),
            top_k_B=jnp.full(B, filters[1], jnp.int32),
            top_p_B=jnp.full(B, filters[2], jnp.float32),
            seed_B2=jnp.full((B, 2), 11, jnp.uint32),
            position_B=jnp.full(B, 5, jnp.int32),
        )
        output = runner.read(runner.sample(key, self._decode_flag()))
        return int(output.token_B[slot])

    def _slots(self, bucket: int, slot: int, company: bool, step: int) -> SlotState:
        layout = self.runner.layout
        B, M = layout.num_slots, layout.pages_per_request
        index = np.arange(B)
        mine = index == slot
        active = (index < bucket) & (mine | company)
        position = np.where(
            mine, self.prompt_len + step, (index * 37) % self.prompt_len
        )
        token = np.where(mine, self.tokens[self.prompt_len + step], index)
        table = np.where(mine[:, None], self.table_M, np.zeros(M, np.int32))
        return dataclasses.replace(
            self.runner.slots,
            last_token_B=jnp.array(
                token % self.runner.model_config.vocab_size, jnp.int32
            ),
            position_B=jnp.array(position, jnp.int32),
            active_B=jnp.array(active),
            remaining_B=jnp.full(B, 1000, jnp.int32),
            page_table_BM=jnp.array(table, jnp.int32),
        )

    def _decode_flag(self) -> jax.Array:
        return jnp.asarray(self.runner.layout.unchanged(does_decode=True))

    def _fingerprint(self, rows: list[Any]) -> str:
        digest = hashlib.sha256()
        for row in rows:
            digest.update(self.runner.read(row).tobytes())
        return digest.hexdigest()


def _narrow(config: EngineConfig, ledger: Ledger) -> EngineConfig:
    """Keeps, per role, the programs of one class, and marks the others unused."""
    buckets, shapes = config.decode_batch_sizes or (), config.prefill_shapes or ()

    def letter(key: tuple) -> str:
        return ledger.entries[program_name(key)].bit_class

    wanted = letter(("decode", buckets[-1]))
    kept = tuple(b for b in buckets if letter(("decode", b)) == wanted)
    groups: dict[str, list[tuple[int, int]]] = {}
    for shape in shapes:
        groups.setdefault(letter(("prefill", shape)), []).append(shape)
    steady = {a: group for a, group in groups.items() if not a.endswith(_UNSTEADY)}
    # Most shapes first; among equals the one with the longest chunk.
    best = max(
        (steady or groups).values(), key=lambda group: (len(group), group[-1][1])
    )
    drawn = {letter(("sample", v, b)) for v in VARIANTS for b in kept}
    chosen = {wanted, letter(("prefill", best[0])), *drawn}
    if len(drawn) > 1 or any(c.endswith(_UNSTEADY) for c in chosen):
        raise ValueError(
            "numerics 'invariant' cannot be had: the probe found programs whose bits "
            "depend on a row's place or company; use numerics 'fast', or other "
            f"buckets.\n{ledger.table()}"
        )
    for key in [
        *(("decode", b) for b in buckets if b not in kept),
        *(("prefill", shape) for shape in shapes if shape not in best),
        *(("sample", v, b) for v in VARIANTS for b in buckets if b not in kept),
    ]:
        ledger.entries[program_name(key)].used = False
    return dataclasses.replace(
        config, decode_batch_sizes=kept, prefill_shapes=tuple(best)
    )


def _verdict(ledger: Ledger, role: str) -> str:
    groups: dict[str, list[str]] = {}
    for entry in ledger.entries.values():
        if entry.role == role:
            groups.setdefault(entry.bit_class, []).append(entry.name)
    if len(groups) == 1:
        return f"all {sum(map(len, groups.values()))} programs in one bit class"
    parts = [f"{letter}: {', '.join(names)}" for letter, names in groups.items()]
    return f"{len(groups)} bit classes ({'; '.join(parts)})"
