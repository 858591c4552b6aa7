"""Bytes of everything that an engine keeps on its device, from shapes alone.

Arrays are counted exactly (tests hold them to what jax allocates). Temporaries of the
compiled programs are an upper bound: the pool is sized, and with it all programs get
their shapes, before anything is compiled. memory_plan.py adds up.
"""

from typing import Literal

from headrace.configs.kv_types import KV_8BIT
from headrace.configs.schema import KEY_BLOCK, EngineConfig, ModelConfig
from headrace.engine.packed_layout import layout_of
from headrace.engine.request import MAX_BAD_WORD_LEN
from headrace.engine.sampling_params import TOP_ON_DEVICE, num_top
from headrace.engine.weight_sizes import DTYPE_BYTES

# Who attends, which decides what is in memory meanwhile.
Attention = Literal["cpu", "xla", "kernels"]

# Of slots.SlotState: words and flags of a row beside its stop ids and page table.
_SLOT_WORDS, _SLOT_FLAGS = 15, 2
# A step is dispatched while the one before runs.
_STEPS_IN_FLIGHT = 2
# Of the estimate. The decode kernel keeps partial results of each split of so many
# keys, for tiles of at least 8 query rows; it takes these shapes.
SPLIT_KEYS, _SPLIT_ROWS = 512, 8
KERNEL_HEAD_DIMS, KERNEL_GROUP = (64, 128, 256), 32
# Arrays like the logits: of sampling (noise, scores, weights, masks), of scoring, and
# of the head while a prompt is filled. Compiled programs show as many, rounded up.
_SAMPLE_ARRAYS, _SCORE_ARRAYS, _HEAD_ARRAYS = 5, 2, 3
_HEAD_ROWS, _SCORE_ROWS = 8, 64  # of steps.py
_PAGES_PER_MOVE = 8  # of page_moves.py
_CPU_GROUP = 8  # decode rows that plain XLA attention takes together on a CPU
_SLACK_BYTES = 2**16


def page_bytes(model: ModelConfig, page_size: int, kv_dtype: str) -> int:
    """Bytes of one page, keys, values and their scales, of all layers."""
    heads = 2 * model.num_layers * model.num_kv_heads
    if kv_dtype in KV_8BIT:
        return heads * page_size * (model.head_dim + 4)
    return heads * page_size * model.head_dim * DTYPE_BYTES[kv_dtype]


def token_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Keys, values and scales of a token, of a config whose types are resolved."""
    assert config.kv_dtype and config.param_dtype
    wide = len(config.kv_dtype_skip)
    layers = (model.num_layers - wide, config.kv_dtype), (wide, config.param_dtype)
    target = sum(
        count * page_bytes(model, 1, dtype) // model.num_layers
        for count, dtype in layers
    )
    draft = config.draft_shapes
    if draft is None or not draft.has_pages:
        return target
    return target + page_bytes(draft.model, 1, config.kv_dtype)


def page_bytes_of(model: ModelConfig, config: EngineConfig) -> int:
    """Bytes of a page of such a config."""
    return config.page_size * token_bytes(model, config)


def pages_per_request(config: EngineConfig) -> int:
    """Pages of a request of `max_context_len` tokens."""
    assert config.max_context_len
    return -(-config.max_context_len // config.page_size)


def num_host_pages(model: ModelConfig, config: EngineConfig) -> int:
    """Pages of preempted requests that the host has room for."""
    return (config.host_kv_bytes or 0) // page_bytes_of(model, config)


def state_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Logits, slots, counts and biases, histories, and the mask that allows all.

    Args:
      model: its shapes.
      config: resolved, but for the number of pages.
    """
    assert config.num_slots
    slots = config.num_slots * _slot_bytes(config)
    extras = config.num_slots * _extras_bytes(model, config)
    logits = config.num_slots * (1 + config.drafts_per_pass) * _logits_bytes(model)
    drafting = config.num_slots * _drafting_bytes(model, config)
    return logits + config.num_slots * _mask_bytes(model) + slots + extras + drafting


