"""`trirank up`, `down` and `status`: one stack on this machine."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer

from infra.errors import ConfigurationError, TrirankError
from infra.lifecycle import alive, guard, on_stop_signals
from infra.logs import configure_logging
from infra.ray_texts import ray_texts_in
from infra.release import read_release
from infra.settings import load_settings
from infra.state import read_state, state_path

Home = Annotated[Path | None, typer.Option(help="Folder of caches, releases and the running stack (default .trirank).")]


def up(
    release: Annotated[Path | None, typer.Option(help="Release directory to serve; `trirank train` makes one.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (default 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port of all gateways (default 8000).")] = None,
    redis: Annotated[str | None, typer.Option(help="redis:// URL of an existing Redis; none starts one.")] = None,
    kafka: Annotated[str | None, typer.Option(help="HOST:PORT of an existing Kafka; none starts a broker.")] = None,
    shards: Annotated[int | None, typer.Option(help="Parameter-server shards (default 1).")] = None,
    shard_replicas: Annotated[int | None, typer.Option(help="Processes for each shard's rows (default 1).")] = None,
    gateways: Annotated[int | None, typer.Option(help="Gateway processes on the one port (default 2).")] = None,
    edge_replicas: Annotated[int | None, typer.Option(help="Edge ranker replicas (default 1).")] = None,
    rerank_replicas: Annotated[int | None, typer.Option(help="Reranker replicas (default 1).")] = None,
    home: Home = None,
) -> None:
    """Start the stack and serve until Ctrl-C. Further settings: TRIRANK_* variables or trirank.toml."""
    given = {
        "release": release, "host": host, "port": port, "redis": redis, "kafka": kafka, "shards": shards,
        "shard_replicas": shard_replicas, "gateways": gateways, "edge_replicas": edge_replicas,
        "rerank_replicas": rerank_replicas, "home": home,
    }  # fmt: skip
    load_settings(**given)  # a wrong setting is told before anything starts
    command = [sys.executable, "-m", "infra.cli", "supervise", json.dumps(given, default=str)]
    base = os.environ.get("RAY_TMPDIR")
    with tempfile.TemporaryDirectory(prefix="trirank-ray-", dir=base, ignore_cleanup_errors=True) as ray_dir:
        # Short, and not in the home folder: the paths of Ray's sockets end at 107 bytes.
        os.environ["RAY_TMPDIR"] = ray_dir
        status = guard(command)
    raise typer.Exit(status)


def supervise(given: str) -> None:
    """The supervisor under the guard of `up`."""
    from infra.stack import Stack

    settings = load_settings(**json.loads(given))
    configure_logging(settings.log_level)
    stack = Stack(settings)
    on_stop_signals(stack.request_stop)
    started_s, terminal = time.monotonic(), sys.stdout
    with ray_texts_in(settings.run_dir / "ray.log"):
        try:
            state = stack.start()
            if stack.stopping:
                return
            welcome = _welcome(state.url, time.monotonic() - started_s, _somebody(settings.release))
            print(welcome, file=terminal, flush=True)
            stack.supervise()
        finally:
            stack.stop()


def _somebody(release: Path | None) -> str:
    """A user the release knows, for the line to try it with."""
    users = read_release(release, verify_files=False).users() if release else []
    return users[0].user_id if users else "somebody"


def _welcome(url: str, seconds: float, user_id: str) -> str:
    body = json.dumps({"user_id": user_id, "k": 10, "explain": True}, separators=(",", ":"))
    return (
        f"\nTrirank is ready after {seconds:.1f} s: {url}  (Ctrl-C stops it)\n\n"
        f"  curl -s {url}/v1/recommend -d {shlex.quote(body)}\n\n"
        f"  {url}/docs   {url}/v1/status   {url}/metrics\n"
    )


def down(home: Home = None, timeout_s: Annotated[float, typer.Option(help="Seconds to wait.")] = 30.0) -> None:
    """Stop the running stack of this home folder."""
    settings = load_settings(home=home)
    state = read_state(settings)
    if state is None:
        print(f"no stack is running in {settings.home}")
        return
    end = time.monotonic() + timeout_s
    for pid in (state.guard_pid, state.supervisor_pid):
        if alive(pid) and _is_trirank(pid):
            os.kill(pid, signal.SIGTERM)
            break
    while any(alive(pid) and _is_trirank(pid) for pid in (state.guard_pid, state.supervisor_pid)):
        if time.monotonic() > end:
            raise TrirankError(f"the stack (pid {state.guard_pid}) did not stop within {timeout_s:.0f} s")
        time.sleep(0.1)
    state_path(settings).unlink(missing_ok=True)
    print("stopped")


def _is_trirank(pid: int) -> bool:
    """Pids are reused: a stale state file must not make us stop a stranger."""
    try:
        return b"trirank" in (command := Path(f"/proc/{pid}/cmdline").read_bytes()) or b"infra.cli" in command
    except OSError:
        return False


def status(
    home: Home = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the gateway's answer as it is.")] = False,
) -> None:
    """Show what runs: release, tiers, stream positions, Redis and Kafka."""
    settings = load_settings(home=home)
    state = read_state(settings)
    if state is None:
        raise ConfigurationError(f"home: no stack is running in {settings.home}; `trirank up` starts one")
    try:
        with urllib.request.urlopen(f"{state.url}/v1/status", timeout=5) as reply:
            answer = json.load(reply)
    except (urllib.error.URLError, OSError) as error:
        raise TrirankError(f"{state.url} does not answer ({error}); is it still starting?") from error
    print(json.dumps(answer, indent=2) if as_json else _table(answer))


def _table(answer: dict[str, Any], indent: str = "") -> str:
    lines = []
    for name, value in answer.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}:", _table(value, indent + "  ")]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            lines.append(f"{indent}{name}:")
            lines += [f"{indent}  - " + "  ".join(f"{k}={_cell(v)}" for k, v in row.items()) for row in value]
        else:
            lines.append(f"{indent}{name}: {value}")
    return "\n".join(lines)


def _cell(value: object) -> str:
    """One value within a line; texts that do not fit there are counted, and `--json` has them."""
    if isinstance(value, dict):
        if any(isinstance(one, str | dict | list) for one in value.values()):
            return f"{len(value)} (see --json)"
        return ",".join(f"{name}:{one}" for name, one in value.items()) or "none"
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return str(value)
