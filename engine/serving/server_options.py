"""What a server is told: addresses, certificates, bounds. Host side, no jax."""

import dataclasses
import ipaddress
import math
import os
import pathlib
import re
import socket
from typing import Literal

from headrace.engine.serving.limits import ServiceLimits

PromptLogging = Literal["none", "redacted", "full"]

_PORTS = (0, 65535)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """A server's settings; files are read when it starts.

    Attributes:
      host: address to bind to.
      port: of gRPC; 0 picks a free one.
      http_port: of the HTTP front, 0 picks one; None leaves it out.
      key_file: bearer keys, see `tenants.KeyFile`; None takes everybody's calls.
      tls_cert, tls_key: PEM files of the server; both or neither.
      tls_client_ca: PEM file; clients must show a certificate that it signed.
      grace_s: seconds that running calls have to end after SIGTERM.
      max_message_bytes: of a request, and of a response.
      max_concurrent_calls: at a time; more are told to come back.
      limits: of a request.
      model_name: that clients are told, and may name.
      log_prompts: "none"; "redacted" logs letters and digits as x and 0.
      metrics_prefix: of the names of metrics.
      access_log: file for a JSON line per call; "-" is stderr.
      otlp_endpoint: where traces go, such as "http://localhost:4317".

    Raises:
      ValueError: a value out of its range, or files that do not go together.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    http_port: int | None = None
    key_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    grace_s: float = 30.0
    max_message_bytes: int = 8 * 2**20
    max_concurrent_calls: int = 1024
    limits: ServiceLimits = ServiceLimits()
    model_name: str = "default"
    log_prompts: PromptLogging = "none"
    metrics_prefix: str = "headrace"
    access_log: str | None = None
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        for name in ("port", "http_port"):
            port = getattr(self, name)
            if port is not None and not _PORTS[0] <= port <= _PORTS[1]:
                raise ValueError(f"{name} must be in [0, 65535], got {port}")
        if self.http_port and self.http_port == self.port:
            raise ValueError(f"http_port must differ from port, got {self.port} twice")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key need each other, got one of them")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key, got neither")
        if not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", self.metrics_prefix):
            raise ValueError(
                "metrics_prefix must be a letter or _, then letters, digits, _, got "
                f"{self.metrics_prefix!r}"
            )
        if not 0 <= self.grace_s < math.inf:
            raise ValueError(f"grace_s must be at least 0, got {self.grace_s}")
        for name, least in (("max_message_bytes", 1024), ("max_concurrent_calls", 1)):
            value = getattr(self, name)
            if not least <= value < 2**31:
                raise ValueError(f"{name} must be in [{least}, 2**31 - 1], got {value}")

    @property
    def is_open(self) -> bool:
        """Whether other machines can reach it."""
        return not is_loopback(self.host)

    def exposure(self) -> list[str]:
        """What is missing of a server that other machines can reach."""
        missing = []
        if self.is_open and self.tls_cert is None:
            missing.append(
                "no TLS (--tls_cert, --tls_key): anybody on the way can read"
            )
        if self.is_open and self.key_file is None and self.tls_client_ca is None:
            missing.append(
                "neither keys nor client certificates (--key_file, --tls_client_ca): "
                "anybody can call"
            )
        return missing


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own and no other's.

    A name that cannot be resolved is taken as open.
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(str(a[4][0])).is_loopback for a in found)


def address(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and "[" not in host else f"{host}:{port}"


def read_file(name: str, path: str | os.PathLike[str]) -> bytes:
    """A file that a flag names.

    Raises:
      ValueError: it cannot be read.
    """
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{name} {path}: {error.strerror or error}") from None
