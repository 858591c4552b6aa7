"""serve.py as a process: one line when it serves, a drain on SIGTERM, no prompts."""

import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest

from headrace.client import CallError, Client
from headrace.engine.serving.limits import ServiceLimits
from headrace.engine.serving.server_options import ServerOptions, is_loopback
from headrace.engine.serving.tenants import KeyFile, hash_of
from headrace.scripts import engine_flags, make_key, serve

ROOT = pathlib.Path(__file__).parents[2]
GREEDY = dict(temperature=0, ignore_eos=True)


@contextlib.contextmanager
def process(*flags):
    """(process, address, lines of standard error so far) of a server that serves."""
    small = ["--config=tiny", "--num_slots=8", "--noscoring", "--port=0"]
    started = subprocess.Popen(
        [sys.executable, "-m", "headrace.scripts.serve", *small, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / ".typing")},
    )
    errors = []
    reader = threading.Thread(target=lambda: errors.extend(started.stderr))
    reader.start()
    try:
        line = started.stdout.readline()
        match = re.fullmatch(r"serving gRPC on (127\.0\.0\.1:\d+)\n", line)
        assert match, (line, errors)
        yield started, match[1], errors
    finally:
        started.kill()
        started.wait()
        reader.join()
        started.stdout.close()


def test_sigterm_ends_a_running_stream_well_and_refuses_new_calls():
    marker = [111, 222, 33]
    with process("--log_prompts=none") as (server, address, errors):
        with Client(address, timeout_s=60) as client:
            assert client.is_serving()
            assert client.model_info().model_name == "tiny"
            stream = client.stream(marker, max_tokens=300, **GREEDY)
            first = next(stream)
            server.send_signal(signal.SIGTERM)
            while client.is_serving():
                pass
            with pytest.raises(CallError) as error:
                client.generate(marker, max_tokens=1)
            assert error.value.code == "UNAVAILABLE"
            *_, last = stream
            assert not first.finished and last.finished
            assert last.outputs[0].finish_reason == "length"
            assert last.output_tokens == 300
            assert server.wait(20) == 0
    assert "draining" in "".join(errors)
    texts = re.sub(r"\w+\.py:\d+\]", "", "".join(errors))  # lines have such numbers
    assert "222" not in texts and "Traceback" not in "".join(errors)


def test_the_grace_ends_what_runs_on_and_hands_it_back():
    with process("--grace_s=0.05") as (server, address, _):
        with Client(address, timeout_s=60) as client:
            stream = client.stream([5, 6], max_tokens=480, **GREEDY)
            next(stream)
            server.send_signal(signal.SIGTERM)
            *_, last = stream
            assert last.outputs[0].finish_reason == "cancelled"
            assert last.output_tokens < 480
            assert server.wait(20) == 0


