"""A trial server in a process of its own: started, watched, stopped."""

import contextlib
import json
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import psutil

from headrace.engine.serving.tenants import hash_of, new_key
from headrace.scripts import http_stream_client as http

_LINE = re.compile(r"serving (gRPC|HTTP) on (\S+)\n")


class TrialProcess:
    """A server that answers.

    Attributes:
      grpc_address, http_address: host:port.
      keys: bearer key by tenant.
      errors: lines of its standard error.
    """

    def __init__(self, process: subprocess.Popen[str], keys: Mapping[str, str]) -> None:
        self._process, self.keys = process, dict(keys)
        self._facts = psutil.Process(process.pid)
        self.errors: list[str] = []
        assert process.stderr is not None
        self._reader = threading.Thread(target=self._drain_errors, daemon=True)
        self._reader.start()
        found = dict(self._announced() for _ in range(2))
        self.grpc_address, self.http_address = found["gRPC"], found["HTTP"]

    def _drain_errors(self) -> None:
        assert self._process.stderr is not None
        self.errors.extend(self._process.stderr)

    def _announced(self) -> tuple[str, str]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        match = _LINE.fullmatch(line)
        if match is None:
            self._process.wait()
            self._reader.join()
            raise OSError(f"the server did not start: {line}{''.join(self.errors)}")
        return match[1], match[2]

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def rss_bytes(self) -> int:
        """Its resident memory."""
        return self._facts.memory_info().rss

    @property
    def num_files(self) -> int:
        """Files and sockets that it holds open."""
        return self._facts.num_fds()

    async def gauges(self) -> dict[str, float]:
        """Samples of /metrics that have no label but the model's, without prefix.

        Raises:
          OSError: it does not answer.
        """
        async with http.opened(self.http_address) as call:
            await call.send(http.request("/metrics", method="GET"))
            if (status := await call.head()) != 200:
                raise OSError(f"/metrics: status {status}")
            return parse_gauges((await call.body()).decode())

    def terminate(self) -> None:
        """What an orchestrator does first."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> int | None:
        """The exit code; None where it still runs after so long."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join()
        return code

    def kill(self) -> None:
        """Ends it whatever it does."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


def parse_gauges(text: str) -> dict[str, float]:
    """Values of a /metrics page by name; those with further labels are left out."""
    pattern = re.compile(r'\w+:(\w+)\{engine="\d+",model_name="[^"]*"\} (\S+)')
    matches = map(pattern.fullmatch, text.splitlines())
    return {match[1]: float(match[2]) for match in matches if match}


@contextlib.contextmanager
def started(
    tenants: Mapping[str, Mapping[str, Any]], *options: str
) -> Iterator[TrialProcess]:
    """A server that takes keys of these tenants; killed at the end if it still runs.

    Args:
      tenants: name to limits, as in a key file.
      *options: flags of trial_server.py.

    Raises:
      OSError: it did not start.
    """
    keys = {name: new_key() for name in tenants}
    entries = {
        name: {"keys": [hash_of(keys[name])], **limits}
        for name, limits in tenants.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "keys.json"
        path.write_text(json.dumps({"tenants": entries}))
        flags = [f"--key_file={path}", "--port=0", "--http_port=0", *options]
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace.scripts.trial_server", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        server = None
        try:
            server = TrialProcess(process, keys)
            yield server
        finally:
            if server is not None:
                server.kill()
            else:
                process.kill()
                process.wait()
