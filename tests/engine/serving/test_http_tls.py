"""TLS and mutual TLS over HTTP: the flags of gRPC, and the same callers get in."""

import ssl

import httpx
import pytest

from headrace.client import AsyncClient, CallError, Tls
from headrace.engine.serving.server import running
from headrace.engine.serving.server_options import ServerOptions

BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 4, "temperature": 0}


def _context(tls):
    context = ssl.create_default_context(cafile=tls.ca)
    if tls.cert:
        context.load_cert_chain(tls.cert, tls.key)
    return context


async def _by_http(address, tls):
    """The text, or None where no connection comes about."""
    scheme, verify = ("http", True) if tls is None else ("https", _context(tls))
    try:
        async with httpx.AsyncClient(verify=verify, timeout=20) as client:
            answer = await client.post(
                f"{scheme}://{address}/v1/completions", json=BODY
            )
    except httpx.TransportError:
        return None
    return answer.json()["choices"][0]["text"]


async def _by_grpc(address, tls):
    try:
        async with AsyncClient(address, tls=tls, timeout_s=5) as client:
            output = await client.generate("abc", max_tokens=4, temperature=0)
    except CallError as error:
        assert error.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
        return None
    return output.text


def _served(serve, clients, **options):
    """What each client is told over gRPC and over HTTP."""

    async def main(service):
        wanted = ServerOptions(port=0, http_port=0, **options)
        async with running(service, wanted) as (grpc_server, http_server):
            return [
                (
                    await _by_grpc(grpc_server.address, tls),
                    await _by_http(http_server.address, tls),
                )
                for tls in clients
            ]

    return serve(main)


@pytest.fixture
def server_files(pem):
    return dict(tls_cert=pem["server.pem"], tls_key=pem["server.key"])


def _client(pem, name):
    return Tls(ca=pem["ca.pem"], cert=pem[f"{name}.pem"], key=pem[f"{name}.key"])


def test_https_serves_only_who_trusts_the_server(serve, pem, server_files):
    clients = [Tls(ca=pem["ca.pem"]), Tls(ca=pem["other_ca.pem"]), None]
    (by_grpc, by_http), *others = _served(serve, clients, **server_files)
    assert by_http == by_grpc and len(by_http) > 0
    assert others == [(None, None)] * 2


def test_mutual_tls_serves_only_who_has_a_certificate(serve, pem, server_files):
    nobody = Tls(ca=pem["ca.pem"])
    clients = [_client(pem, "client"), _client(pem, "stranger"), nobody]
    options = server_files | {"tls_client_ca": pem["ca.pem"]}
    (by_grpc, by_http), *others = _served(serve, clients, **options)
    assert by_http == by_grpc and len(by_http) > 0
    assert others == [(None, None)] * 2
