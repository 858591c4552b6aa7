"""The engine as users hold it: loads, compiles, generates, streams.

One process, no globals: `del llm` (or `close`) frees the device memory.
"""

import functools
import logging
import os
import weakref
from collections.abc import Mapping
from typing import Any

from headrace.checkpoints.checkpoint import Checkpoint
from headrace.configs.schema import EngineConfig
from headrace.engine import prompts, scoring
from headrace.engine.batch_run import Batch
from headrace.engine.device_facts import device_facts
from headrace.engine.ledger import Ledger
from headrace.engine.loop import EngineLoop
from headrace.engine.model_runner import ModelRunner
from headrace.engine.outputs import RequestOutput
from headrace.engine.prompt_reader import PromptReader, ReadPrompt
from headrace.engine.request_state import RequestState
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.scoring import PerplexityOutput, ScoreOutput
from headrace.engine.start_up import compiled_runner, load_model
from headrace.engine.stream import Stream
from headrace.engine.tokenizer import HFTokenizer, Tokenizer

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2-135m-instruct"


class LLM:
    """A model, loaded, compiled and ready to generate.

    Args:
      model: a registry name, a folder, a .gguf file, or a hub id.
      config: an EngineConfig or a mapping of its keys; sizes left open follow from
        the model and the memory that is free.
      cache_dir: where downloads and compiled programs are kept; None is the
        platform's convention, or HEADRACE_CACHE_DIR.

    Raises:
      ValueError: an unknown model or config key, a damaged file, or sizes that do
        not fit the memory.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = DEFAULT_MODEL,
        *,
        config: EngineConfig | Mapping[str, Any] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        config, facts = _as_config(config), device_facts()
        checkpoint = load_model(model, config, facts, cache_dir)
        self._serve(checkpoint, *compiled_runner(checkpoint, config, facts, cache_dir))

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        *,
        config: EngineConfig | Mapping[str, Any] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> "LLM":
        """An engine over weights at hand, such as synthetic ones."""
        config, facts = _as_config(config), device_facts(checkpoint.params)
        llm = cls.__new__(cls)
        llm._serve(checkpoint, *compiled_runner(checkpoint, config, facts, cache_dir))
        return llm

    def _serve(
        self, checkpoint: Checkpoint, runner: ModelRunner, config: EngineConfig
    ) -> None:
        """Begins, over a runner that is compiled."""
        self.model_config, self.engine_config = checkpoint.config, config
        spec, self._runner = checkpoint.tokenizer, runner
        self.tokenizer: Tokenizer | None = HFTokenizer(spec) if spec else None
        self._loop = EngineLoop(
            runner,
            config,
            checkpoint.config,
            tokenizer=self.tokenizer,
            identity=checkpoint.identity,
        )
        self._reader = PromptReader(self.tokenizer, self._loop.text_rules)
        self._finalizer = weakref.finalize(self, self._loop.close)
        self._finalizer.atexit = False  # the process's end frees everything anyway

    @property
    def is_closed(self) -> bool:
        """Whether the device memory has been freed."""
        return not self._finalizer.alive

    @property
    def ledger(self) -> Ledger:
        """Every compiled program, and the probe's verdict."""
        return self._runner.ledger

    def generate(
        self,
        prompts_: Any,
        sampling_params: prompts.ParamsLike = None,
        *,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Completes prompts; the outputs are in the order of the prompts.

        Args:
          prompts_: a str, a list of token ids, {"prompt": str} or
            {"prompt_token_ids": [ids]}, or a list of these.
          sampling_params: one for all, or one for each.
          use_tqdm: show progress and output tokens per second.
          **options: `priority`, `tenant`, `uses_cache`, `deadline_s` and
            `queue_timeout_s` of all of them, see EngineLoop.submit. The other methods
            take them as well.

        Returns:
          One output per prompt. In a list, a prompt that cannot run has
          finish_reason "error" and its message; the others are not harmed.

        Raises:
          ValueError: the only prompt cannot run, or the arguments do not fit.
        """
        items = prompts.as_prompts_or_errors(prompts_)
        return self._batch(use_tqdm, options).run(items, sampling_params)

    def chat(
        self,
        messages: Any,
        sampling_params: prompts.ParamsLike = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several, through the model's chat template."""
        items: list[prompts.Prompt | ValueError] = []
        for conversation in prompts.as_conversations(messages):
            try:
                items.append(
                    self._reader.chat(
                        conversation, add_generation_prompt=add_generation_prompt
                    )
                )
            except ValueError as error:
                items.append(error)
        return self._batch(use_tqdm, options).run(items, sampling_params)

    def stream(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> Stream:
        """Yields a prompt's output piece by piece.

        Each output holds what came since the one before (of completions with news, by
        `index`); the last has finished=True. Closing the iterator frees its pages.

        Raises:
          ValueError: the prompt cannot run; raised by this call, not by the first
            `next`.
        """
        (params,) = prompts.spread_params(sampling_params, 1)
        state = self._submit(prompts.as_prompt(prompt), params, **options)
        return Stream(state, self._loop.turn, self._loop.drop)

    def stream_chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> Stream:
        """Like `stream`, for one conversation."""
        conversations = prompts.as_conversations(messages)
        if len(conversations) != 1:
            raise ValueError(
                f"stream_chat takes one conversation, got {len(conversations)}"
            )
        conversation = conversations[0]
        prompt = self._reader.chat(conversation, add_generation_prompt=True)
        return self.stream(prompt, sampling_params, **options)

    def score(
        self,
        prompts_: Any,
        continuations: Any,
        *,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[ScoreOutput]:
        """How likely the model finds continuations of prompts; see scoring.

        Args:
          prompts_: as for `generate`, with at least one token each.
          continuations: as many, each a str or a list of token ids. A text is
            tokenized by itself, not together with its prompt.
          use_tqdm: show progress.

        Raises:
          ValueError: the engine was built without `scoring`, the numbers differ, or
            the only pair cannot be scored; one of several has it as its `error`.
        """
        scorer = self._scorer(use_tqdm, options)
        return scoring.score(scorer, prompts_, continuations)

    def perplexity(
        self,
        text: Any,
        *,
        stride: int | None = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> PerplexityOutput:
        """Perplexity of one text, however long; see scoring.

        Args:
          text: a str or a list of token ids, of at least two tokens.
          stride: tokens by which the window moves; None is half a window.
          use_tqdm: show progress.

        Raises:
          ValueError: the engine was built without `scoring`, or the text is too short.
        """
        return scoring.perplexity(self._scorer(use_tqdm, options), text, stride)

    def _batch(self, use_tqdm: bool, options: Mapping[str, Any]) -> Batch:
        submit = functools.partial(self._submit, **options)
        return Batch(self._loop, submit, use_tqdm=use_tqdm)

    def _scorer(self, use_tqdm: bool, options: Mapping[str, Any]) -> scoring.Scorer:
        batch = self._batch(use_tqdm, options)
        return scoring.Scorer(self.engine_config, self._reader, batch)

    def close(self) -> None:
        """Frees the device memory; the object cannot be used afterwards."""
        self._finalizer()

    def stats(self) -> dict[str, Any]:
        """Counters, gauges and histograms since start, JSON-ready; see metrics."""
        return self._loop.stats()

    def _submit(
        self,
        prompt: prompts.Prompt,
        params: SamplingParams,
        read: ReadPrompt | None = None,
        **options: Any,
    ) -> RequestState:
        if self.is_closed:
            raise ValueError("this LLM is closed")
        ids, rules = read or self._reader.read(prompt, params)
        options |= {"prompt": prompt.text, "rules": rules}
        return self._loop.submit(ids, params, **options)


def _as_config(config: EngineConfig | Mapping[str, Any] | None) -> EngineConfig:
    if isinstance(config, EngineConfig):
        return config
    return EngineConfig.from_mapping(config or {})
