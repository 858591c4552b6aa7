"""Runs the HTTP front in the gRPC server's event loop, by uvicorn (extra `http`)."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any

from headrace.engine.serving.server_options import ServerOptions, address


class HttpServer:
    """Listens for HTTP; who stops the process is the whole server's business.

    Args:
      app: an ASGI application.
      options: of the server; `http_port` is set.

    Raises:
      ValueError: uvicorn is not installed.
      OSError: the address cannot be bound, or a certificate is wrong.
    """

    def __init__(self, app: Any, options: ServerOptions) -> None:
        try:
            import uvicorn
        except ImportError:
            raise ValueError("http_port needs the extra `http`: uvicorn") from None

        class Server(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        client_ca = options.tls_client_ca
        self._server = Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                proxy_headers=False,
                server_header=False,
                ssl_certfile=options.tls_cert,
                ssl_keyfile=options.tls_key,
                ssl_ca_certs=client_ca,
                ssl_cert_reqs=ssl.CERT_REQUIRED if client_ca else ssl.CERT_NONE,
                timeout_graceful_shutdown=2,
            )
        )
        assert options.http_port is not None
        self._socket = bound_socket(options.host, options.http_port)
        self.address = address(options.host, self._socket.getsockname()[1])
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Answers from now on."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._task.done():
                await self._task  # raises what went wrong
                raise OSError(f"cannot serve HTTP on {self.address}")
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Closes the port; what is still open has two seconds to end."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that listens; closing it frees the port.

    Raises:
      OSError: the address is taken or not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), port), family=family)
    except OSError as error:
        where = address(host, port)
        raise OSError(f"cannot listen on {where}: {error.strerror or error}") from None
