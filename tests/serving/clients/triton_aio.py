"""tritonclient's asyncio clients (grpc.aio and aiohttp), and both of its clients over TLS with a token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import tritonclient.grpc.aio
import tritonclient.http.aio
from checks import equal
from triton_session import Session, both, only
from tritonclient.utils import InferenceServerException

TOKEN = {"authorization": "Bearer s3cret"}


def run_aio(s: Session, work: Any) -> None:
    """Run a check with an asyncio client of the transport."""
    module = getattr(tritonclient, s.transport).aio

    async def main() -> None:
        async with module.InferenceServerClient(f"127.0.0.1:{s.ports[s.transport]}") as client:
            await work(client)

    asyncio.run(asyncio.wait_for(main(), 30))


@both("asyncio: health, metadata, many in flight")
def _(s: Session) -> None:
    async def work(client: Any) -> None:
        assert await client.is_server_ready()
        found = await client.get_model_metadata("scale")
        equal(list(found.versions if s.is_grpc else found["versions"]), ["1", "3"])
        answers = await asyncio.gather(*(client.infer("sum_difference", s.pair(n, 1), request_id=str(n)) for n in range(100)))
        equal([int(one.as_numpy("sum")[0, 0]) for one in answers], list(range(1, 101)))

    run_aio(s, work)


@both("asyncio: errors")
def _(s: Session) -> None:
    async def work(client: Any) -> None:
        try:
            await client.infer("sum_difference", s.pair()[:1])
        except InferenceServerException as error:
            equal(error.status(), "StatusCode.INVALID_ARGUMENT" if s.is_grpc else "400")
        else:
            raise AssertionError("expected an error, got an answer")

    run_aio(s, work)


@only("http", "asyncio: compression")
def _(s: Session) -> None:
    array = np.zeros((50, 500), np.float32)

    async def work(client: Any) -> None:
        for name in ("gzip", "deflate"):
            options = {"request_compression_algorithm": name, "response_compression_algorithm": name}
            found = await client.infer("identity_fp32", [s.input("x", array)], **options)
            assert np.array_equal(found.as_numpy("y"), array)

    run_aio(s, work)


@only("grpc", "asyncio: a stream")
def _(s: Session) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for n in range(30):
            yield {"model_name": "sum_difference", "inputs": s.pair(n, 1), "request_id": str(n)}

    async def work(client: Any) -> None:
        found = [pair async for pair in client.stream_infer(requests())]
        equal([error for _, error in found if error is not None], [])
        equal([result.get_response().id for result, _ in found], [str(n) for n in range(30)])

    run_aio(s, work)


@both("TLS with a token")
def _(s: Session) -> None:
    address = f"localhost:{s.ports['secure_' + s.transport]}"
    authority = s.ports["certificates"] + "/ca.pem"
    if s.is_grpc:
        client = s.module.InferenceServerClient(address, ssl=True, root_certificates=authority)
    else:
        client = s.module.InferenceServerClient(address, ssl=True, ssl_options={"ca_certs": authority})
    with client:
        assert client.is_server_ready()
        equal(client.infer("sum_difference", s.pair(), headers=TOKEN).as_numpy("sum").tolist(), [[10] * 4])
        try:
            client.infer("sum_difference", s.pair())
        except InferenceServerException as error:
            equal(error.status(), "StatusCode.UNAUTHENTICATED" if s.is_grpc else "401")
        else:
            raise AssertionError("expected a refusal, got an answer")
