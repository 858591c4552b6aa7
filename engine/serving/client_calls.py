"""What both clients share: where to, as whom, for how long, and errors as ours."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from headrace.engine.sampling_params import SamplingParams
from headrace.engine.serving.client_results import Tls, call_error
from headrace.engine.serving.proto import generation_pb2_grpc as stubs
from headrace.engine.serving.server_options import read_file

Prompt = str | Sequence[int] | None
Messages = Sequence[Mapping[str, str]] | None
Params = SamplingParams | Mapping[str, Any] | None

# Of messages; the server's bound is the one that counts.
_LENGTHS = ("grpc.max_receive_message_length", "grpc.max_send_message_length")


class Caller:
    """A channel, and a key and a time for every call; arguments as for `Client`.

    Attributes:
      grpc_kind: `grpc` or `grpc.aio`.
    """

    grpc_kind: Any

    def __init__(
        self,
        address: str,
        key: str | None = None,
        tls: Tls | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        self._timeout_s = timeout_s
        self._channel = channel(self.grpc_kind, address, tls)
        self._stub = stubs.GenerationServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def _options(self, timeout_s: float | None) -> dict[str, Any]:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return {"metadata": self._metadata, "timeout": timeout_s}


def channel(kind: Any, address: str, tls: Tls | None) -> Any:
    """A channel of `grpc` or of `grpc.aio`.

    Raises:
      ValueError: a certificate's file cannot be read.
    """
    options: list[tuple[str, int | str]] = [(name, -1) for name in _LENGTHS]
    if tls is None:
        return kind.insecure_channel(address, options)
    if tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    pem = {
        name: None if path is None else read_file(name, path)
        for name, path in (("ca", tls.ca), ("key", tls.key), ("cert", tls.cert))
    }
    credentials = grpc.ssl_channel_credentials(pem["ca"], pem["key"], pem["cert"])
    return kind.secure_channel(address, credentials, options)


@contextlib.contextmanager
def as_call_errors() -> Iterator[None]:
    """What gRPC raises, as CallError."""
    try:
        yield
    except grpc.RpcError as error:
        raise call_error(error) from None
