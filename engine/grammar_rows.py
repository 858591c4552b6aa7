"""Grammars of the requests in a step: they take in tokens and fill the step's masks.

A grammar that fails ends its own request and harms no other. Host side, no jax.
"""

import numpy as np

from headrace.engine.request import Request
from headrace.engine.schedule import Schedule


def advance_grammar(request: Request) -> bool:
    """Tells a request's grammar of its newest token.

    Returns:
      Whether the request is over by it: nothing can follow, or the grammar has failed,
      which the request's `finish_message` then says.
    """
    grammar = request.grammar
    if grammar is None or request.finish_reason == "stop":
        return False
    try:
        grammar.advance(request.output_token_ids[-1])
        is_over = not grammar.can_go_on
        if is_over and not grammar.is_complete:
            request.finish_message = "structured_outputs came to a dead end"
    except ValueError as error:
        request.finish_message = str(error)
        return True
    return is_over


def fill_masks(
    schedule: Schedule, num_slots: int, num_words: int
) -> tuple[np.ndarray, list[Request]]:
    """What the grammars of a step's rows allow next.

    Args:
      schedule: its requests' grammars have taken in all tokens before this step's.
      num_slots: rows.
      num_words: 32 ids each.

    Returns:
      [B, W] int32, all bits set in rows without a grammar; and the requests whose
      grammar has failed, each with its `finish_message`.
    """
    mask_BW = np.full((num_slots, num_words), -1, np.int32)
    failed = []
    for slot, request in schedule.sampled:
        if request.grammar is None or request.is_finished:
            continue
        num_tokens = len(request.output_token_ids)
        try:
            request.grammar.fill_mask(
                mask_BW[slot],
                stop_ids=request.stop_ids,
                allow_stop=num_tokens >= request.params.min_tokens,
            )
        except ValueError as error:
            request.finish_message = str(error)
            mask_BW[slot] = -1
            failed.append(request)
    return mask_BW, failed
