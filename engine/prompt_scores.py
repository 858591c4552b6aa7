"""Log-probabilities of prompt tokens on their way from a chunk to a request. No jax."""

from collections.abc import Sequence

from headrace.engine.schedule import PrefillChunk, Scores


def book_prompt_scores(chunks: Sequence[PrefillChunk], scores: Scores) -> None:
    """Stores what a prefill call found, for the requests that asked.

    A chunk [start, start + length) tells of the prompt tokens one place further on. A
    prompt that is filled again stores the same once more.

    Args:
      chunks: rows of the call.
      scores: [R, T] of the token that follows each.
    """
    for row, chunk in enumerate(chunks):
        request = chunk.request
        num_top, found = request.params.prompt_logprobs, request.prompt_logprobs
        if num_top is None or found is None:
            continue
        end = min(chunk.start + chunk.length, request.prompt_len - 1)
        for place in range(chunk.start, end):
            token_id = request.prompt_token_ids[place + 1]
            found[place + 1] = scores.at((row, place - chunk.start), token_id, num_top)
