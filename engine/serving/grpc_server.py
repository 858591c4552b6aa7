"""A gRPC server around the service: address, certificates, health, reflection."""

import logging
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headrace.engine.serving.grpc_front import SERVICE_NAME, GenerationFront
from headrace.engine.serving.grpc_guard import Guard
from headrace.engine.serving.proto import generation_pb2_grpc as stubs
from headrace.engine.serving.server_options import ServerOptions, address, read_file

if TYPE_CHECKING:
    from headrace.engine.serving.service import GenerationService

logger = logging.getLogger(__name__)

# Health checks, cancels and refusals find a place when all calls' places are taken.
_SPARE_CALLS = 64


class GrpcServer:
    """Listens, answers, and says how it is.

    Args:
      service: behind it.
      options: of the server.

    Raises:
      ValueError: a certificate's file cannot be read.
      OSError: the address cannot be bound.
    """

    def __init__(self, service: "GenerationService", options: ServerOptions) -> None:
        self._options = options
        self._server = grpc.aio.server(
            interceptors=[Guard(service, max_calls=options.max_concurrent_calls)],
            options=_channel_options(options.max_message_bytes),
            maximum_concurrent_rpcs=options.max_concurrent_calls + _SPARE_CALLS,
        )
        stubs.add_GenerationServiceServicer_to_server(
            GenerationFront(service), self._server
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self.port = self._bind()

    @property
    def address(self) -> str:
        """Where it listens, host:port."""
        return address(self._options.host, self.port)

    async def start(self) -> None:
        """Answers from now on, and is not healthy yet."""
        await self.set_healthy(False)
        await self._server.start()

    async def set_healthy(self, is_healthy: bool) -> None:
        """What the health service says, of the whole and of the service by name."""
        kinds = health_pb2.HealthCheckResponse
        status = kinds.SERVING if is_healthy else kinds.NOT_SERVING
        for name in (health.OVERALL_HEALTH, SERVICE_NAME):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Closes the port; what is still open then has `grace_s` seconds to end."""
        await self._server.stop(grace_s)

    def _bind(self) -> int:
        options = self._options
        where = address(options.host, options.port)
        try:
            if options.tls_cert is None:
                port = self._server.add_insecure_port(where)
            else:
                port = self._server.add_secure_port(where, _credentials(options))
        except RuntimeError:
            port = 0
        if not port:
            raise OSError(
                f"cannot listen on {where}: the address is taken or not ours, or the "
                "certificate and its key do not fit"
            )
        return port


def _credentials(options: ServerOptions) -> grpc.ServerCredentials:
    assert options.tls_cert is not None and options.tls_key is not None
    pair = (
        read_file("tls_key", options.tls_key),
        read_file("tls_cert", options.tls_cert),
    )
    client_ca = options.tls_client_ca
    return grpc.ssl_server_credentials(
        [pair],
        root_certificates=client_ca and read_file("tls_client_ca", client_ca),
        require_client_auth=client_ca is not None,
    )


def _channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # A second server on the same port is an error, not half of the calls.
        ("grpc.so_reuseport", 0),
        # A client that is gone without a word is found after 40 seconds, and its
        # pages are freed; clients may ask likewise every 10 seconds.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]
