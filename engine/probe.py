"""The bit-class probe: runs the same tokens through every program at start.

Programs that give the same logit bits form a bit class. The probe is evidence, not a
proof; `scripts/verify_exactness.py` is the longer one.
"""

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from headrace.engine.model_runner import ModelRunner
from headrace.engine.new_request import longest_request
from headrace.engine.packed_layout import ROW_FIELDS
from headrace.engine.probe_sampling import probe_sampling
from headrace.engine.probe_scoring import ScorePrint, without_equal_scores
from headrace.engine.programs import ProgramKey, generating_keys, program_name
from headrace.engine.slots import SlotState, empty_slots

# Marks a program whose own bits depend on the row or on its neighbours.
UNSTEADY = "*"
_DECODE_STEPS = 2
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def probe(runner: ModelRunner) -> dict[str, str]:
    """Returns a letter per program; equal letters mean equal bits.

    Filling and generating share their letters, sampling has its own.
    """
    case, config = _ProbeCase.make(runner), runner.config
    prints: dict[str, set[str]] = {}
    shapes = config.prefill_shapes or ()
    scored = {
        program_name(("score", shape)): case.fill(("score", shape))
        for shape in (shapes if config.scoring else ())
    }
    prints |= without_equal_scores(scored)
    fills = {
        shape: {logits for logits, _ in case.fill(("prefill", shape))}
        for shape in shapes
    }
    for shape, found in fills.items():
        prints[program_name(("prefill", shape))] = found
    best = best_shapes({s: _letter_of(found) for s, found in fills.items()})
    if list(fills)[-1] not in best:
        # Decoding continues what the shapes that will be kept have filled.
        case.fill(("prefill", best[0]))
    for key in generating_keys(config):
        prints[program_name(key)] = case.generate(key)
    prints |= probe_sampling(runner)
    letters: dict[tuple[str, str], str] = {}
    classes = {}
    for name, found in prints.items():
        does_sample = runner.ledger.entries[name].role == "sampling"
        kind = "sample" if does_sample else "forward"
        taken = sum(1 for known, _ in letters if known == kind)
        key = (kind, _letter_of(found))
        letter = letters.setdefault(key, _LETTERS[taken % 26])
        classes[name] = letter if len(found) == 1 else letter + UNSTEADY
    runner.slots = empty_slots(runner.layout)
    return classes


def best_shapes(classes: dict[tuple[int, int], str]) -> tuple[tuple[int, int], ...]:
    """The prefill shapes of one class: the most; among equals the longest chunk."""
    groups: dict[str, list[tuple[int, int]]] = {}
    for shape, letter in classes.items():
        groups.setdefault(letter, []).append(shape)
    steady = {a: group for a, group in groups.items() if not a.endswith(UNSTEADY)}
    best = max(
        (steady or groups).values(), key=lambda group: (len(group), group[-1][1])
    )
    return tuple(best)


def _letter_of(found: set[str]) -> str:
    """A name for what a program gave; UNSTEADY where it was not always the same."""
    return "|".join(sorted(found)) + UNSTEADY * (len(found) > 1)


