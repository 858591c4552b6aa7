"""A fake engine that answers in upper case, and a way to run a script's main."""

import dataclasses
import time

import pytest
from absl import flags
from absl.testing import flagsaver

from headrace.configs import load_config, parse_config
from headrace.engine.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from headrace.engine.prompts import Prompt
from headrace.engine.sampling_params import SamplingParams
from headrace.scripts import engine_flags

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
)


@dataclasses.dataclass
class FakeTokenizer:
    """One token per byte."""

    chat_template: str | None = TEMPLATE
    bos_token: str | None = None
    eos_token: str | None = None

    def encode(self, text):
        return list(text.encode())


class FakeLedger:
    def table(self):
        return "the ledger"


class FakeLLM:
    """Answers a prompt with its own bytes in upper case, one token each."""

    def __init__(self, tokenizer):
        model, engine = parse_config(load_config("tiny"))
        self.model_config = model
        self.engine_config = dataclasses.replace(engine, param_dtype="float32")
        self.tokenizer = tokenizer
        self.ledger = FakeLedger()
        self.calls = []

    def _answer(self, prompt, params):
        text, ids = None, prompt
        if isinstance(prompt, Prompt):
            text = prompt.text
        elif isinstance(prompt, dict):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if text is not None:
            ids = self.tokenizer.encode(text)
        if not ids:
            raise ValueError("the prompt must have at least 1 token, got 0")
        self.calls.append((text if text is not None else list(ids), params))
        reply = bytes(i % 128 for i in ids).decode().upper().encode()
        if params.ignore_eos:
            reply = (reply * params.max_tokens)[: params.max_tokens]
        now = time.perf_counter()
        tokens = list(reply[: params.max_tokens])
        logprobs = None
        if params.logprobs is not None:
            logprobs = [{token: Logprob(-0.5, 1, chr(token))} for token in tokens]
        is_text = self.tokenizer is not None and params.detokenize
        return RequestOutput(
            request_id="0",
            prompt=text,
            prompt_token_ids=tuple(ids),
            outputs=[
                CompletionOutput(
                    text=bytes(tokens).decode() if is_text else "",
                    token_ids=tokens,
                    logprobs=logprobs,
                    finish_reason="length",
                )
            ],
            finished=True,
            metrics=RequestMetrics(
                arrival_s=now,
                first_token_s=now + 0.01,
                finished_s=now + 0.01 + 0.002 * (len(tokens) - 1),
                num_prompt_tokens=len(ids),
                num_output_tokens=len(tokens),
            ),
        )

    def generate(self, prompts, sampling_params=None, *, use_tqdm=True):
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        outputs = []
        for prompt, params in zip(prompts, sampling_params, strict=True):
            try:
                outputs.append(self._answer(prompt, params))
            except ValueError as error:
                if len(prompts) == 1:
                    raise
                failed = CompletionOutput(finish_reason="error")
                outputs.append(
                    RequestOutput(
                        request_id="0",
                        prompt=None,
                        prompt_token_ids=(),
                        outputs=[failed],
                        finished=True,
                        error=str(error),
                    )
                )
        return outputs

    def stream(self, prompt, sampling_params=None):
        # Not a generator itself: like the engine's, this call refuses a bad prompt.
        return self._pieces(self._answer(prompt, sampling_params))

    def _pieces(self, whole):
        completion = whole.outputs[0]
        for place, token in enumerate(completion.token_ids):
            is_last = place + 1 == len(completion.token_ids)
            piece = CompletionOutput(
                text=completion.text[place : place + 1],
                token_ids=[token],
                logprobs=completion.logprobs and completion.logprobs[place:][:1],
                finish_reason="length" if is_last else None,
            )
            yield dataclasses.replace(whole, outputs=[piece], finished=is_last)

    def stream_chat(self, messages, sampling_params=None):
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            raise ValueError("this model has no chat template; use generate")
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return self.stream({"prompt": text + "<assistant>"}, sampling_params)


@pytest.fixture
def fake_llm(monkeypatch):
    """Makes the scripts build a fake engine; `fake_llm.tokenizer` may be changed."""
    llm = FakeLLM(FakeTokenizer())
    monkeypatch.setattr(engine_flags, "build_llm", lambda: llm)
    return llm


@pytest.fixture
def run_main():
    """Returns a function: script module and arguments -> exit code."""

    def run(script, *arguments):
        with flagsaver.flagsaver():
            # Without a program name of its own absl would take the first argument.
            return script.main(flags.FLAGS(["script", *arguments]))

    return run
