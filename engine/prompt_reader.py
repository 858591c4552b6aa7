"""Prompts and conversations to token ids, with a model's tokenizer. No jax."""

from collections.abc import Sequence
from typing import Any

from headrace.engine import chat_template, prompts
from headrace.engine.tokenizer import Tokenizer


class PromptReader:
    """Reads what users pass for one model.

    Args:
      tokenizer: None where the model has none; only token ids can then be read.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._maybe_tokenizer = tokenizer

    @property
    def _tokenizer(self) -> Tokenizer:
        if self._maybe_tokenizer is None:
            raise ValueError(
                "this model has no tokenizer: pass token ids as the prompt"
            )
        return self._maybe_tokenizer

    def ids(self, prompt: prompts.Prompt, *, add_bos: bool) -> Sequence[int]:
        """Token ids of a prompt.

        Raises:
          ValueError: it is text, and there is no tokenizer or the text is no Unicode.
        """
        if prompt.token_ids is not None:
            return prompt.token_ids
        return self._tokenizer.encode(prompt.text or "", add_bos=add_bos)

    def chat(self, messages: Any, *, add_generation_prompt: bool) -> prompts.Prompt:
        """One conversation as the chat template has it.

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
        )
        return prompts.Prompt(text=text, is_chat=True)