def step_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Arguments and results of the steps in flight: what changes hands each step.

    A packed array, a mask of grammars, requests' counts and biases, tokens with their
    log-probabilities, and pages that move to the host or back.

    Args:
      model: its shapes.
      config: resolved, but for the number of pages.
    """
    assert config.num_slots
    layout, top = layout_of(config), num_top(config.max_logprobs)
    scores = 3 * 4 + top * (4 + 4)
    # A token, how it ended, and with drafts two flags, at each place.
    place = 2 * 4 + scores + 2 * (config.drafts_per_pass > 0)
    row = _mask_bytes(model) + (1 + config.drafts_per_pass) * place
    if not 0 <= config.max_logprobs <= TOP_ON_DEVICE:
        row += _logits_bytes(model)
    step = 4 * layout.size + config.num_slots * row
    step += layout.max_rows * (_extras_bytes(model, config) + _history_bytes(config))
    if config.scoring:
        step += layout.max_tokens * scores
    if num_host_pages(model, config):
        step += _PAGES_PER_MOVE * page_bytes_of(model, config)
    return _STEPS_IN_FLIGHT * step


def temp_bytes_bound(
    model: ModelConfig, config: EngineConfig, attention: Attention
) -> int:
    """Upper bound of the temporaries of any program; they run one at a time.

    Args:
      model: its shapes.
      config: resolved, but for the number of pages.
      attention: who attends.
    """
    assert config.num_slots and config.prefill_shapes
    kinds = (*config.generating_kinds, *(("propose",) if config.draft else ()))
    keys: list[tuple] = [
        *((kind, config.num_slots) for kind in kinds),
        *(("prefill", shape) for shape in config.prefill_shapes),
        *(("score", shape) for shape in config.prefill_shapes if config.scoring),
        ("sample", "full", config.num_slots),
        ("copy", _PAGES_PER_MOVE),
    ]
    return max(program_temp_bytes(key, model, config, attention) for key in keys)


def program_temp_bytes(
    key: tuple, model: ModelConfig, config: EngineConfig, attention: Attention
) -> int:
    """Upper bound of the temporaries of one program.

    Args:
      key: of `programs.program_keys`.
      model: its shapes.
      config: resolved, but for the number of pages.
      attention: who attends.
    """
    assert config.num_slots
    kind, slots = key[0], 2 * config.num_slots * _slot_bytes(config) + _SLACK_BYTES
    if kind in ("copy", "save", "load"):
        return _PAGES_PER_MOVE * page_bytes_of(model, config) + _SLACK_BYTES
    if kind in ("extras", "logits", "history"):
        return _SLACK_BYTES
    if kind == "propose":
        return _propose_bytes(key[1], model, config, attention) + slots
    logits = _logits_bytes(model)
    if kind == "sample":
        # The bucket's own rows are a slice of the logits.
        arrays = 1 if key[1] == "greedy" else _SAMPLE_ARRAYS
        if config.drafts_per_pass:  # counts and biases go through a branch
            arrays += 3
        return arrays * key[2] * logits + slots
    generates = kind in ("decode", "verify")
    places = 1 + config.drafts_per_pass if kind == "verify" else 1
    rows, tokens = (key[1], places) if generates else key[1]
    moving = _moving_bytes(model, config, attention, (rows, tokens))
    if generates:
        return moving + rows * tokens * logits + slots + _hidden_bytes(config, rows)
    if config.draft_shapes is not None and config.draft_shapes.has_pages:
        draft = config.draft_shapes.model
        moving += _moving_bytes(draft, config, attention, (rows, tokens))
    head = _HEAD_ARRAYS * max(rows, _HEAD_ROWS) * logits
    if kind == "score":
        head += _SCORE_ARRAYS * _SCORE_ROWS * logits
        head += rows * tokens * model.model_dim * 4
    return moving + head + slots


def _propose_bytes(
    rows: int, model: ModelConfig, config: EngineConfig, attention: Attention
) -> int:
    """Arrays like the histories; of a model also what it moves, and how it samples."""
    total = 6 * rows * _history_bytes(config)
    if (draft := config.draft_shapes) is None:
        return total
    tokens = 1 + config.drafts_per_pass
    total += _moving_bytes(draft.model, config, attention, (rows, tokens))
    arrays = _SAMPLE_ARRAYS + 3 + tokens
    return total + arrays * rows * _logits_bytes(model) + _hidden_bytes(config, rows)


def _moving_bytes(
    model: ModelConfig,
    config: EngineConfig,
    attention: Attention,
    shape: tuple[int, int],
) -> int:
    """What moves through the layers for so many rows and tokens."""
    rows, tokens = shape
    moving = rows * tokens * _token_bytes(model, config)
    return moving + _attention_bytes(model, config, attention, shape)


def _token_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Activations of a token within a layer: the MLP's, or those around attention."""
    assert config.param_dtype
    N, K, H = model.num_heads, model.num_kv_heads, model.head_dim
    widest = max(3 * model.ffw_dim, (N + 2 * K) * H + 2 * N * H)
    return (4 * model.model_dim + widest) * DTYPE_BYTES[config.param_dtype]


