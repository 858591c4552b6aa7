"""What a start concludes from the bit-class probe: which buckets the engine may use.

In invariant mode an engine keeps to one bit class per role, so a request's bits do not
depend on which bucket its company led to. Where both roles, filling and generating, are
of one class, pages that decoding filled serve as prefixes too.
"""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from headrace.configs.schema import EngineConfig
from headrace.engine.draft_control import PassCosts
from headrace.engine.draft_costs import measure_costs
from headrace.engine.ledger import Ledger
from headrace.engine.model_runner import ModelRunner
from headrace.engine.probe import UNSTEADY, best_shapes, probe
from headrace.engine.programs import (
    VARIANTS,
    generating_keys,
    program_name,
)

logger = logging.getLogger(__name__)


def warm_up(
    runner: ModelRunner, stored: Mapping[str, Any] | None = None
) -> EngineConfig:
    """Probes, writes the verdict into the ledger, and narrows the buckets.

    Args:
      runner: with every program compiled and no request in it.
      stored: `Ledger.facts_to_store` of an earlier start of the same programs; what is
        not there is found out.

    Returns:
      The config whose buckets the engine may use.

    Raises:
      ValueError: invariant mode cannot be had with these buckets.
    """
    ledger, stored = runner.ledger, stored or {}
    classes = stored.get("classes")
    if classes is None:
        classes = probe(runner)
    if runner.config.draft is not None:
        costs = stored.get("costs")
        ledger.pass_costs = (
            {bucket: PassCosts(**values) for bucket, values in costs}
            if costs
            else measure_costs(runner)
        )
    for name, letter in classes.items():
        ledger.entries[name].bit_class = letter
    assert all(
        e.bit_class != "-" or e.role in ("moving", "drafting")
        for e in ledger.entries.values()
    )
    config = runner.config
    if config.numerics == "invariant":
        config = _narrow(config, ledger)
    # Fast mode makes no claim, so there any page will do.
    ledger.caches_output = config.numerics == "fast" or _is_one_class(config, ledger)
    for role in ("generating", "filling", "sampling"):
        ledger.verdict[role] = _verdict(ledger, role)
        logger.info("%s: %s", role, ledger.verdict[role])
    ledger.verdict["cached pages"] = (
        "of prompts and outputs" if ledger.caches_output else "of prompts only"
    )
    return config


def _narrow(config: EngineConfig, ledger: Ledger) -> EngineConfig:
    """Keeps, per role, the programs of one class, and marks the others unused."""
    buckets, shapes = config.decode_batch_sizes or (), config.prefill_shapes or ()

    def letter(key: tuple) -> str:
        return ledger.entries[program_name(key)].bit_class

    kinds = config.generating_kinds
    wanted = letter((kinds[0], buckets[-1]))
    kept = tuple(b for b in buckets if letter((kinds[0], b)) == wanted)
    if any(letter((kind, b)) != wanted for kind in kinds[1:] for b in kept):
        # Whoever drafts now and then needs one class of passes with and without.
        logger.info("drafts in every step: passes without are another bit class")
        config = dataclasses.replace(config, adapts_drafts=False)
    best = best_shapes({shape: letter(("prefill", shape)) for shape in shapes})
    scored = shapes if config.scoring else ()
    filled = {letter(("score", shape)) for shape in scored if shape in best}
    filled.add(letter(("prefill", best[0])))
    drawn = {letter(("sample", v, b)) for v in VARIANTS for b in kept}
    chosen = {wanted, *filled, *drawn}
    is_split = len(drawn) > 1 or len(filled) > 1
    if is_split or any(c.endswith(UNSTEADY) for c in chosen):
        raise ValueError(
            "numerics 'invariant' cannot be had: the probe found programs whose bits "
            "depend on a row's place or company; use numerics 'fast', or other "
            f"buckets.\n{ledger.table()}"
        )
    for key in [
        *((kind, b) for kind in kinds for b in buckets if b not in kept),
        *(("decode", b) for b in kept if not config.adapts_drafts and len(kinds) > 1),
        *(("prefill", shape) for shape in shapes if shape not in best),
        *(("score", shape) for shape in scored if shape not in best),
        *(("sample", v, b) for v in VARIANTS for b in buckets if b not in kept),
    ]:
        ledger.entries[program_name(key)].used = False
    return dataclasses.replace(config, decode_batch_sizes=kept, prefill_shapes=best)


def _is_one_class(config: EngineConfig, ledger: Ledger) -> bool:
    """Whether the kept programs of filling and generating give the same bits."""
    keys = [
        *generating_keys(config),
        *(("prefill", shape) for shape in config.prefill_shapes or ()),
    ]
    letters = {ledger.entries[program_name(key)].bit_class for key in keys}
    return len(letters) == 1 and not letters.pop().endswith(UNSTEADY)


def _verdict(ledger: Ledger, role: str) -> str:
    groups: dict[str, list[str]] = {}
    for entry in ledger.entries.values():
        if entry.role == role:
            groups.setdefault(entry.bit_class, []).append(entry.name)
    if len(groups) == 1:
        return f"all {sum(map(len, groups.values()))} programs in one bit class"
    parts = [f"{letter}: {', '.join(names)}" for letter, names in groups.items()]
    return f"{len(groups)} bit classes ({'; '.join(parts)})"
