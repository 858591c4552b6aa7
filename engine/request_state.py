"""A request as its user sees it: text, log-probabilities, deltas. No jax.

The scheduler owns the Request; this holds what is made of its tokens.
"""

from headrace.engine.detokenizer import Detokenizer
from headrace.engine.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from headrace.engine.prompts import Prompt
from headrace.engine.request import Request, TokenLogprobs
from headrace.engine.tokenizer import Tokenizer


class RequestState:
    """Accumulates one request's output.

    One thread adds, another may read: a token counts only once its text and its
    log-probabilities are there, the end only once the last text is.

    Args:
      request: in the scheduler.
      tokenizer: None where the model has none; the text then stays empty.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self._tokenizer = tokenizer
        params = request.params
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer, skip_special_tokens=params.skip_special_tokens
            )
        self._text: list[str] = []  # a piece per token, then what was held back
        self._logprobs: list[dict[int, Logprob]] | None = None
        if params.logprobs is not None:
            self._logprobs = []
        self._num_ready, self._is_ended = 0, False
        self._num_told, self._has_told_end = 0, False

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self._is_ended

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return self._num_ready

    @property
    def has_news(self) -> bool:
        """Whether `take_delta` would tell something."""
        is_end_news = self._is_ended and not self._has_told_end
        return is_end_news or self._num_ready > self._num_told

    def add_token(self) -> None:
        """Takes in the token that the scheduler has just booked, and maybe the end."""
        request = self.request
        if self._logprobs is not None:
            self._logprobs.append(self._named(request.output_logprobs[-1]))
        text = ""
        if self._detokenizer is not None:
            # A model's end token is special, so the decoder itself leaves it out.
            text = self._detokenizer.push(request.output_token_ids[-1:])
        self._text.append(text)
        self._num_ready += 1
        if request.is_finished:
            self.end()

    def end(self) -> None:
        """The request has ended; a second call does nothing."""
        if not self._is_ended:
            flush = self._detokenizer.flush() if self._detokenizer is not None else ""
            self._text.append(flush)
            self._is_ended = True

    def _named(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        return {
            token_id: Logprob(value, rank, self._token_text(token_id))
            for token_id, (value, rank) in entry.items()
        }

    def _token_text(self, token_id: int) -> str | None:
        if self._tokenizer is None or not self.request.params.detokenize:
            return None
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def output(self) -> RequestOutput:
        """Everything so far."""
        return self._output(0)

    def take_delta(self) -> RequestOutput:
        """What came since the last call."""
        output = self._output(self._num_told)
        self._num_told += len(output.outputs[0].token_ids)
        self._has_told_end = output.finished
        return output

    def _output(self, start: int) -> RequestOutput:
        request = self.request
        # The end first: it is set last, so all that it stands for is there.
        is_ended = self._is_ended
        ready = self._num_ready
        logprobs = self._logprobs
        completion = CompletionOutput(
            text="".join(self._text[start : ready + is_ended]),
            token_ids=request.output_token_ids[start:ready],
            cumulative_logprob=(
                None if logprobs is None else request.cumulative_logprob
            ),
            logprobs=None if logprobs is None else logprobs[start:ready],
            finish_reason=request.finish_reason if is_ended else None,
            stop_reason=request.stop_reason,
            seed=request.seed,
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[completion],
            finished=is_ended,
            metrics=RequestMetrics(
                arrival_s=request.arrival_s,
                first_token_s=request.first_token_s,
                finished_s=request.finished_s,
                num_prompt_tokens=request.prompt_len,
                num_output_tokens=ready,
            ),
        )


def error_output(prompt: Prompt, request_id: str, message: str) -> RequestOutput:
    """The output of a request that could not run."""
    return RequestOutput(
        request_id=request_id,
        prompt=prompt.text,
        prompt_token_ids=(),
        outputs=[CompletionOutput(finish_reason="error")],
        finished=True,
        error=message,
    )
