"""One line of JSON per call, with how it went and without what it said."""

import datetime
import json

import pytest

from headrace import SamplingParams
from headrace.engine.serving import access_log
from headrace.engine.serving.calls import Call, CallRecord
from headrace.engine.serving.errors import ServiceError
from headrace.engine.serving.tenants import ANONYMOUS, Tenant

SECRET = "a secret in the prompt"
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def _served(serve, path, main, **options):
    """The lines that the calls of `main` left."""
    with access_log.opened(str(path)) as log:
        serve(main, observers=[log], **options)
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_a_line_tells_how_a_call_went_and_nothing_it_said(serve, tmp_path):
    async def main(service):
        call = Call(prompt=SECRET, params=PARAMS, request_id="mine")
        await service.generate(Tenant(name="a"), call)

    path = tmp_path / "access.jsonl"
    before = datetime.datetime.now(datetime.UTC)
    (line,) = _served(serve, path, main)
    assert SECRET not in path.read_text("utf-8")
    assert abs(datetime.datetime.fromisoformat(line.pop("time")) - before) < (
        datetime.timedelta(minutes=5)
    )
    assert 0 <= line.pop("queue_s") <= line.pop("ttft_s") <= line.pop("total_s")
    assert line == {
        "request_id": "mine",
        "tenant": "a",
        "method": "generate",
        "code": "ok",
        "finish_reason": "length",
        "prompt_tokens": len(SECRET),  # all bytes are tokens
        "cached_tokens": 0,
        "output_tokens": 6,
    }


def test_refused_and_abandoned_calls_have_lines_too(serve, tmp_path):
    async def main(service):
        with pytest.raises(ServiceError):
            await service.generate(ANONYMOUS, Call(prompt=SECRET, messages=[SECRET]))
        long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        stream = service.stream(ANONYMOUS, Call(prompt="ab", params=long))
        await anext(stream)
        await stream.aclose()
        await service.score(ANONYMOUS, "ab", "cd")

    path = tmp_path / "access.jsonl"
    refused, left, score = _served(serve, path, main, engine={"scoring": True})
    assert SECRET not in path.read_text("utf-8")
    assert (refused["code"], refused["queue_s"]) == ("invalid_argument", None)
    assert left["code"] == "cancelled" and 0 < left["output_tokens"] < 60
    assert (score["method"], score["code"]) == ("score", "ok")


def test_a_log_that_was_moved_away_is_begun_anew(tmp_path):
    path, moved = tmp_path / "access.jsonl", tmp_path / "access.1"
    record = CallRecord(
        request_id="1", tenant="a\nb", method="generate", wall_s=0.0, arrival_s=0.0
    )
    with access_log.opened(str(path)) as log:
        log.on_call(record)
    path.rename(moved)
    with access_log.opened(str(path)) as log:
        log.on_call(record)
        log.on_call(record)
    assert [len(p.read_text().splitlines()) for p in (moved, path)] == [1, 2]
    assert json.loads(moved.read_text())["tenant"] == "a\nb"


def test_a_file_that_cannot_be_opened_is_told(tmp_path):
    with pytest.raises(ValueError, match="access_log .*missing/a: No such file"):
        with access_log.opened(str(tmp_path / "missing" / "a")):
            pass
