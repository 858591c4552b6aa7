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

from headrace.configs.schema import EngineConfig, ModelConfig
from headrace.engine import steps
from headrace.engine.batch import StepPlan
from headrace.engine.ledger import Ledger, LedgerEntry
from headrace.engine.page_moves import (
    PAGES_PER_MOVE,
    HostPages,
    cut,
    padded_ids,
    pieces,
)
from headrace.engine.processors import empty_extras, extras_of
from headrace.engine.program_store import ProgramStore, compile_fresh
from headrace.engine.programs import (
    ROLES,
    Operands,
    Program,
    ProgramKey,
    describe,
    layout_of,
    program_keys,
    program_name,
)
from headrace.engine.request import Request
from headrace.engine.schedule import PageCopy, PageMove, StepResult
from headrace.engine.slots import empty_slots
from headrace.layers import kv_cache as kv
from headrace.layers.inputs import Params
from headrace.layers.models import build_model

logger = logging.getLogger(__name__)


class ModelRunner:
    """Runs planned steps on one device.

    Args:
      model_config: shapes of the model.
      config: a resolved engine config, without Nones.
      params: the parameters, on the device.
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
        assert config.num_pages and config.kv_dtype and config.param_dtype
        self.config, self.model_config = config, model_config
        self.layout = layout_of(config)
        self.ledger = Ledger()
        self.params = params
        self._model = model or build_model(model_config, config.param_dtype)
        self._store = store
        self._programs: dict[ProgramKey, Any] = {}
        self._pending: collections.deque[steps.StepOutput] = collections.deque()
        self.kv_cache = kv.allocate(
            model_config,
            num_pages=config.num_pages,
            page_size=config.page_size,
            dtype=config.kv_dtype,
        )
        rows = self.layout.num_slots
        self.logits_BQV = jnp.zeros((rows, 1, model_config.vocab_size), jnp.float32)
        self.slots = empty_slots(self.layout)
        self.extras = empty_extras(rows, model_config.vocab_size)
        page = kv.page_bytes(self.kv_cache)
        self.host_pages = HostPages(self.kv_cache, (config.host_kv_bytes or 0) // page)

    def program_keys(self) -> list[ProgramKey]:
        """Every program of this engine, in the order of the ledger."""
        can_move = self.host_pages.num_pages > 0
        return program_keys(self.config, can_move=can_move)

    def describe(self, key: ProgramKey) -> Program:
        """A program's function and arguments."""
        operands = Operands(
            self.params, self.kv_cache, self.logits_BQV, self.slots, self.extras
        )
        return describe(
            key,
            operands,
            model=self._model,
            layout=self.layout,
            num_top=self.config.max_logprobs,
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

    def facts_to_store(self, stored: dict[str, Any]) -> dict[str, Any]:
        """What the next start need not find out again, with what was stored before.

        Starts with and without host memory share programs, so each adds its own.
        """
        entries = self.ledger.entries.values()
        classes = {e.name: e.bit_class for e in entries if e.role != "moving"}
        memory = stored.get("memory", {}) | self.memory_facts()
        return {"memory": memory, "classes": classes}

    def memory_facts(self) -> dict[str, list[int]]:
        """Temporary and aliased bytes per program, to be stored with them."""
        entries = self.ledger.entries.values()
        return {e.name: [e.temp_bytes, e.alias_bytes] for e in entries}

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

    def forward(self, key: ProgramKey, packed: jax.Array) -> None:
        """Dispatches one decode or prefill call."""
        self.kv_cache, self.logits_BQV = self.program(key)(
            self.params, self.kv_cache, self.logits_BQV, self.slots, packed
        )

    def sample(self, key: ProgramKey, packed: jax.Array) -> steps.StepOutput:
        """Dispatches one sample call; the slot state moves on."""
        extras = self.extras if key[1] == "full" else None
        self.slots, output, extras = self.program(key)(
            self.slots, self.logits_BQV, packed, extras
        )
        self.extras = extras or self.extras
        return output

    def dispatch(self, plan: StepPlan) -> None:
        """Dispatches a whole step; a later `read_step` gives its result."""
        self._copy(plan.copies)
        for move in plan.saves:
            self._save(move)
        for move in plan.loads:
            self._load(move)
        # A new array each step: the device may still read the one before.
        packed = jnp.asarray(plan.packed)
        if plan.decode_bucket is not None:
            self.forward(("decode", plan.decode_bucket), packed)
        if plan.prefill_shape is not None:
            self.forward(("prefill", plan.prefill_shape), packed)
        for request, row in plan.extras:
            self._set_extras(request, row)
        key = ("sample", plan.variant, plan.sample_bucket)
        self._pending.append(self.sample(key, packed))

    def _set_extras(self, request: Request, row: int) -> None:
        count_V, bias_V = extras_of(request, self.model_config.vocab_size)
        self.extras = self.program(("extras",))(
            self.extras, jnp.int32(row), jnp.asarray(count_V), jnp.asarray(bias_V)
        )

    def _copy(self, copies: tuple[PageCopy, ...]) -> None:
        program = self.program(("copy", PAGES_PER_MOVE))
        for some in cut(copies):
            source = padded_ids(tuple(copy.source for copy in some))
            target = padded_ids(tuple(copy.target for copy in some))
            self.kv_cache = program(
                self.kv_cache, jnp.asarray(source), jnp.asarray(target)
            )

    def _save(self, move: PageMove) -> None:
        program = self.program(("save", PAGES_PER_MOVE))
        for piece in pieces(move):
            data = program(self.kv_cache, jnp.asarray(padded_ids(piece.device)))
            self.host_pages.put(piece.host, self.read(data))

    def _load(self, move: PageMove) -> None:
        program = self.program(("load", PAGES_PER_MOVE))
        for piece in pieces(move):
            data = jax.tree.map(jnp.asarray, self.host_pages.get(piece.host))
            ids = jnp.asarray(padded_ids(piece.device))
            self.kv_cache = program(self.kv_cache, ids, data)

    def read_step(self) -> StepResult:
        """Waits for the oldest step not read yet and brings its tokens to the host."""
        output = self.read(self._pending.popleft())
        return StepResult(
            token_ids=output.token_B,
            finish_codes=output.finish_B,
            logprob=output.logprob_B,
            rank=output.rank_B,
            top_ids=output.top_ids_BJ,
            top_logprobs=output.top_logprobs_BJ,
        )

    def read(self, arrays: Any) -> Any:
        """The one place where device memory comes to the host, as numpy."""
        return jax.device_get(arrays)

    def close(self) -> None:
        """Frees the device memory that this runner holds."""
        self._programs.clear()
        for leaf in jax.tree.leaves(
            (self.kv_cache, self.logits_BQV, self.slots, self.extras)
        ):
            leaf.delete()
        self.params = {}
