"""What a change of the gray release has to bring along: the version it was decided on, and a key of its own.

Without `If-Match` a change is refused (428), with one that somebody was faster than too (412); `*` takes the release as
it is. The same `Idempotency-Key` with the same call gets the same reply again, with another call it is refused.
Invariant: a change that was made and acknowledged is made once, however often its caller asks.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import Response

from infra.errors import RedisUnavailable
from reranker.gateway.problems import Problem, invalid
from reranker.gray.store import GrayStore, Kept

logger = logging.getLogger(__name__)

MAX_KEY = 256
RETRY_AFTER_S = 1

Handle = Callable[[Request], Awaitable[Response]]


def version_in(request: Request) -> int | None:
    """The version the change was decided on; None: any (`*`). Raises Problem (428, 412)."""
    given = request.headers.get("if-match")
    if given is None:
        raise Problem("precondition-required", 'If-Match: "VERSION", the ETag of what was read; or If-Match: *')
    if given.strip() == "*":
        return None
    version = given.strip().removeprefix('"').removesuffix('"')
    if not version.isdecimal():
        raise Problem("version-conflict", f"If-Match is the version in quotes, not {given[:80]}")
    return int(version)


async def once(store: GrayStore, request: Request, handle: Handle) -> Response:
    """The reply of `handle`, or the one it gave to the same call before. Raises Problem (400, 409, 422)."""
    given = request.headers.get("idempotency-key", "")
    if not given:
        raise Problem("idempotency-key-missing", "Idempotency-Key: any text of your own, another for each change")
    if len(given) > MAX_KEY:
        raise invalid("Idempotency-Key", f"Expected at most {MAX_KEY} characters")
    key = f"{request.method} {request.url.path} {given}"
    asked = hashlib.sha256(await request.body()).hexdigest() + request.headers.get("if-match", "")
    if (before := await store.begin(key, asked)) is not None:
        return _again(before, asked)
    try:
        response = await handle(request)
    except BaseException:
        with suppress(RedisUnavailable):
            await store.give_up(key)
        raise
    reply = Kept(asked, response.status_code, response.headers.get("etag", ""), bytes(response.body).decode())
    try:
        await store.keep(key, reply)
    except RedisUnavailable as error:
        # The change is made; that its reply cannot be repeated is no reason to say otherwise.
        logger.warning("the reply to a change could not be kept", extra={"reason": str(error)})
    return response


def _again(before: Kept, asked: str) -> Response:
    if before.fingerprint != asked:
        raise Problem("idempotency-key-reused", "Another body or If-Match was sent with this Idempotency-Key")
    if not before.status:
        raise Problem("in-progress", "Ask again in a moment", retry_after_s=RETRY_AFTER_S)
    headers = {"idempotent-replay": "true", **({"etag": before.etag} if before.etag else {})}
    return Response(before.body, before.status, headers, "application/json")
