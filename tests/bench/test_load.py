"""The load generator counts what really came back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop

from tests.bench.load import Measured, Tally, encode_requests, measure, summarise

Answer = Callable[[asyncio.StreamWriter, bytes], Awaitable[None]]
GOOD = b'{"items":[],"degraded":{"value":false,"reasons":[]}}'


def _reply(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 " + status + b"\r\ncontent-length: " + str(len(body)).encode() + b"\r\n\r\n" + body


@asynccontextmanager
async def _server(answer: Answer) -> AsyncIterator[str]:
    """A server that passes each request's body to `answer`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                await answer(writer, await reader.readexactly(length))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def _measure(answer: Answer, *, clients: int = 2, bodies: tuple[bytes, ...] = (b"{}",)) -> Measured:
    async def run() -> Measured:
        async with _server(answer) as url:
            return await measure(url, bodies, clients=clients, seconds=0.3, warmup_s=0.05)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


async def _good(writer: asyncio.StreamWriter, body: bytes) -> None:
    writer.write(_reply(GOOD))


def test_good_replies_are_counted_and_timed() -> None:
    result = _measure(_good)
    assert result.requests > 10
    assert (result.non_200, result.degraded, result.broken) == (0, 0, 0)
    assert result.p50_ms is not None
    assert result.p99_ms is not None
    assert result.max_ms is not None
    assert 0 < result.p50_ms <= result.p99_ms <= result.max_ms
    assert result.requests_per_s == pytest.approx(result.requests / result.seconds, rel=0.01)


def test_a_reply_in_pieces_is_one_reply() -> None:
    async def in_pieces(writer: asyncio.StreamWriter, body: bytes) -> None:
        whole = _reply(GOOD)
        for start in range(0, len(whole), 17):
            writer.write(whole[start : start + 17])
            await writer.drain()
            await asyncio.sleep(0)

    result = _measure(in_pieces)
    assert result.requests > 10
    assert (result.non_200, result.degraded, result.broken) == (0, 0, 0)


def test_errors_and_degraded_replies_are_told_apart_from_good_ones() -> None:
    async def by_body(writer: asyncio.StreamWriter, body: bytes) -> None:
        if body == b"bad":
            writer.write(_reply(b"{}", b"503 Service Unavailable"))
        else:
            writer.write(_reply(GOOD.replace(b"false", b"true")))

    result = _measure(by_body, clients=1, bodies=(b"bad", b"ok"))
    assert result.non_200 > 5
    assert abs(result.non_200 - result.degraded) <= 1
    assert result.non_200 + result.degraded == result.requests


def test_a_connection_closed_under_a_request_is_counted_and_made_again() -> None:
    async def close(writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.close()

    result = _measure(close)
    assert result.broken > 1
    assert result.requests == 0
    assert result.p99_ms is None


def test_a_reply_without_a_length_ends_the_run() -> None:
    async def no_length(writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n{}")

    with pytest.raises(ValueError, match="Content-Length"):
        _measure(no_length)


def test_every_client_has_one_request_under_way_and_walks_the_whole_list() -> None:
    seen: list[bytes] = []
    under_way, most = 0, 0

    async def slowly(writer: asyncio.StreamWriter, body: bytes) -> None:
        nonlocal under_way, most
        seen.append(body)
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.001)
        under_way -= 1
        writer.write(_reply(GOOD))

    bodies = tuple(f"{i}".encode() for i in range(9))
    _measure(slowly, clients=3, bodies=bodies)
    assert most == 3
    assert set(seen) == set(bodies)
    assert set(seen[:3]) == {b"0", b"3", b"6"}


def test_replies_during_warm_up_are_not_counted() -> None:
    tally = Tally()
    tally.count(500, b"", 1.0)
    tally.count_broken()
    tally.recording = True
    tally.count(200, GOOD, 0.002)
    result = summarise(tally, clients=1, seconds=1.0, cpu_s=0.1)
    assert (result.requests, result.non_200, result.broken, result.p50_ms) == (1, 0, 0, 2.0)


def test_requests_are_complete_http_with_the_right_length() -> None:
    (request,) = encode_requests("http://127.0.0.1:8000", [b'{"k":20}'])
    head, body = request.split(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/recommend HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n")
    assert head.endswith(b"Content-Length: 8")
    assert body == b'{"k":20}'
