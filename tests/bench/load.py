"""A closed-loop HTTP/1.1 load generator: n keep-alive connections, each with one request under way.

Its own process and cheap in CPU (about 20 us a request), because it shares the machine with what it measures; the
share of a core it took is part of the result. The same generator and the same request list serve every system.
Replies count when they arrive within the measured time, which starts after the warm-up. A reply that is no 200, or
that says it is degraded, is counted and its latency stays in: whoever reads the numbers must see that both are 0.
Refuses replies without a Content-Length.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import msgspec
import uvloop

PATH = "/v1/recommend"
RECONNECT_AFTER_S = 0.05
# The first flag of a reply that was made without one of its stages, as every system here encodes it.
DEGRADED = b'"degraded":{"value":true'


class Measured(msgspec.Struct, frozen=True):
    """Result of one run. Latencies are from writing a request to the last byte of its reply; None without any."""

    clients: int
    seconds: float
    requests: int
    requests_per_s: float
    p50_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    non_200: int
    degraded: int
    broken: int
    replies: int
    generator_cores: float
    # CPU time of all processes of the system per reply, warm-up included; the one who starts the system fills it in.
    cpu_ms: float | None = None


@dataclass(slots=True)
class Tally:
    """What all connections of one run have counted; `recording` is off during warm-up, `replies` counts in it too."""

    recording: bool = False
    replies: int = 0
    latencies_s: list[float] = field(default_factory=list)
    non_200: int = 0
    degraded: int = 0
    broken: int = 0

    def count(self, status: int, body: bytes, latency_s: float) -> None:
        """One complete reply."""
        self.replies += 1
        if not self.recording:
            return
        self.latencies_s.append(latency_s)
        if status != 200:
            self.non_200 += 1
        elif DEGRADED in body:
            self.degraded += 1

    def count_broken(self) -> None:
        """One connection that ended before its reply was complete, or could not be made."""
        if self.recording:
            self.broken += 1


class Connection(asyncio.Protocol):
    """One client: sends the next request when the reply to the last one is complete."""

    def __init__(self, requests: Sequence[bytes], first: int, tally: Tally, lost: asyncio.Future[None]) -> None:
        self._requests = requests
        self.next = first
        self._tally = tally
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._body_starts = 0
        self._reply_ends = 0
        self._sent_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the loop of this client."""
        self._transport = cast("asyncio.Transport", transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        """Collect one reply; count it and go on when it is complete."""
        self._buffer = self._buffer + data if self._buffer else data
        if (not self._reply_ends and not self._read_head()) or len(self._buffer) < self._reply_ends:
            return
        latency_s = time.perf_counter() - self._sent_s
        self._tally.count(int(self._buffer[9:12]), self._buffer[self._body_starts :], latency_s)
        self._send()

    def connection_lost(self, error: Exception | None) -> None:
        """Tell the client's task, which connects again."""
        if not self._lost.done():
            self._lost.set_result(None)

    def close(self) -> None:
        """End the connection without counting it."""
        if self._transport is not None:
            self._transport.abort()

    def _send(self) -> None:
        assert self._transport is not None
        request = self._requests[self.next % len(self._requests)]
        self.next += 1
        self._buffer, self._reply_ends = b"", 0
        self._sent_s = time.perf_counter()
        self._transport.write(request)

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = self._buffer[:end].lower()
        at = head.find(b"\r\ncontent-length:")
        if at < 0:
            self._lost.set_exception(ValueError(f"a reply without Content-Length: {head!r}"))
            self.close()
            return False
        line_end = head.find(b"\r\n", at + 2)
        self._body_starts = end + 4
        self._reply_ends = self._body_starts + int(head[at + 17 : line_end if line_end > 0 else end])
        return True


def encode_requests(url: str, bodies: Sequence[bytes]) -> list[bytes]:
    """Complete POST requests for these JSON bodies."""
    host = urlsplit(url).netloc
    head = f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: "
    return [f"{head}{len(body)}\r\n\r\n".encode() + body for body in bodies]


async def measure(url: str, bodies: Sequence[bytes], *, clients: int, seconds: float, warmup_s: float) -> Measured:
    """Keep `clients` requests under way for `warmup_s + seconds` and report the second part."""
    tally = Tally()
    requests = encode_requests(url, bodies)
    # Clients start evenly spread over the list, so that they do not ask for the same users at the same time.
    tasks = [asyncio.create_task(_client(url, requests, i * len(requests) // clients, tally)) for i in range(clients)]
    try:
        await _wait(tasks, warmup_s)
        tally.recording = True
        started_s, cpu_s = time.perf_counter(), time.process_time()
        await _wait(tasks, seconds)
        tally.recording = False
        took_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return summarise(tally, clients=clients, seconds=took_s, cpu_s=cpu_s)


def summarise(tally: Tally, *, clients: int, seconds: float, cpu_s: float) -> Measured:
    """The numbers of one run."""
    ordered = sorted(tally.latencies_s)
    return Measured(
        clients=clients,
        seconds=round(seconds, 3),
        requests=len(ordered),
        requests_per_s=round(len(ordered) / seconds, 1),
        p50_ms=_quantile_ms(ordered, 0.50),
        p99_ms=_quantile_ms(ordered, 0.99),
        max_ms=_quantile_ms(ordered, 1.0),
        non_200=tally.non_200,
        degraded=tally.degraded,
        broken=tally.broken,
        replies=tally.replies,
        generator_cores=round(cpu_s / seconds, 3),
    )


async def _client(url: str, requests: Sequence[bytes], first: int, tally: Tally) -> None:
    """Keep one connection open, with a new one whenever it breaks."""
    loop = asyncio.get_running_loop()
    address = urlsplit(url)
    while True:
        lost: asyncio.Future[None] = loop.create_future()
        connection = Connection(requests, first, tally, lost)
        try:
            await loop.create_connection(lambda c=connection: c, address.hostname or "", address.port or 80)  # type: ignore[misc]
            await lost
        except OSError:
            pass
        finally:
            connection.close()
        first = connection.next
        tally.count_broken()
        await asyncio.sleep(RECONNECT_AFTER_S)


async def _wait(tasks: Sequence[asyncio.Task[None]], seconds: float) -> None:
    """Let the clients work; raise what one of them raised."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


def _quantile_ms(ordered: Sequence[float], q: float) -> float | None:
    if not ordered:
        return None
    return round(ordered[min(len(ordered) - 1, int(q * len(ordered)))] * 1e3, 3)


def main() -> None:
    """Measure one URL with the bodies of a file (one JSON object a line); print the result as JSON."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--url", required=True)
    options.add_argument("--bodies", type=Path, required=True)
    options.add_argument("--clients", type=int, required=True)
    options.add_argument("--seconds", type=float, required=True)
    options.add_argument("--warmup", type=float, required=True)
    given = options.parse_args()
    bodies = given.bodies.read_bytes().splitlines()
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(
            measure(given.url, bodies, clients=given.clients, seconds=given.seconds, warmup_s=given.warmup)
        )
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")


if __name__ == "__main__":
    main()
