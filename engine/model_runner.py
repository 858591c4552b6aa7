"""Owns what lives on the device: parameters, KV pools, logits, slots, programs.

All shapes are compiled before the first request; afterwards a missing program is an
error, never a compile. All device reads go through `read`.
"""

import collections
import concurrent.futures
import logging
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.configs.schema import EngineConfig, ModelConfig
from headrace.engine import page_moves
from headrace.engine.batch import StepPlan
from headrace.engine.drafting import history_of
from headrace.engine.ledger import Ledger, LedgerEntry
from headrace.engine.logprobs import TokenScores
from headrace.engine.packed_layout import layout_of
from headrace.engine.page_moves import PAGES_PER_MOVE, HostPages
from headrace.engine.pending import Pending
from headrace.engine.processors import empty_extras, extras_of
from headrace.engine.program_store import ProgramStore, compile_fresh
from headrace.engine.programs import (
    ROLES,
    Operands,
    Program,
    ProgramKey,
    describe,
    num_mask_words,
    program_keys,
    program_name,
)
from headrace.engine.proposers import (
    build_target,
    cache_shapes,
    drafting_of,
    proposer_of,
)
from headrace.engine.request import Request
from headrace.engine.sample_step import StepOutput
from headrace.engine.sampling_params import num_top
from headrace.engine.schedule import PageCopy, PageMove, StepResult
from headrace.engine.slots import empty_slots
from headrace.layers import kv_cache as kv
from headrace.layers.inputs import Params

logger = logging.getLogger(__name__)


