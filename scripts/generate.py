"""Prompt in, text out: one prompt, a chat, or a file of prompts.

    python -m headrace.scripts.generate "Why is the sky blue?"
    python -m headrace.scripts.generate --interactive
    python -m headrace.scripts.generate --prompts_file=in.jsonl --out=out.jsonl
    python -m headrace.scripts.generate --config=tiny "5 6 7"     (ids in, ids out)

A prompt is sent as a chat message where the model has a chat template; `--raw`
completes the bare text. Text goes to standard output, all else to standard error.
"""

import json
import sys
from collections.abc import Iterable
from typing import Any, TextIO

import tqdm
from absl import app, flags

from headrace.engine import chat_template
from headrace.engine.outputs import RequestOutput
from headrace.engine.prompts import Prompt
from headrace.engine.request_state import error_output
from headrace.engine.sampling_params import SamplingParams
from headrace.scripts import engine_flags
from headrace.scripts.prompts_file import (
    PromptRow,
    read_rows,
    result_fields,
    results_file,
    whole_output,
)

FLAGS = flags.FLAGS

flags.DEFINE_string("prompt", None, "The prompt; the words after the flags do as well.")
flags.DEFINE_string("chat", None, "A message; refused without a chat template.")
flags.DEFINE_bool("interactive", False, "Chat until the end of the input.")
flags.DEFINE_string("system", None, "System message of a chat.")
flags.DEFINE_bool("raw", False, "Complete the prompt as it stands, no chat template.")
flags.DEFINE_string(
    "prompts_file", None, "One prompt a line, or .jsonl (see prompts_file.py)."
)
flags.DEFINE_string("out", None, "JSONL file for the results of --prompts_file.")
flags.DEFINE_bool("stream", True, "Print text as it comes.")
flags.DEFINE_integer("max_tokens", 256, "Most tokens to generate.")
flags.DEFINE_float("temperature", 0.0, "0 is greedy.")
flags.DEFINE_float("top_p", 1.0, "Mass of the nucleus; 1 is off.")
flags.DEFINE_integer("top_k", 0, "Likeliest tokens kept; 0 is off.")
flags.DEFINE_float("min_p", 0.0, "Least part of the likeliest's chance; 0 is off.")
flags.DEFINE_float("repetition_penalty", 1.0, "Of tokens seen before; 1 is off.")
flags.DEFINE_multi_string("stop", [], "Text that ends the output. May be repeated.")
flags.DEFINE_integer("seed", None, "Makes sampling repeatable.")
flags.DEFINE_integer("logprobs", None, "Print this many log-probabilities per token.")
flags.DEFINE_bool("ignore_eos", False, "Go on after the model's end token.")


def sampling_params() -> SamplingParams:
    """The flags as SamplingParams.

    Raises:
      ValueError: a value out of its range.
    """
    names = (
        "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
        "stop", "seed", "logprobs", "ignore_eos",
    )  # fmt: skip
    values = {name: FLAGS[name].value for name in names}
    return SamplingParams(**values)


def main(argv: list[str]) -> int:
    """Returns the exit code: 0, or 1 where something was refused or failed."""
    return engine_flags.exit_code(lambda: run(argv[1:]))


def run(words: list[str]) -> int:
    """Runs what the flags ask for; `words` is the prompt as positional arguments.

    Raises:
      ValueError: flags that do not fit together, or a refused prompt.
    """
    source, prompt = _source(words)
    params = sampling_params()
    if source == "prompts_file":
        rows = read_rows(FLAGS.prompts_file, params)
        # Before the engine, whose start takes a while: a wrong path is told at once.
        with results_file(FLAGS.out) as file:
            return run_file(_build_llm(), rows, file)
    llm = _build_llm()
    if source == "interactive":
        return converse(llm, params)
    show(llm, _conversation(llm, prompt) or _bare_prompt(llm, prompt), params)
    return 0


def _build_llm() -> Any:
    llm = engine_flags.build_llm()
    if FLAGS.verbosity >= 1:
        print(llm.ledger.table(), file=sys.stderr)
    return llm


def _source(words: list[str]) -> tuple[str, str]:
    """Where the prompt comes from, and the prompt if there is one already."""
    given = {
        "prompt": FLAGS.prompt,
        "words": " ".join(words) if words else None,
        "chat": FLAGS.chat,
        "prompts_file": FLAGS.prompts_file,
        "interactive": FLAGS.interactive or None,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"choose one source of prompts, got {named}")
    if FLAGS.raw and (FLAGS.chat is not None or FLAGS.system is not None):
        raise ValueError("--raw leaves the chat template out; drop --chat and --system")
    if FLAGS.out is not None and FLAGS.prompts_file is None:
        raise ValueError("--out holds the results of --prompts_file, which is not set")
    source, text = "prompt", ""
    if named:
        source = named[0]
        text = str(given[source])
    elif sys.stdin.isatty():
        source = "interactive"
    else:
        text = sys.stdin.read().strip("\n")
    if not text and source != "interactive":
        raise ValueError("no prompt: give one as an argument, or --help for the flags")
    return source, text


def _has_template(llm: Any) -> bool:
    return llm.tokenizer is not None and llm.tokenizer.chat_template is not None


