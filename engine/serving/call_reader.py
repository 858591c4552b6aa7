"""A call's prompt on its way to token ids, checked at each step. No jax."""

from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.engine.new_request import longest_request
from headrace.engine.prompt_reader import ReadPrompt
from headrace.engine.prompts import Prompt
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.serving.calls import Call, as_service_errors
from headrace.engine.serving.errors import ServiceError
from headrace.engine.serving.limits import ServiceLimits, check_at_most

if TYPE_CHECKING:
    from headrace.engine.async_llm import AsyncLLM


class ReadCall(NamedTuple):
    """A call that can run.

    Attributes:
      prompt: as the engine takes it.
      read: its ids and rules.
      most_tokens: of prompt and outputs together, that it can take.
    """

    prompt: Any
    read: ReadPrompt
    most_tokens: int


class CallReader:
    """Reads calls for one engine.

    Args:
      engine: has tokenizer and bounds.
      limits: of every call.
    """

    def __init__(self, engine: "AsyncLLM", limits: ServiceLimits) -> None:
        self._engine, self._limits = engine, limits

    async def read(self, call: Call) -> ReadCall:
        """All that can be refused of a call before it runs.

        Raises:
          ServiceError: it is wrong, or asks for too much.
        """
        self._limits.check_params(call.params)
        self._limits.check_times(call.deadline_s, call.queue_timeout_s)
        prompt = await self._prompt(call)
        with as_service_errors():
            read = await self._engine.read(prompt, call.params)
        most = self._most_tokens(len(read.token_ids), call.params)
        return ReadCall(prompt, read, most)

    async def _prompt(self, call: Call) -> Any:
        """What the engine takes, checked as far as that needs no tokenizer."""
        if (call.prompt is None) == (call.messages is None):
            raise ServiceError(
                "invalid_argument", "exactly one of prompt and messages must be given"
            )
        if call.messages is not None:
            self._limits.check_messages(call.messages)
            with as_service_errors():
                prompt = await self._engine.chat_prompt(call.messages)
            self._limits.check_text(prompt.text or "")
            return prompt
        if isinstance(call.prompt, str):
            self._limits.check_text(call.prompt)
            return call.prompt
        assert call.prompt is not None
        self.check_len(len(call.prompt))
        return Prompt(token_ids=call.prompt)

    def check_len(self, length: int) -> None:
        """Raises ServiceError invalid_argument for a prompt of too many tokens."""
        longest = longest_request(self._engine.llm.engine_config)[0]
        most = min(self._limits.max_prompt_tokens or longest, longest - 1)
        check_at_most("tokens of the prompt", length, most)

    def _most_tokens(self, prompt_len: int, params: SamplingParams) -> int:
        """Tokens that the request can take, checked."""
        self.check_len(prompt_len)
        longest = longest_request(self._engine.llm.engine_config)[0]
        outputs = min(params.max_tokens or longest, max(0, longest - prompt_len))
        return prompt_len + outputs * params.n
