"""`trirank release start|status|watch|pause|resume|promote|abort|rollback|history|why`: the gray release of a running
stack, through its own HTTP interface."""

from __future__ import annotations

import getpass
import json
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from infra.errors import ConfigurationError, InvalidInput, TrirankError
from infra.release import read_release
from infra.settings import Settings, load_settings
from infra.state import control_token, read_state

READY_S = 180.0
# What a start waits for: the tiers of the candidate release, or a Redis that is coming back.
_PASSES = ("/problems/release-not-ready", "/problems/redis-unavailable")
Home = Annotated[Path | None, typer.Option(help="Folder of the running stack (default .trirank).")]
# Longer than an abort waits for a gateway that does not answer (`gray_lease_s`).
TIMEOUT_S = 60.0

Why = Annotated[str, typer.Option(help="The reason, for the audit log.")]
Json = Annotated[bool, typer.Option("--json", help="Print the gateway's answer as it is.")]


class _Api:
    """The release routes of the running stack."""

    def __init__(self, home: Path | None) -> None:
        settings: Settings = load_settings(home=home)
        state = read_state(settings)
        if state is None:
            raise ConfigurationError(f"home: no stack is running in {settings.home}; `trirank up` starts one")
        self._url = f"{state.url}/v1/releases"
        self._headers = {"authorization": f"Bearer {control_token(settings)}", "x-operator": getpass.getuser()}

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> Any:
        """The answer. Raises TrirankError with the problem's detail."""
        data = None if body is None else json.dumps(body).encode()
        if method != "GET":
            headers["idempotency-key"] = uuid.uuid4().hex
        request = urllib.request.Request(
            self._url + path, data=data, method=method, headers={**self._headers, **headers}
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            with error:
                raise _refused(error.read()) from error
        except OSError as error:
            raise TrirankError(f"{self._url} does not answer ({error})") from error

    def current(self) -> dict[str, Any]:
        """The gray release now. Raises TrirankError when there has never been one."""
        found = self.ask("GET", "")["releases"]
        if not found:
            raise TrirankError("there is no gray release; `trirank release start DIRECTORY` begins one")
        return dict(found[0])

    def change(self, action: str, why: str) -> dict[str, Any]:
        """Do it to the current gray release, as it was just read."""
        now = self.current()
        match = {"if-match": f'"{now["version"]}"'}
        return dict(self.ask("POST", f"/{now['name']}:{action}", {"why": why}, **match))


class _Refused(TrirankError):
    """The gateway said no; `kind` is the problem's type."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


def start(
    directory: Annotated[Path, typer.Argument(help="Release directory of the candidate release.")],
    plan: Annotated[Path | None, typer.Option(help="JSON file with steps, gates, overrides ... of the plan.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of this gray release (default: the candidate's and the time).")
    ] = None,
    why: Why = "",
    home: Home = None,
) -> None:
    """Bring a release up beside the one that serves, wait until every tier has it, and show it to the first users."""
    api = _Api(home)
    candidate = read_release(directory.resolve()).manifest.name
    given = _read_plan(plan) if plan else {}
    found = api.ask("GET", "")["releases"]
    draft = {
        "name": name or f"{candidate}-{datetime.now(UTC):%Y%m%d-%H%M%S}",
        "stable": found[0]["serving"] if found else _serving(home),
        "candidate": candidate,
        "path": str(directory.resolve()),
        **given,
    }
    # A start that was cut short has left a draft: it goes on.
    left = found and found[0]["state"] == "draft" and not (given or name)
    goes_on = left and all(found[0]["plan"][part] == draft[part] for part in ("stable", "candidate", "path"))
    created = found[0] if goes_on else api.ask("POST", "", draft)
    print(f"{created['name']}: bringing up {candidate} beside {draft['stable']} ...", file=sys.stderr)
    end_s = time.monotonic() + READY_S
    while True:
        try:
            started = api.change("start", why)
            break
        except _Refused as refused:
            if refused.kind not in _PASSES or time.monotonic() > end_s:
                raise
            time.sleep(0.5)
    print(_line(started))


def _read_plan(path: Path) -> dict[str, Any]:
    try:
        given = json.loads(path.read_text())
    except OSError as error:
        raise InvalidInput("plan", f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidInput("plan", f"{path} is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise InvalidInput("plan", f"{path} holds no JSON object")
    return given


def status(home: Home = None, as_json: Json = False) -> None:
    """Show the gray release and the verdict of every gate."""
    api = _Api(home)
    now = api.current()
    analysis = api.ask("GET", f"/{now['name']}/analysis")
    if as_json:
        print(json.dumps({**now, "analysis": analysis}, indent=2))
        return
    print(_line(now))
    for finding in analysis["decision"]["findings"] if analysis else ():
        print(f"  {finding['verdict']:<13}{finding['sentence']}{'  (dry run)' if finding['dry_run'] else ''}")
    if analysis:
        print(f"  {analysis['decision']['verdict']}: {analysis['decision']['sentence']}")


def watch(home: Home = None) -> None:
    """Print every change and every other verdict until Ctrl-C or the end of the gray release."""
    api, last = _Api(home), ""
    while True:
        now = api.current()
        over = now["state"] in ("promoted", "aborted")
        analysis = None if over else api.ask("GET", f"/{now['name']}/analysis")
        line = _line(now) if over else f"{now['state']}, step {now['step']}, {now['weight_ppm'] / 1e4:g} %"
        if analysis:
            line += f"  {analysis['decision']['verdict']}: {analysis['decision']['sentence']}"
        # Numbers grow all the time; a line is worth printing when something else is said.
        if (said := re.sub(r"[0-9.,]+", "", line) + str(now["step"])) != last:
            print(line, flush=True)
            last = said
        if over:
            return
        time.sleep(1.0)


def pause(why: Why = "", home: Home = None) -> None:
    """Keep the weight and take no further step."""
    print(_line(_Api(home).change("pause", why)))


def resume(why: Why = "", home: Home = None) -> None:
    """Go on from where it was paused."""
    print(_line(_Api(home).change("resume", why)))


def promote(why: Why = "", home: Home = None) -> None:
    """Let the candidate release serve everybody; needs the last step and healthy gates."""
    print(_line(_Api(home).change("promote", why)))


def abort(why: Why = "", home: Home = None) -> None:
    """Take the candidate release away from everybody; returns when every gateway has said so."""
    print(_line(_Api(home).change("abort", why)))


def rollback(why: Why = "", home: Home = None) -> None:
    """After a promotion: back to the release before."""
    print(_line(_Api(home).change("rollback", why)))


def history(home: Home = None, as_json: Json = False) -> None:
    """Who changed the gray release, when and why."""
    api = _Api(home)
    events = api.ask("GET", f"/{api.current()['name']}/events")["events"]
    if as_json:
        print(json.dumps(events, indent=2))
        return
    for event in events:
        at = datetime.fromtimestamp(event["at_us"] / 1e6, UTC)
        weight = event["split"]["weight_ppm"] / 1e4
        print(f"{at:%Y-%m-%d %H:%M:%S}  {event['who']:<12} {event['action']:<9} {weight:>6.2f} %  {event['why']}")


def why_user(user_id: Annotated[str, typer.Argument(metavar="USER", help="User id.")], home: Home = None) -> None:
    """Which arm a user has, and why."""
    api = _Api(home)
    name = api.current()["name"]
    found = api.ask("GET", f"/{name}/assignment?{urllib.parse.urlencode({'user_id': user_id})}")
    print(
        f"{user_id}: {found['arm']} ({found['release']}), because of {found['reason']}; bucket {found['bucket_ppm']} "
        f"of 1000000, the candidate release has those below {found['weight_ppm']}"
    )


def _line(now: dict[str, Any]) -> str:
    line = f"{now['name']}: {now['state']}, step {now['step']} of {now['steps']}, {now['weight_ppm'] / 1e4:g} %"
    line += (
        f", {now['serving']} serves the rest" if now["state"] in ("running", "paused") else f", {now['serving']} serves"
    )
    if said := now.get("acknowledged"):
        line += (
            f"; {said['acked']} of {said['gateways']} gateways after {said['propagation_ms']:.0f} ms, "
            f"{said['inflight']} in flight"
        )
    return f"{line}  ({now['reason']})" if now["reason"] else line


def _serving(home: Path | None) -> str:
    state = read_state(load_settings(home=home))
    if state is None:
        raise ConfigurationError("home: no stack is running")
    return read_release(Path(state.release), verify_files=False).manifest.name


def _refused(raw: bytes) -> _Refused:
    try:
        problem = json.loads(raw)
    except ValueError:
        return _Refused("", raw.decode(errors="replace"))
    field = f"{problem['field']}: " if problem.get("field") else ""
    return _Refused(str(problem.get("type", "")), f"{field}{problem.get('detail', problem)}")
