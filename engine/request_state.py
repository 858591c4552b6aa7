"""A request as its user sees it: text, log-probabilities, deltas. No jax.

The scheduler owns the Requests; this holds what is made of their tokens.
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
from headrace.engine.text_stream import TextStream
from headrace.engine.tokenizer import Tokenizer


class CompletionState:
    """Accumulates the output of one completion.

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
        self._visible = TextStream(
            params.stop or (), keeps_stop=params.include_stop_str_in_output
        )
        self._text: list[str] = []  # a piece per token, then what was held back
        self._logprobs: list[dict[int, Logprob]] | None = None
        if params.logprobs is not None:
            self._logprobs = []
        self.num_tokens, self.is_finished = 0, False
        self._num_told, self.has_told_end = 0, False

    @property
    def has_news(self) -> bool:
        """Whether `take_news` would tell something."""
        is_end_news = self.is_finished and not self.has_told_end
        return is_end_news or self.num_tokens > self._num_told

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found in the text."""
        return self._visible.stopped_by

    def add_token(self) -> None:
        """Takes in the token that the scheduler has just booked, and maybe the end.

        A stop string in its text is left for the caller to act on: `stopped_by`.
        """
        request = self.request
        if self._logprobs is not None:
            self._logprobs.append(self.named(request.output_logprobs[-1]))
        params, count = request.params, self.num_tokens + 1
        hides = (
            request.finish_reason == "stop" and not params.include_stop_str_in_output
        )
        text = ""
        if self._detokenizer is not None and not hides:
            text = self._detokenizer.push(request.output_token_ids[-1:])
            text = self._visible.push(text, may_stop=count > params.min_tokens)
        self._text.append(text)
        self.num_tokens = count
        if request.is_finished:
            self.end()

    def end(self) -> None:
        """The completion has ended; a second call does nothing."""
        if self.is_finished:
            return
        text = ""
        if self._detokenizer is not None:
            # An end that was decided otherwise stays what it is.
            may_stop = self.request.finish_reason == "length"
            may_stop &= self.num_tokens > self.request.params.min_tokens
            text = self._visible.push(self._detokenizer.flush(), may_stop=may_stop)
            text += self._visible.flush()
        if self.stopped_by is not None:
            self.request.finish_reason = "stop"
            self.request.stop_reason = self.stopped_by
        self._text.append(text)
        self.is_finished = True

    def named(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """A token's log-probabilities as users see them."""
        return {
            token_id: Logprob(value, rank, self._token_text(token_id))
            for token_id, (value, rank) in entry.items()
        }

    def _token_text(self, token_id: int) -> str | None:
        if self._tokenizer is None or not self.request.params.detokenize:
            return None
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def output(self, start: int = 0) -> CompletionOutput:
        """What there is from token `start` on."""
        request = self.request
        # The end first: it is set last, so all that it stands for is there.
        is_ended = self.is_finished
        ready = self.num_tokens
        logprobs = self._logprobs
        return CompletionOutput(
            index=request.index,
            text="".join(self._text[start : ready + is_ended]),
            token_ids=request.output_token_ids[start:ready],
            cumulative_logprob=(
                None if logprobs is None else request.cumulative_logprob
            ),
            logprobs=None if logprobs is None else logprobs[start:ready],
            finish_reason=request.finish_reason if is_ended else None,
            finish_message=request.finish_message if is_ended else None,
            stop_reason=request.stop_reason if is_ended else None,
            seed=request.seed,
        )

    def take_news(self) -> CompletionOutput:
        """What came since the last call; all so far where the request asks for that."""
        start = self._num_told if self.request.params.output_kind == "delta" else 0
        output = self.output(start)
        self._num_told = start + len(output.token_ids)
        self.has_told_end = output.finished()
        return output


class RequestState:
    """All completions of one request.

    Args:
      requests: one per completion, the leader first.
      tokenizer: None where the model has none.
    """

    def __init__(self, requests: list[Request], tokenizer: Tokenizer | None) -> None:
        self.request = requests[0]
        self.completions = [CompletionState(r, tokenizer) for r in requests]
        self._has_told_prompt = False
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def request_id(self) -> str:
        """Unique in its engine."""
        return self.request.request_id

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return all(one.is_finished for one in self.completions)

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return sum(one.num_tokens for one in self.completions)

    @property
    def has_news(self) -> bool:
        """Whether `take_news` would tell something."""
        if self.request.params.output_kind == "final_only" and not self.is_finished:
            return False
        return any(one.has_news for one in self.completions)

    def output(self) -> RequestOutput:
        """Everything so far."""
        outputs = [one.output() for one in self.completions]
        return self._output(outputs, all(one.finished() for one in outputs))

    def take_news(self) -> RequestOutput:
        """What came since the last call: the completions with news.

        In a stream of deltas the prompt's log-probabilities come once: with the first
        news after the prompt was filled, or with the end.
        """
        news = [one.take_news() for one in self.completions if one.has_news]
        output = self._output(news, all(one.has_told_end for one in self.completions))
        if self.request.params.output_kind == "delta":
            is_ready = self._prompt_logprobs is not None or output.finished
            if self._has_told_prompt or not is_ready:
                output.prompt_logprobs = None
            self._has_told_prompt |= is_ready
        return output

    def _output(
        self, outputs: list[CompletionOutput], is_finished: bool
    ) -> RequestOutput:
        request = self.request
        firsts = [one.request.first_token_s for one in self.completions]
        lasts = [one.request.finished_s for one in self.completions]
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=outputs,
            finished=is_finished,
            prompt_logprobs=self._named_prompt(),
            metrics=RequestMetrics(
                arrival_s=request.arrival_s,
                first_token_s=min((s for s in firsts if s is not None), default=None),
                finished_s=max((s for s in lasts if s is not None), default=None),
                num_prompt_tokens=request.prompt_len,
                num_output_tokens=self.num_tokens,
            ),
        )

    def _named_prompt(self) -> list[dict[int, Logprob] | None] | None:
        """What is known of the prompt; made once, since it can be long."""
        found = self.request.prompt_logprobs
        if found is None or self._prompt_logprobs is not None:
            return self._prompt_logprobs
        name = self.completions[0].named
        named = [None if entry is None else name(entry) for entry in found]
        if None not in named[1:]:
            self._prompt_logprobs = named
        return named


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