def _conversation(llm: Any, text: str) -> list[dict[str, str]]:
    """The text as chat messages, or [] where it is to be completed as it stands."""
    must_chat = FLAGS.chat is not None or FLAGS.system is not None
    if FLAGS.raw or not (_has_template(llm) or must_chat):
        return []
    system = [{"role": "system", "content": FLAGS.system}] if FLAGS.system else []
    return [*system, {"role": "user", "content": text}]


def _bare_prompt(llm: Any, text: str) -> dict[str, Any]:
    if llm.tokenizer is not None:
        return {"prompt": text}
    try:
        ids = [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(
            f"this model has no tokenizer: the prompt must be token ids such as "
            f"'5 6 7', got {text!r:.80}"
        ) from None
    return {"prompt_token_ids": ids}


def show(llm: Any, prompt: Any, params: SamplingParams) -> str:
    """Prints one reply, as it comes or at its end, and returns its text.

    Args:
      llm: the engine.
      prompt: messages as a list, or a prompt as a mapping.
      params: sampling.

    Raises:
      ValueError: the engine refuses the prompt.
    """
    start = llm.stream_chat if isinstance(prompt, list) else llm.stream
    text, steps = "", []
    for output in start(prompt, params):
        piece = output.outputs[0]
        word = piece.text
        if llm.tokenizer is None:
            word = "".join(f"{token_id} " for token_id in piece.token_ids)
        text += word
        steps += zip(piece.token_ids, piece.logprobs or (), strict=False)
        if FLAGS.stream:
            print(word, end="", flush=True)
    print("" if FLAGS.stream else text)
    for token_id, step in steps:
        _print_logprobs(token_id, step)
    _print_summary(output)
    return text


def _print_logprobs(token_id: int, step: dict[int, Any]) -> None:
    for other, one in step.items():
        mark = "*" if other == token_id else " "
        print(f"{mark} {other:>7} {one.logprob:>9.4f} {one.rank:>6} ", end="")
        print("" if one.decoded_token is None else repr(one.decoded_token))


def _print_summary(output: RequestOutput) -> None:
    completion, metrics = output.outputs[0], output.metrics
    line = f"[{completion.finish_reason}"
    if metrics is not None and metrics.first_token_s is not None:
        count = metrics.num_output_tokens
        first = metrics.first_token_s - metrics.arrival_s
        line += f", {metrics.num_prompt_tokens} + {count} tokens"
        line += f", first after {first:.2f} s"
        if count > 1 and metrics.finished_s is not None:
            rest = metrics.finished_s - metrics.first_token_s
            line += f", then {(count - 1) / rest:.1f} tokens/s"
    print(line + "]", file=sys.stderr)


def converse(llm: Any, params: SamplingParams) -> int:
    """A chat over lines of input; without a template each line stands alone."""
    history: list[dict[str, str]] = []
    while True:
        try:
            line = input("> ")
        except EOFError:
            return 0
        if not line.strip():
            continue
        turn = _conversation(llm, line)
        messages = [*history, turn[-1]] if history and turn else turn
        try:
            reply = show(llm, messages or _bare_prompt(llm, line), params)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            continue
        except KeyboardInterrupt:
            print()
            continue
        if turn:
            history = [*messages, {"role": "assistant", "content": reply}]


def run_file(llm: Any, rows: list[PromptRow], file: TextIO) -> int:
    """Runs a file's rows together; returns 1 if any of them could not run.

    Results are written in the order of the rows, each once it and all before it have
    finished.
    """
    started = [_start_row(llm, row) for row in rows]
    failed = []
    # Lines of results and a bar on the same terminal would break each other.
    quiet = file is sys.stdout or not sys.stderr.isatty()
    with tqdm.tqdm(started, disable=quiet, unit="row") as bar:
        for row, pieces in zip(rows, bar, strict=True):
            output = whole_output(pieces)
            print(json.dumps(result_fields(row, output)), file=file, flush=True)
            if output.error:
                failed.append(row.id)
    if failed:
        print(f"error: {len(failed)} of {len(rows)} failed: {failed}", file=sys.stderr)
    return 1 if failed else 0


def _start_row(llm: Any, row: PromptRow) -> Iterable[RequestOutput]:
    """The row's stream; where it cannot run, its error as the only output."""
    try:
        if row.error is not None:
            raise ValueError(row.error)
        return llm.stream(_file_prompt(llm, row), row.params)
    except ValueError as error:
        return [error_output(Prompt(), str(row.id), str(error))]


def _file_prompt(llm: Any, row: PromptRow) -> Any:
    messages = row.content if row.kind == "messages" else None
    if row.kind == "line":
        messages = _conversation(llm, row.content)
        if not messages:
            return _bare_prompt(llm, row.content)
    if messages is None:
        return {row.kind: row.content}
    tokenizer = llm.tokenizer
    text = chat_template.render(
        tokenizer and tokenizer.chat_template,
        messages,
        bos_token=tokenizer and tokenizer.bos_token,
        eos_token=tokenizer and tokenizer.eos_token,
    )
    return Prompt(text=text, is_chat=True)


if __name__ == "__main__":
    app.run(main)
