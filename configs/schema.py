"""Plain, checked data that describes an engine; a model's is in model_config.py.

Frozen dataclasses, keyword only. They reject unknown keys by name and check every
range when built, so that nothing below them has to. Imports nothing of ours and no
jax: the host side of the engine may use it freely.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, Literal, Self

from headrace.configs.checks import check_choice, check_int, check_range, check_tuple
from headrace.configs.drafts import MAX_DRAFTS, Acceptance, DraftShapes, parse_draft
from headrace.configs.kv_types import KV_8BIT, KVDtype
from headrace.configs.mapping import FromMapping
from headrace.configs.model_config import ModelConfig as ModelConfig
from headrace.configs.model_config import RopeScaling as RopeScaling
from headrace.configs.quantization import parse_scheme

Numerics = Literal["invariant", "fast"]
Policy = Literal["fcfs", "priority", "fair", "static"]
Dtype = Literal["float32", "bfloat16"]

KEY_BLOCK = 128
"""Keys per block of the XLA attention; pages divide it (DESIGN: fixed blocks)."""

PAGE_SIZES = (16, 32, 64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig(FromMapping):
    """Sizes and policies of one engine. Every compiled shape follows from it.

    None means "choose from the model, the device and the memory that is free";
    `engine/sizing.py` does, and returns a config without Nones.

    Attributes:
      max_context_len: longest request in tokens, prompt and output together.
      page_size: tokens per KV page (C); divides 128.
      num_pages: pages in the pool, dummy page 0 included.
      memory_fraction: share of the free memory for everything together: weights,
        pool, logits, temporaries. On a GPU free is what XLA reserved when it started,
        three quarters of the card unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
      num_slots: requests that decode together (rows of the largest decode bucket).
      decode_batch_sizes: ascending buckets; the last equals `num_slots`.
      prefill_shapes: (rows, tokens) buckets of one prefill call, ascending.
      numerics: "invariant" keeps a request's bits free of its company.
      max_logprobs: most log-probabilities per token that a request may ask for; -1
        is no bound, and lets `logprobs=-1` give the whole vocabulary.
      max_bad_words: token sequences of two or more that a request may forbid.
      max_grammar_len: characters of a request's JSON schema, regex, choices or grammar.
      scoring: compile what `score`, `perplexity` and `prompt_logprobs` need.
      max_stop_ids: stop ids per request that the device can check.
      param_dtype, kv_dtype: storage types of weights and KV pages; pages of 8 bits have
        a scale per token and kv head.
      kv_dtype_skip: layers whose pages are in `param_dtype` where others have 8 bits.
      quantization: scheme to which weights are rounded while they are loaded, such as
        "int8" (configs/quantization.py); None leaves them as they come.
      quantization_skip: parameters that are not, as patterns such as "layer_0/*".
      keep_packed: keep a GGUF file's tensors in as many bits, where that is exact.
      draft: who drafts tokens that one pass then verifies: "prompt-lookup" (what
        followed the last words before), the name of a model, or others, see
        `drafts.parse_draft`; None decodes token by token.
      num_drafts: most drafts per request and pass.
      acceptance: "exact" takes a draft that is the token which the target samples, so
        that drafts change no token; "rejection" takes more, and keeps only the
        distribution (Leviathan et al. 2023).
      adapts_drafts: drafts only while that is faster, by the times measured at start
        and the share of drafts that were right.
      draft_shapes: of what `draft` names, set when that is loaded.
      prefill_calls_per_decode: prefill calls that may run in a row while decode
        waits; 1 lets decode run in every step.
      policy: who gets a slot next: "fcfs", "priority" (lower first), "fair" (the
        tenant served least); or "static" (Orca's baseline: whole batches).
      ageing_s: seconds of waiting that outweigh one unit of priority.
      max_queued_requests, max_queued_tokens: bounds of the queue; None is no bound.
      share_queue: a tenant may have no more waiting than the queue has room left; so it
        alone takes half of each bound, two that flood a third each.
      max_queue_delay_s: how long an idle engine waits for more prompts.
      max_tokens_per_step: decode rows and prompt tokens of a step together; a step
        with prompts prefills at least one chunk. None is no bound.
      host_kv_bytes: host memory for the pages of preempted requests in invariant
        mode. Requests are admitted as long as pool and host memory together could
        hold all of them at their longest. None: as much as the pool, but at most a
        quarter of what is free; nothing on a CPU, where it would come out of the pool.
      prefix_cache: reuse full pages of earlier prompts.
      multi_tenant: refuse requests that do not name their tenant.
      compile_threads: programs compiled at the same time at start.
    """

    max_context_len: int | None = None
    page_size: int = 64
    num_pages: int | None = None
    memory_fraction: float | None = None
    num_slots: int | None = None
    decode_batch_sizes: tuple[int, ...] | None = None
    prefill_shapes: tuple[tuple[int, int], ...] | None = None
    numerics: Numerics = "invariant"
    max_logprobs: int = 20
    max_bad_words: int = 16
    max_grammar_len: int = 100_000
    scoring: bool = False
    max_stop_ids: int = 8
    param_dtype: Dtype | None = None
    kv_dtype: KVDtype | None = None
    kv_dtype_skip: tuple[int, ...] = ()
    quantization: str | None = None
    quantization_skip: tuple[str, ...] = ("embedding", "head")
    keep_packed: bool = False
    draft: str | None = None
    num_drafts: int = 3
    acceptance: Acceptance = "exact"
    adapts_drafts: bool = True
    draft_shapes: DraftShapes | None = None
    prefill_calls_per_decode: int = 8
    policy: Policy = "fcfs"
    ageing_s: float = 10.0
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    share_queue: bool = False
    max_queue_delay_s: float = 0.0
    max_tokens_per_step: int | None = None
    host_kv_bytes: int | None = None
    prefix_cache: bool = True
    multi_tenant: bool = False
    compile_threads: int = 2

    def __post_init__(self) -> None:
        check_choice("page_size", self.page_size, PAGE_SIZES)
        if self.memory_fraction is not None:
            check_range("memory_fraction", self.memory_fraction, 0.01, 1.0)
        check_choice("numerics", self.numerics, ("invariant", "fast"))
        check_choice("policy", self.policy, typing.get_args(Policy))
        check_range("ageing_s", self.ageing_s, 1e-3, 1e6)
        check_range("max_queue_delay_s", self.max_queue_delay_s, 0.0, 60.0)
        if self.host_kv_bytes is not None:
            check_int("host_kv_bytes", self.host_kv_bytes, 0)
        for name in ("prefix_cache", "multi_tenant", "scoring", "keep_packed"):
            check_choice(name, getattr(self, name), (False, True))
        check_choice("share_queue", self.share_queue, (False, True))
        for name in ("max_queued_requests", "max_queued_tokens", "max_tokens_per_step"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        check_int("max_logprobs", self.max_logprobs, -1, 2**31 - 1)
        check_int("max_bad_words", self.max_bad_words, 1, 256)
        check_int("max_grammar_len", self.max_grammar_len, 1, 2**31 - 1)
        check_int("max_stop_ids", self.max_stop_ids, 1, 64)
        self._check_drafts()
        check_int("compile_threads", self.compile_threads, 1)
        check_int("prefill_calls_per_decode", self.prefill_calls_per_decode, 1)
        for name, kinds in (("param_dtype", Dtype), ("kv_dtype", KVDtype)):
            if getattr(self, name) is not None:
                check_choice(name, getattr(self, name), typing.get_args(kinds))
        if self.kv_dtype in KV_8BIT and self.page_size < 32:
            raise ValueError(
                f"kv_dtype {self.kv_dtype} needs a page_size of at least 32, got "
                f"{self.page_size}"
            )
        check_tuple("kv_dtype_skip", self.kv_dtype_skip)
        for layer in self.kv_dtype_skip:
            check_int("kv_dtype_skip", layer, 0)
        check_tuple("quantization_skip", self.quantization_skip)
        if self.quantization is not None:
            parse_scheme(self.quantization)
        if self.max_context_len is not None:
            check_int("max_context_len", self.max_context_len, 2)
        if self.num_pages is not None:
            check_int("num_pages", self.num_pages, 2)
        if self.num_slots is not None:
            check_int("num_slots", self.num_slots, 1, 4096)
        self._check_buckets()

    @property
    def drafts_per_pass(self) -> int:
        """Drafts that a decode step can verify per row; 0 without speculation."""
        return self.num_drafts if self.draft is not None else 0

    @property
    def generating_kinds(self) -> tuple[str, ...]:
        """Programs that a decode step may run: with drafts, without, or either."""
        if not self.drafts_per_pass:
            return ("decode",)
        return ("verify", "decode") if self.adapts_drafts else ("verify",)

    def _check_drafts(self) -> None:
        check_choice("acceptance", self.acceptance, typing.get_args(Acceptance))
        check_choice("adapts_drafts", self.adapts_drafts, (False, True))
        check_int("num_drafts", self.num_drafts, 1, MAX_DRAFTS)
        if self.acceptance == "rejection" and self.numerics != "fast":
            raise ValueError(
                "acceptance 'rejection' lets tokens depend on drafts, and needs "
                f"numerics 'fast', got {self.numerics!r}"
            )
        if self.draft is not None:
            parse_draft(self.draft)
            room = self.max_context_len
            if room is not None and self.num_drafts > room - 2:
                raise ValueError(
                    f"num_drafts must leave room for a prompt and a token in "
                    f"max_context_len {room}, got {self.num_drafts}"
                )
        if isinstance(self.draft_shapes, Mapping):
            shapes = DraftShapes.from_mapping(self.draft_shapes)
            object.__setattr__(self, "draft_shapes", shapes)

    def _check_buckets(self) -> None:
        sizes = self.decode_batch_sizes
        if sizes is not None:
            check_tuple("decode_batch_sizes", sizes)
            for size in sizes:
                check_int("decode_batch_sizes", size, 1)
            if not sizes or list(sizes) != sorted(set(sizes)):
                raise ValueError(
                    f"decode_batch_sizes must ascend without repeats, got {sizes}"
                )
            if self.num_slots is not None and sizes[-1] != self.num_slots:
                raise ValueError(
                    f"the last of decode_batch_sizes must equal num_slots "
                    f"{self.num_slots}, got {sizes}"
                )
        shapes = self.prefill_shapes
        if shapes is None:
            return
        check_tuple("prefill_shapes", shapes)
        for shape in shapes:
            if not (isinstance(shape, tuple) and len(shape) == 2):
                raise ValueError(f"prefill_shapes wants pairs, got {shape!r}")
            check_int("prefill_shapes rows", shape[0], 1)
            check_int("prefill_shapes tokens", shape[1], 8, 8192)
        if not shapes or list(shapes) != sorted(set(shapes)):
            raise ValueError(
                f"prefill_shapes must be ascending (rows, tokens) pairs without "
                f"repeats, got {shapes}"
            )

    @classmethod
    def preset(cls, name: str) -> Self:
        """The knobs of a use: "chat" keeps every token's delay low, "batch" keeps the
        slots full.

        Raises:
          ValueError: another name.
        """
        check_choice("preset", name, ("chat", "batch"))
        # Several prefill calls before a decode step fill the batch sooner, and make
        # those that already decode wait.
        return cls(prefill_calls_per_decode=1 if name == "chat" else 8)

    def to_mapping(self) -> dict[str, Any]:
        """JSON-ready inverse of `from_mapping`."""
        return dataclasses.asdict(self)
