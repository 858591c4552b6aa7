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
        self._text: list[str] = []
        self._logprobs: list[dict[int, Logprob]] | None = None
        if params.logprobs is not None:
            self._logprobs = []
        self._told_tokens, self._told_pieces = 0, 0

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self.request.finish_reason is not None

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return len(self.request.output_token_ids)

    @property
    def has_news(self) -> bool:
        """Whether `take_delta` would tell something."""
        return self.is_finished or self.num_tokens > self._told_tokens

    def add_token(self) -> None:
        """Takes in the token that the scheduler has just booked."""
        request = self.request
        if self._logprobs is not None:
            self._logprobs.append(self._named(request.output_logprobs[-1]))
        if self._detokenizer is None:
            return
        # A model's end token is special, so the decoder itself leaves it out.
        self._text.append(self._detokenizer.push(request.output_token_ids[-1:]))
        if self.is_finished:
            self._text.append(self._detokenizer.flush())

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
        return self._output(0, 0)

    def take_delta(self) -> RequestOutput:
        """What came since the last call."""
        output = self._output(self._told_tokens, self._told_pieces)
        self._told_tokens, self._told_pieces = self.num_tokens, len(self._text)
        return output

    def _output(self, from_token: int, from_piece: int) -> RequestOutput:
        request = self.request
        logprobs = self._logprobs
        completion = CompletionOutput(
            text="".join(self._text[from_piece:]),
            token_ids=request.output_token_ids[from_token:],
            cumulative_logprob=(
                None if logprobs is None else request.cumulative_logprob
            ),
            logprobs=None if logprobs is None else logprobs[from_token:],
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            seed=request.seed,
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[completion],
            finished=self.is_finished,
            metrics=RequestMetrics(
                arrival_s=request.arrival_s,
                first_token_s=request.first_token_s,
                finished_s=request.finished_s,
                num_prompt_tokens=request.prompt_len,
                num_output_tokens=self.num_tokens,
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