@dataclasses.dataclass(frozen=True)
class _ProbeCase:
    """One request, its pages, and company to run it with."""

    runner: ModelRunner
    tokens: np.ndarray  # [n + _DECODE_STEPS]
    prompt_len: int
    table_M: np.ndarray
    prompt_logits: list[np.ndarray] = dataclasses.field(default_factory=list)

    @classmethod
    def make(cls, runner: ModelRunner) -> "_ProbeCase":
        config, layout = runner.config, runner.layout
        assert config.prefill_shapes
        longest = max(tokens for _, tokens in config.prefill_shapes)
        room = longest_request(config)[0]
        prompt_len = max(1, min(longest + longest // 2 + 3, room - _DECODE_STEPS - 1))
        rng = np.random.default_rng(20240229)
        tokens = rng.integers(
            0, runner.model_config.vocab_size, prompt_len + _DECODE_STEPS
        )
        table_M = np.zeros(layout.pages_per_request, np.int32)
        used = -(-(prompt_len + _DECODE_STEPS) // config.page_size)
        table_M[:used] = 1 + np.arange(used)
        return cls(runner, tokens.astype(np.int32), prompt_len, table_M)

    def fill(self, key: ProgramKey) -> set[tuple[str, str]]:
        """Prefills in chunks of this shape, as the last row and then as the first.

        Returns prints of the logits, and of the scores where the program gives them.

        The other rows hold shorter prompts whose pages are all the dummy page. Once
        the first chunk is one page long, since a prefix found in the cache makes the
        others start at any page.
        """
        R, T = key[1]
        prints = set()
        for row, first in {(R - 1, T), (0, T), (0, min(T, self._page_size))}:
            scores = ScorePrint(self.runner)
            start, length = 0, first
            while start < self.prompt_len:
                length = min(length, self.prompt_len - start)
                self._fill_one(key, row, start, length, scores)
                start, length = start + length, T
            rows = [self.runner.read(self.runner.logits_BQV[0, 0])]
            self.prompt_logits[:] = rows
            # What decoding computes too, to compare the roles.
            for step in range(_DECODE_STEPS):
                self._fill_one(key, row, self.prompt_len + step, 1, scores)
                rows.append(self.runner.read(self.runner.logits_BQV[0, 0]))
            prints.add((self._fingerprint(rows), scores.text()))
        return prints

    def _fill_one(
        self, key: ProgramKey, row: int, start: int, length: int, scores: ScorePrint
    ) -> None:
        packed = self._chunk(key[1], row, start, length)
        found = self.runner.forward(key, jnp.asarray(packed))
        if found is not None:
            is_last = start + length >= self.prompt_len
            scores.add(found, row, length, has_logits=is_last)

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
        rows[row, :4] = (0, start, length, start + length >= self.prompt_len)
        following = self.tokens[start + length : start + length + 1]
        rows[row, ROW_FIELDS.index("next_token")] = (
            following[0] if len(following) else 0
        )
        layout.page_table(rows)[row] = self.table_M
        tokens[row, :length] = self.tokens[start : start + length]
        return packed

    def generate(self, key: ProgramKey) -> set[str]:
        """Decodes after the prefill: alone in slot 0, in company in the last slot.

        A program that verifies does so once without drafts, and once with the second
        token as a draft. The prints begin with the prompt's logits, like those of
        filling.
        """
        prints, bucket = set(), key[1]
        for slot, company in ((0, False), (bucket - 1, True)):
            rows = list(self.prompt_logits)
            for step in range(_DECODE_STEPS):
                self.runner.slots = self._slots(bucket, slot, company, step)
                self.runner.forward(key, self._decode_flag())
                rows.append(self.runner.read(self.runner.logits_BQV[slot, 0]))
            prints.add(self._fingerprint(rows))
            if key[0] == "verify":
                prints.add(self._verify(key, slot, company))
        return prints

    def _verify(self, key: ProgramKey, slot: int, company: bool) -> str:
        runner, rows = self.runner, list(self.prompt_logits)
        drafting = runner.drafting
        assert drafting is not None
        drafts_BK = jnp.full_like(drafting.drafts_BK, -1)
        drafts_BK = drafts_BK.at[slot, 0].set(self.tokens[self.prompt_len + 1])
        if company:  # others with more drafts, or none
            drafts_BK = drafts_BK.at[: slot - slot % 2 : 2].set(1)
        runner.drafting = dataclasses.replace(drafting, drafts_BK=drafts_BK)
        runner.slots = self._slots(key[1], slot, company, 0)
        runner.forward(key, self._decode_flag())
        runner.drafting = dataclasses.replace(
            runner.drafting, drafts_BK=jnp.full_like(drafts_BK, -1)
        )
        rows += list(runner.read(runner.logits_BQV[slot, :_DECODE_STEPS]))
        return self._fingerprint(rows)

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

    @staticmethod
    def _fingerprint(rows: list[np.ndarray]) -> str:
        digest = hashlib.sha256()
        for row in rows:
            digest.update(row.tobytes())
        return digest.hexdigest()