@pytest.fixture
def no_engine(monkeypatch):
    def build(change):
        raise ValueError("an engine was built")

    monkeypatch.setattr(engine_flags, "build_llm", build)


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    "flags, told",
    [
        (["--host=0.0.0.0"], ["no TLS", "neither keys nor"]),
        (["--host=::"], ["no TLS", "neither keys nor"]),
        (["--host=0.0.0.0", "--key_file=KEYS"], ["no TLS"]),
        (["--host=0.0.0.0", "--tls_cert=A", "--tls_key=A"], ["neither keys nor"]),
        (["--host=0.0.0.0", "--tls_cert=A", "--tls_key=A", "--key_file=KEYS"], []),
        (["--host=0.0.0.0", "--tls_cert=A", "--tls_key=A", "--tls_client_ca=A"], []),
        (["--host=127.0.0.1"], []),
        (["--host=localhost"], []),
        ([], []),
    ],
)
def test_a_server_open_to_others_warns_and_with_strict_refuses(
    flags, told, run_main, tmp_path, capsys
):
    keys, pem = tmp_path / "keys.json", tmp_path / "pem"
    keys.write_text(f'{{"tenants": {{"a": {{"keys": ["{hash_of("k")}"]}}}}}}')
    pem.write_text("pem")
    flags = [f.replace("KEYS", str(keys)).replace("=A", f"={pem}") for f in flags]
    assert run_main(serve, "--port=0", *flags) == 1
    warned = capsys.readouterr().err
    assert "an engine was built" in warned
    assert warned.count("warning:") == len(told)
    assert all(word in warned for word in told)
    assert run_main(serve, "--port=0", "--strict", *flags) == 1
    refused = capsys.readouterr().err
    assert ("--strict" in refused) == bool(told)
    assert ("an engine was built" in refused) != bool(told)


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    "flag, told",
    [
        ("--port=70000", "port"),
        ("--max_message_bytes=1", "max_message_bytes"),
        ("--max_concurrent_calls=0", "max_concurrent_calls"),
        ("--grace_s=-1", "grace_s"),
        ("--limit_tokens=0", "max_tokens"),
        ("--tls_cert=x", "need each other"),
        ("--tls_client_ca=x", "tls_client_ca"),
        ("--key_file=/nowhere/keys.json", "key file"),
        ("--host=192.0.2.1", "cannot listen"),
    ],
)
def test_a_wrong_flag_is_told_before_the_engine_is_built(flag, told, run_main, capsys):
    assert run_main(serve, flag) == 1
    error = capsys.readouterr().err
    assert told in error and "an engine was built" not in error


@pytest.mark.usefixtures("no_engine")
def test_a_port_that_is_taken_is_told_before_the_engine_is_built(run_main, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run_main(serve, f"--port={port}") == 1
        assert run_main(serve, "--port=0", f"--http_port={port}") == 1
    assert capsys.readouterr().err.count("cannot listen") == 2


def test_flags_reach_the_options(run_main, monkeypatch):
    seen = []
    monkeypatch.setattr(serve, "run", lambda: seen.append(serve.server_options()) or 0)
    assert run_main(serve) == 0
    flags = ["--model=/a/weights/", "--limit_prompt_tokens=7", "--limit_deadline_s=9"]
    assert run_main(serve, *flags, "--http_port=0", "--log_prompts=redacted") == 0
    default, changed = seen
    assert default == ServerOptions(model_name=engine_flags.DEFAULT_MODEL)
    assert changed.model_name == "weights" and changed.http_port == 0
    assert changed.log_prompts == "redacted"
    assert changed.limits == ServiceLimits(max_prompt_tokens=7, max_deadline_s=9.0)


def test_flags_reach_the_engine(run_main, monkeypatch):
    def built():
        _, engine = engine_flags.engine_settings()
        return seen.append(serve.for_serving(engine)) or 0

    seen = []
    monkeypatch.setattr(serve, "run", built)
    flags = ["--host_kv_bytes=4096", "--max_queued_requests=9", "--noscoring"]
    for more in ([], ["--key_file=x"], ["--key_file=x", "--noshare_queue"]):
        assert run_main(serve, *flags, *more) == 0
    assert run_main(serve) == 0
    assert [one.share_queue for one in seen] == [False, True, False, False]
    assert [one.host_kv_bytes for one in seen] == [4096] * 3 + [None]
    assert (seen[0].max_queued_requests, seen[0].scoring) == (9, False)


def test_names_that_others_reach_are_no_loopback():
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    for host in ("0.0.0.0", "::", "192.168.1.1", "no.such.host.invalid", ""):
        assert not is_loopback(host)


def test_a_new_key_opens_with_the_hash_that_was_printed(run_main, tmp_path, capsys):
    assert run_main(make_key) == 0
    key, hashed = (line.split()[1] for line in capsys.readouterr().out.splitlines())
    path = tmp_path / "keys.json"
    path.write_text(f'{{"tenants": {{"a": {{"keys": ["{hashed}"]}}}}}}')
    assert KeyFile(path).tenant_of(key).name == "a"
    assert run_main(make_key) == 0
    assert key not in capsys.readouterr().out