class ModelRunner:
    """Runs planned steps on one device.

    Args:
      model_config: shapes of the model.
      config: a resolved engine config, without Nones.
      params: the parameters, on the device, with a proposer's as `DRAFT`.
      store: where compiled programs are kept between starts; None keeps nothing.
      model: stands in for the family's Linen module (for tests).
    """

    def __init__(
        self,
        model_config: ModelConfig,
        config: EngineConfig,
        params: Params,
        *,
        store: ProgramStore | None = None,
        model: Any = None,
    ) -> None:
        assert config.param_dtype
        self.config, self.model_config = config, model_config
        self.layout = layout_of(config)
        self.ledger = Ledger()
        self.params = params
        self._model = model or build_target(model_config, config)
        self._store = store
        self._programs: dict[ProgramKey, Any] = {}
        self._pending: collections.deque[Pending] = collections.deque()
        self._proposer = proposer_of(model_config, config)
        shapes = cache_shapes(model_config, config)
        self.kv_cache = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        rows = self.layout.num_slots
        places = 1 + self.layout.num_drafts
        V = model_config.vocab_size
        self.logits_BQV = jnp.zeros((rows, places, V), jnp.float32)
        self.drafting = drafting_of(model_config, config)
        self.slots = empty_slots(self.layout)
        self.extras = empty_extras(rows, V, config.max_bad_words)
        self.num_mask_words = num_mask_words(V)
        self._no_mask = jnp.full((rows, self.num_mask_words), -1, jnp.int32)
        page = kv.page_bytes(self.kv_cache)
        self.host_pages = HostPages(self.kv_cache, (config.host_kv_bytes or 0) // page)

    def program_keys(self) -> list[ProgramKey]:
        """Every program of this engine, in the order of the ledger."""
        can_move = self.host_pages.num_pages > 0
        return program_keys(self.config, can_move=can_move)

    def describe(self, key: ProgramKey) -> Program:
        """A program's function and arguments."""
        state = self.logits_BQV, self.slots, self.extras, self.drafting
        return describe(
            key,
            Operands(self.params, self.kv_cache, *state),
            model=self._model,
            layout=self.layout,
            num_top=num_top(self.config.max_logprobs),
            proposer=self._proposer,
            acceptance=self.config.acceptance,
        )

    def compile_all(self) -> None:
        """Loads every program from the store, or compiles it, in threads."""
        stored = (self._store.load_facts() if self._store else None) or {}
        keys = self.program_keys()
        threads = self.config.compile_threads
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            entries = pool.map(lambda key: self._build(key, stored), keys)
            for entry in entries:
                self.ledger.add(entry)
                logger.info("%s: %s in %.2f s", entry.name, entry.source, entry.seconds)

    def _build(self, key: ProgramKey, stored: dict[str, Any]) -> LedgerEntry:
        start, name = time.perf_counter(), program_name(key)
        function, args, donated, out = self.describe(key)
        in_tree = jax.tree.structure((args, {}))
        memory = stored.get("memory", {}).get(name)
        program = None
        if self._store and memory:
            program = self._store.load(name, in_tree, jax.tree.structure(out))
        source = "stored" if program is not None else "compiled"
        if program is None:
            jitted = jax.jit(function, donate_argnums=donated)
            program = compile_fresh(jitted.lower(*args))
            sizes = program.memory_analysis()
            assert sizes is not None
            memory = [sizes.temp_size_in_bytes, sizes.alias_size_in_bytes]
            if self._store:
                self._store.save(name, program)
        self._programs[key] = program
        assert memory is not None
        return LedgerEntry(
            name=name,
            role=ROLES[key[0]],
            source=source,
            seconds=time.perf_counter() - start,
            temp_bytes=memory[0],
            alias_bytes=memory[1],
        )

    def program(self, key: ProgramKey) -> Any:
        """A compiled program.

        Raises:
          RuntimeError: it was not compiled at start; serving never compiles.
        """
        if key not in self._programs:
            raise RuntimeError(
                f"no program {program_name(key)}; compiled at start: "
                f"{[program_name(k) for k in self._programs]}"
            )
        return self._programs[key]

    def forward(
        self, key: ProgramKey, packed: jax.Array | np.ndarray
    ) -> TokenScores | None:
        """Dispatches one decode, prefill or score call; the last gives scores."""
        more = () if self.drafting is None else (self.drafting,)
        self.kv_cache, self.logits_BQV, self.drafting, *scores = self.program(key)(
            self.params, self.kv_cache, self.logits_BQV, self.slots, packed, *more
        )
        return scores[0] if scores else None

    def propose(self, bucket: int, packed: jax.Array | np.ndarray) -> None:
        """Dispatches the drafting for the rows of a decode bucket."""
        state = self.kv_cache, self.drafting, self.slots, packed, self.extras
        run = self.program(("propose", bucket))
        self.kv_cache, self.drafting = run(self.params, *state)

    def sample(
        self,
        key: ProgramKey,
        packed: jax.Array | np.ndarray,
        mask_BW: jax.Array | None = None,
    ) -> StepOutput:
        """Dispatches one sample call; the slot state moves on.

        Args:
          key: of a sample program.
          packed: this step's changes.
          mask_BW: ids that grammars allow; None allows all.
        """
        args: tuple[Any, ...] = ()
        if key[1] == "full":
            args = (self.extras, self._no_mask if mask_BW is None else mask_BW)
        if self.drafting is not None:
            args = (*(args or (None, None)), self.drafting)
        self.slots, output, extras, self.drafting = self.program(key)(
            self.slots, self.logits_BQV, packed, *args
        )
        self.extras = extras or self.extras
        return output

    def dispatch_forward(self, plan: StepPlan) -> None:
        """Dispatches a step up to its logits; `dispatch_sample` goes on with it."""
        self._copy(plan.copies)
        for move in plan.saves:
            self._save(move)
        for move in plan.loads:
            self._load(move)
        # The plan's own array, which nobody writes to again: a step in flight may still
        # read it. A program takes it as cheaply as one that is on the device already.
        self._packed = plan.packed
        self._scores = None
        for request, row in plan.histories:
            text_L = jnp.asarray(history_of(request, self.layout))
            set_history = self.program(("history",))
            self.drafting = set_history(self.drafting, jnp.int32(row), text_L)
        if (bucket := plan.decode_bucket) is not None:
            if plan.does_draft:
                self.propose(bucket, self._packed)
            kind = "verify" if plan.does_draft else "decode"
            self.forward((kind, bucket), self._packed)
        if plan.prefill_shape is not None:
            kind = "score" if plan.does_score else "prefill"
            self._scores = self.forward((kind, plan.prefill_shape), self._packed)
        for request, row in plan.extras:
            self._set_extras(request, row)

    def dispatch_sample(self, plan: StepPlan, mask_BW: np.ndarray | None) -> None:
        """Dispatches the rest of a step; a later `read_step` gives its result.

        Args:
          plan: of the `dispatch_forward` just before.
          mask_BW: see `sample`.
        """
        mask = None if mask_BW is None else jnp.asarray(mask_BW)
        key = ("sample", plan.variant, plan.sample_bucket)
        output = self.sample(key, self._packed, mask)
        logits = {
            slot: self.program(("logits",))(self.logits_BQV, jnp.int32(slot))
            for slot in plan.logits_slots
        }
        self._pending.append(Pending(output, logits, self._scores))

    def _set_extras(self, request: Request, row: int) -> None:
        one = extras_of(
            request, self.model_config.vocab_size, self.config.max_bad_words
        )
        self.extras = self.program(("extras",))(
            self.extras, jnp.int32(row), *map(jnp.asarray, one)
        )

    def _copy(self, copies: tuple[PageCopy, ...]) -> None:
        program = self.program(("copy", PAGES_PER_MOVE))
        for some in page_moves.cut(copies):
            source = page_moves.padded_ids(tuple(copy.source for copy in some))
            target = page_moves.padded_ids(tuple(copy.target for copy in some))
            self.kv_cache = program(
                self.kv_cache, jnp.asarray(source), jnp.asarray(target)
            )

    def _save(self, move: PageMove) -> None:
        program = self.program(("save", PAGES_PER_MOVE))
        for piece in page_moves.pieces(move):
            data = program(
                self.kv_cache, jnp.asarray(page_moves.padded_ids(piece.device))
            )
            self.host_pages.put(piece.host, self.read(data))

    def _load(self, move: PageMove) -> None:
        program = self.program(("load", PAGES_PER_MOVE))
        for piece in page_moves.pieces(move):
            data = jax.tree.map(jnp.asarray, self.host_pages.get(piece.host))
            ids = jnp.asarray(page_moves.padded_ids(piece.device))
            self.kv_cache = program(self.kv_cache, ids, data)

    def read_step(self) -> StepResult:
        """Waits for the oldest step not read yet and brings its tokens to the host."""
        return Pending(*self.read(self._pending.popleft())).result()

    def read(self, arrays: Any) -> Any:
        """The one place where device memory comes to the host, as numpy."""
        return jax.device_get(arrays)

    def close(self) -> None:
        """Frees the device memory that this runner holds."""
        self._programs.clear()
        held = (self.kv_cache, self.logits_BQV, self.slots, self.extras, self.drafting)
        for leaf in jax.tree.leaves((held, self._no_mask)):
            leaf.delete()
        self.params = {}
