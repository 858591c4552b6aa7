"""An engine as an offline job sees it: rows in, finished rows out, a turn at a time."""

import dataclasses
import datetime
from typing import Any, NamedTuple, Protocol

from headrace.configs.schema import EngineConfig
from headrace.engine.admission import QueueFullError
from headrace.engine.outputs import RequestOutput
from headrace.engine.prompts import Prompt, as_prompt
from headrace.engine.request_state import RequestState
from headrace.scripts.batch_journal import JobError
from headrace.scripts.batch_rows import Row


class Finished(NamedTuple):
    """A row, and all that came of it."""

    row: Row
    output: RequestOutput


class RowEngine(Protocol):
    """What a job needs of an engine.

    Attributes:
      max_open: rows that keep it busy; more only take memory.
      num_open: rows that have not ended.
      num_tokens: output tokens since its start.
    """

    max_open: int

    @property
    def num_open(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    def submit(self, row: Row) -> None:
        """Takes a row.

        Raises:
          ValueError: the row cannot run.
        """
        ...

    def turn(self) -> list[Finished]:
        """Goes on with all rows; gives those that have ended.

        Raises:
          JobError: the engine has failed; its rows are no error rows.
        """
        ...


class LLMRows:
    """An LLM as a RowEngine; nobody else may use it meanwhile.

    Args:
      llm: loaded.
      chat_date: what a chat template that asks for today's date is told: the day of
        the run would change the prompt.
    """

    def __init__(self, llm: Any, chat_date: datetime.date) -> None:
        self._llm, self._loop = llm, llm._loop
        self._chat_date = chat_date
        self._open: dict[str, tuple[Row, RequestState]] = {}
        self._ready: list[Finished] = []
        self._num_tokens = 0
        self.max_open = 2 * llm.engine_config.num_slots

    @property
    def num_open(self) -> int:
        """Rows that have not been given back."""
        return len(self._open) + len(self._ready)

    @property
    def num_tokens(self) -> int:
        """Output tokens that turns have brought."""
        return self._num_tokens

    def submit(self, row: Row) -> None:
        """See RowEngine."""
        prompt = self._prompt(row)
        while True:
            try:
                state = self._llm._submit(prompt, row.params)
                break
            except QueueFullError:
                self._ready += self._turn()
        self._open[state.request_id] = (row, state)

    def turn(self) -> list[Finished]:
        """See RowEngine."""
        ready, self._ready = self._ready, []
        return ready or self._turn()

    def _turn(self) -> list[Finished]:
        try:
            news = self._loop.turn()
        except RuntimeError as error:
            raise JobError(
                f"{error}; the finished rows are safe: run the same command again"
            ) from error
        self._num_tokens += len(news)
        done = []
        for state in news:
            if state.is_finished and state.request_id in self._open:
                row, _ = self._open.pop(state.request_id)
                done.append(Finished(row, state.output()))
                self._loop.drop(state)
        return done

    def _prompt(self, row: Row) -> Prompt:
        if row.messages is None:
            return as_prompt(row.prompt)
        return self._llm._reader.chat(
            row.messages,
            add_generation_prompt=True,
            strftime_now=self._chat_date.strftime,
        )


def pinned(config: EngineConfig, stored: dict[str, Any] | None) -> EngineConfig:
    """The config of a job that goes on: its pool keeps its size.

    Left open, `num_pages` follows from the memory that is free at each start, and
    compiled shapes and the longest row follow from it.

    Args:
      config: as the flags say.
      stored: the engine's settings at the job's first start; None in a new job.
    """
    if config.num_pages is not None or not stored or not stored.get("num_pages"):
        return config
    return dataclasses.replace(config, num_pages=stored["num_pages"])
