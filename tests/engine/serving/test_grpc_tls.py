"""TLS and mutual TLS over gRPC."""

import asyncio

import pytest
from grpc_calls import front

from headrace.client import CallError, Client, Tls
from headrace.engine.serving.grpc_server import GrpcServer
from headrace.engine.serving.server_options import ServerOptions


def _outcomes(serve, options, clients):
    """For each client "served", or the code it is refused with."""

    def call(address, tls):
        try:
            with Client(address, tls=tls, timeout_s=5) as client:
                client.generate("a", max_tokens=1)
        except CallError as error:
            return error.code
        return "served"

    async def main(service):
        server = GrpcServer(service, ServerOptions(port=0, **options))
        await server.start()
        try:
            return [await asyncio.to_thread(call, server.address, t) for t in clients]
        finally:
            await server.stop(0)

    return serve(main)


def test_tls_serves_only_who_trusts_the_server(serve, pem):
    options = dict(tls_cert=pem["server.pem"], tls_key=pem["server.key"])
    clients = [Tls(ca=pem["ca.pem"]), Tls(ca=pem["other_ca.pem"]), None]
    found = _outcomes(serve, options, clients)
    assert found[0] == "served"
    assert set(found[1:]) <= {"UNAVAILABLE", "DEADLINE_EXCEEDED"}


def test_mutual_tls_serves_only_who_has_a_certificate(serve, pem):
    options = dict(
        tls_cert=pem["server.pem"],
        tls_key=pem["server.key"],
        tls_client_ca=pem["ca.pem"],
    )
    clients = [
        Tls(ca=pem["ca.pem"], cert=pem[f"{name}.pem"], key=pem[f"{name}.key"])
        for name in ("client", "stranger")
    ]
    found = _outcomes(serve, options, [*clients, Tls(ca=pem["ca.pem"])])
    assert found[0] == "served"
    assert set(found[1:]) <= {"UNAVAILABLE", "DEADLINE_EXCEEDED"}


def test_files_that_are_missing_or_do_not_fit_are_told(serve, pem):
    async def main(service):
        for cert, key, kind in (
            (pem["server.pem"], pem["client.key"], OSError),
            (pem["server.pem"], pem["server.key"] + "x", ValueError),
        ):
            with pytest.raises(kind):
                GrpcServer(service, ServerOptions(port=0, tls_cert=cert, tls_key=key))
        async with front(service) as (_, stub):
            assert stub is not None

    serve(main)
    with pytest.raises(ValueError, match="need each other"):
        ServerOptions(tls_cert="a")
    with pytest.raises(ValueError, match="tls_client_ca"):
        ServerOptions(tls_client_ca="a")
