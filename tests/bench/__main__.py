"""`make bench`: recommend over HTTP, against two peers that do the same work, in the same run.

Systems run one after the other, never two at a time; every round measures each of them, every second round in reverse
order. Before it is measured, a system must give the answers the first one gave. Whatever way this ends, nothing it
started is left running.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from infra.errors import TrirankError
from infra.lifecycle import guard, on_stop_signals
from tests.bench.asks import ask, bodies, differences
from tests.bench.load import Measured
from tests.bench.report import Round, document, faults, table
from tests.bench.stack import System, cpu_s, systems

_UNDER_GUARD = "--under-guard"


def main() -> int:
    """Run everything in a child whose descendants the guard ends."""
    given = _arguments()
    if not given.under_guard:
        return guard([sys.executable, "-m", "tests.bench", *sys.argv[1:], _UNDER_GUARD])
    on_stop_signals(_interrupt)
    with tempfile.TemporaryDirectory(prefix="trirank-bench-", ignore_cleanup_errors=True) as home:
        try:
            return _run(given, Path(home))
        except (TrirankError, RuntimeError, AssertionError) as error:
            print(f"bench: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130


def _run(given: argparse.Namespace, home: Path) -> int:
    requests = bodies(given.release)
    (home / "bodies").write_bytes(b"\n".join(requests))
    found = systems(given.release.resolve(), home)
    if unknown := set(given.systems) - found.keys():
        raise RuntimeError(f"--systems: there is no {sorted(unknown)[0]}; there are {', '.join(found)}")
    chosen = {name: found[name] for name in given.systems}
    reference = given.systems[0]
    expected: list[dict[str, Any]] = []

    def check(name: str, url: str) -> None:
        replies = ask(url, requests)
        if not expected:
            expected.extend(replies)
        elif differing := differences(expected, replies):
            raise RuntimeError(f"{name} and {reference} answer differently:\n  " + "\n  ".join(differing[:10]))

    rounds: list[Round] = []
    try:
        for number in range(given.rounds):
            order = given.systems if number % 2 == 0 else given.systems[::-1]
            measured = {name: _measure(name, chosen[name], check, given, home) for name in order}
            rounds.append({name: measured[name] for name in given.systems})
    finally:
        # A later round that fails does not take the complete ones with it.
        if rounds:
            _report(rounds, given)
    if wrong := faults(rounds):
        print(f"\nbench: {wrong} replies were no full answers: the systems did different work", file=sys.stderr)
        return 1
    return 0


def _report(rounds: Sequence[Round], given: argparse.Namespace) -> None:
    reference = given.systems[0]
    print("\n" + table(rounds, reference), flush=True)
    if given.json:
        about = {"release": str(given.release), "seconds": given.seconds, "warmup_s": given.warmup}
        given.json.write_bytes(document(rounds, reference, **about))


def _measure(
    name: str, system: System, check: Callable[[str, str], None], given: argparse.Namespace, home: Path
) -> dict[int, Measured]:
    print(f"{name}: starting ...", flush=True)
    try:
        system.start()
        check(name, system.url)
        results = {}
        for clients in given.clients:
            before_s = cpu_s(system.pid)
            result = _load(system.url, home / "bodies", clients, given.seconds, given.warmup)
            each_ms = 1e3 * (cpu_s(system.pid) - before_s) / max(result.replies, 1)
            results[clients] = msgspec.structs.replace(result, cpu_ms=round(each_ms, 3))
            print(f"{name}: {clients} clients, {result.requests_per_s:.0f} requests/s", flush=True)
        return results
    finally:
        system.stop()


def _load(url: str, file: Path, clients: int, seconds: float, warmup_s: float) -> Measured:
    command = [sys.executable, "-m", "tests.bench.load", "--url", url, "--bodies", str(file)]
    options = ["--clients", str(clients), "--seconds", str(seconds), "--warmup", str(warmup_s)]
    done = subprocess.run([*command, *options], capture_output=True, check=False, timeout=seconds + warmup_s + 60)
    if done.returncode:
        raise RuntimeError(f"the load generator failed:\n{done.stderr.decode(errors='replace')[-2000:]}")
    return msgspec.json.decode(done.stdout, type=Measured)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    options.add_argument("--release", type=Path, required=True, help="release directory, as `trirank train` makes it")
    options.add_argument("--seconds", type=float, default=8.0, help="measured time per number of clients (8)")
    options.add_argument("--warmup", type=float, default=2.0, help="seconds before that (2)")
    options.add_argument("--clients", type=_numbers, default=[1, 8, 32], help="numbers of clients (1,8,32)")
    options.add_argument("--rounds", type=int, default=2, help="how often each system is measured (2)")
    options.add_argument("--systems", type=_names, default=["trirank", "ray-serve", "monolith"], help="which, in order")
    options.add_argument("--json", type=Path, help="also write everything to this file")
    options.add_argument(_UNDER_GUARD, action="store_true", help=argparse.SUPPRESS)
    return options.parse_args()


def _numbers(text: str) -> Sequence[int]:
    return [int(part) for part in text.split(",")]


def _names(text: str) -> Sequence[str]:
    return text.split(",")


if __name__ == "__main__":
    sys.exit(main())
