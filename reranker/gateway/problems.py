"""Every error reply, as RFC 9457 problem+json.

A problem's `type` is a relative URI that never changes; `field` names what is wrong in the request. Carries no user
data beyond the value the user has just sent.
"""

from __future__ import annotations

import msgspec
from starlette.responses import Response

MEDIA_TYPE = "application/problem+json"

_TITLES = {
    "malformed-json": (400, "The body is not JSON"),
    "unauthorized": (401, "The control token is missing or wrong"),
    "unknown-release": (404, "There is no such gray release"),
    "not-now": (409, "The gray release does not allow this now"),
    "release-not-ready": (409, "The candidate release is not served by every tier yet"),
    "idempotency-key-missing": (400, "A change needs an Idempotency-Key"),
    "idempotency-key-reused": (422, "The Idempotency-Key belongs to another change"),
    "in-progress": (409, "The same change is being made now"),
    "version-conflict": (412, "The gray release was changed since it was read"),
    "precondition-required": (428, "A change needs If-Match"),
    "redis-unavailable": (503, "Redis does not answer"),
    "not-found": (404, "There is nothing at this path"),
    "method-not-allowed": (405, "This path does not take this method"),
    "too-large": (413, "The body is too large"),
    "invalid-request": (422, "A field of the request is not valid"),
    "internal": (500, "The gateway failed"),
    "overloaded": (503, "The gateway is at its limit"),
    "log-unavailable": (503, "The event log did not acknowledge in time"),
    "not-ready": (503, "A part of the stack is not ready"),
}


class Problem(Exception):
    """An error reply. `slug` is one of the known types; `field` is a path such as `candidates[3]`."""

    def __init__(self, slug: str, detail: str, *, field: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(detail)
        self.slug = slug
        self.detail = detail
        self.field = field
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        """HTTP status."""
        return _TITLES[self.slug][0]

    def response(self) -> Response:
        """The reply."""
        body = {
            "type": f"/problems/{self.slug}",
            "title": _TITLES[self.slug][1],
            "status": self.status,
            "detail": self.detail,
            **({} if self.field is None else {"field": self.field}),
        }
        headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        return Response(msgspec.json.encode(body), self.status, headers, MEDIA_TYPE)


def invalid(field: str, detail: str) -> Problem:
    """A 422 that names the field."""
    return Problem("invalid-request", detail, field=field)
