"""Prompts and conversations to token ids, with a model's tokenizer. No jax."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace.engine import chat_template, prompts
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.text_rules import TextRules, TokenRules
from headrace.engine.tokenizer import Tokenizer

# Some 0.1 ms of tokenizing. A thread's wake and the way back take longer, and while
# other threads are at work up to a switch interval (5 ms) each.
_QUICK_CHARS = 256


class ReadPrompt(NamedTuple):
    """All text of a request, brought to ids."""

    token_ids: Sequence[int]
    rules: TokenRules


class PromptReader:
    """Reads what users pass for one model.

    Args:
      tokenizer: None where the model has none; only token ids can then be read.
      rules: of the model.
    """

    def __init__(self, tokenizer: Tokenizer | None, rules: TextRules) -> None:
        self._maybe_tokenizer, self._rules = tokenizer, rules

    @property
    def _tokenizer(self) -> Tokenizer:
        if self._maybe_tokenizer is None:
            raise ValueError(
                "this model has no tokenizer: pass token ids as the prompt"
            )
        return self._maybe_tokenizer

    def is_quick(self, prompt: prompts.Prompt, params: SamplingParams) -> bool:
        """Whether `read` takes less time than a thread would to wake up for it."""
        if params.structured_outputs is not None or params.bad_words:
            return False
        return len(prompt.text or "") <= _QUICK_CHARS or prompt.token_ids is not None

    def read(self, prompt: prompts.Prompt, params: SamplingParams) -> ReadPrompt:
        """What of a request takes long: a long text, a large schema. Hold no lock.

        Raises:
          ValueError: see `ids` and `TextRules.resolve`.
        """
        # A rendered chat brings its own first token.
        ids = self.ids(prompt, add_bos=not prompt.is_chat)
        return ReadPrompt(ids, self._rules.resolve(params))

    def ids(self, prompt: prompts.Prompt, *, add_bos: bool) -> Sequence[int]:
        """Token ids of a prompt.

        Raises:
          ValueError: it is text, and there is no tokenizer or the text is no Unicode.
        """
        if prompt.token_ids is not None:
            return prompt.token_ids
        return self._tokenizer.encode(prompt.text or "", add_bos=add_bos)

    def chat(
        self, messages: Any, *, add_generation_prompt: bool, **variables: Any
    ) -> prompts.Prompt:
        """One conversation as the chat template has it, with what else it knows.

        Raises:
          ValueError: there is no tokenizer or template, or the template refuses.
        """
        tokenizer = self._tokenizer
        text = chat_template.render(
            tokenizer.chat_template,
            messages,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
        return prompts.Prompt(text=text, is_chat=True)