def _attention_bytes(
    model: ModelConfig,
    config: EngineConfig,
    attention: Attention,
    shape: tuple[int, int],
) -> int:
    """Blocks and scores of plain XLA, or the splits of a decode kernel."""
    rows, tokens = shape
    N, K, H = model.num_heads, model.num_kv_heads, model.head_dim
    if attention == "kernels" and _kernels_serve(model, config):
        keys = pages_per_request(config) * config.page_size
        group = -(-model.group_size // _SPLIT_ROWS) * _SPLIT_ROWS
        splits = -(-keys // SPLIT_KEYS) * rows * K * group * (H + 1) * 4
        return splits if tokens == 1 else 0
    together = min(rows, _CPU_GROUP) if attention == "cpu" else rows
    gathered = 3 * together * K * KEY_BLOCK * H * 4
    return gathered + 3 * rows * tokens * N * (KEY_BLOCK + H) * 4


def _kernels_serve(model: ModelConfig, config: EngineConfig) -> bool:
    """Whether the kernels take these shapes and types; else plain XLA does."""
    is_narrow = config.param_dtype == config.kv_dtype == "bfloat16"
    fits = model.head_dim in KERNEL_HEAD_DIMS and model.group_size <= KERNEL_GROUP
    return is_narrow and fits


def _logits_bytes(model: ModelConfig) -> int:
    return 4 * model.vocab_size


def _mask_bytes(model: ModelConfig) -> int:
    return 4 * -(-model.vocab_size // 32)


def _slot_bytes(config: EngineConfig) -> int:
    words = _SLOT_WORDS + config.max_stop_ids + pages_per_request(config)
    return 4 * words + _SLOT_FLAGS


def _history_bytes(config: EngineConfig) -> int:
    """A row's tokens and drafts."""
    assert config.max_context_len
    drafts = config.drafts_per_pass
    return 4 * (config.max_context_len + drafts) if drafts else 0


def _hidden_bytes(config: EngineConfig, rows: int) -> int:
    """Hidden states of the target that a proposer reads."""
    assert config.param_dtype
    if config.draft_shapes is None:
        return 0
    each = config.draft_shapes.hidden_dim * DTYPE_BYTES[config.param_dtype]
    return rows * (1 + config.drafts_per_pass) * each


def _drafting_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """A row of `drafting.Drafting`."""
    if not config.drafts_per_pass:
        return 0
    row = (
        _history_bytes(config) + 5 + 4 * config.adapts_drafts + _hidden_bytes(config, 1)
    )
    if config.acceptance == "rejection" and config.draft_shapes is not None:
        row += config.drafts_per_pass * _logits_bytes(model)
    return row


def _extras_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """A row of counts, biases, forbidden sequences and the tokens before."""
    bad = config.max_bad_words * MAX_BAD_WORD_LEN
    return 4 * (2 * model.vocab_size + bad + MAX_BAD_WORD_LEN - 1)
