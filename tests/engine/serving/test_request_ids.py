"""A caller's own id: one rule, whether it comes over gRPC or over HTTP."""

import asyncio

import grpc
import pytest
from grpc_calls import front, long_request, refusal, request
from http_clients import http_client

RIGHT = ["a", "~" * 128, 'q"\\/%', "0f8c-11"]
WRONG = ["", "a" * 129, "a b", "a\tb", "caf\xe9"]
BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 2, "temperature": 0}
URL = "/v1/completions"


@pytest.mark.parametrize("is_right, ids", [(True, RIGHT), (False, WRONG)])
def test_both_protocols_take_and_refuse_the_same_ids(serve, is_right, ids):
    async def main(service):
        told = []
        async with front(service) as (_, stub), http_client(service) as client:
            for one in ids:
                message = request(max_tokens=2)
                message.request_id = one
                header = {"x-request-id": one.encode("latin-1")}
                call = stub.GenerateOnce(message)
                by_grpc = await (call if is_right else refusal(call))
                by_http = await client.post(URL, json=BODY, headers=header)
                told.append((by_grpc, by_http))
        return told

    for one, (by_grpc, by_http) in zip(ids, serve(main), strict=True):
        if is_right:
            assert by_grpc.request_id == by_http.headers["x-request-id"] == one
            assert by_http.json()["id"] == f"cmpl-{one}"
            continue
        assert by_grpc.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert by_http.status_code == 400
        message = by_http.json()["error"]["message"]
        assert message == by_grpc.details().replace("request_id", "x-request-id", 1)
        assert "1 to 128 printable ASCII" in message


def test_an_id_that_runs_is_refused_and_can_be_cancelled_over_grpc(serve):
    async def main(service):
        async with front(service) as (_, stub), http_client(service) as client:
            header = {"x-request-id": "mine"}
            long = BODY | {"max_tokens": 400, "ignore_eos": True}
            running = asyncio.create_task(client.post(URL, json=long, headers=header))
            while not service.gate.num_running("anonymous"):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            again = await client.post(URL, json=BODY, headers=header)
            error = await refusal(stub.GenerateOnce(long_request(request_id="mine")))
            assert service.cancel(service.tenant_of(None), "mine")
            return await running, again, error

    ended, again, error = serve(main)
    assert again.status_code == 400 and "running already" in again.text
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert ended.status_code != 200 or ended.headers["x-request-id"] == "mine"
