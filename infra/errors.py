"""Errors whose class says what to do: retry, dead-letter, shed or fail.

Nothing here carries user payloads: messages reach logs and problem replies.
"""

from __future__ import annotations


class TrirankError(Exception):
    """Base of every error the product raises on purpose."""


class Retryable(TrirankError):
    """The same call may succeed a moment later."""


class Permanent(TrirankError):
    """The same call will fail again; do not retry."""


class Overloaded(Retryable):
    """A bounded queue is full; the caller is told at once. Action: shed."""


class DeadlineExceeded(Retryable):
    """The time given to the call is over. Action: answer without it."""


class PeerGone(Retryable):
    """No live peer, or the peer died during the call. Action: another peer, or answer without it."""


class RemoteFailure(Permanent):
    """The peer answered that it failed; its own log has the details."""


class WireProtocolError(Permanent):
    """A message that is not ours, or of another protocol version."""


class LogUnavailable(Retryable):
    """The Kafka broker cannot be reached."""


class RedisUnavailable(Retryable):
    """Redis cannot be reached or did not answer in time."""


class RedisRefused(RedisUnavailable):
    """Nobody is served by this Redis now: its machine says that nothing listens, or it says that it is still loading.

    Unlike silence this is known for sure: whatever was not written before is not being written by anybody else.
    """


class InvalidInput(Permanent):
    """Input of a user that can never be right; names the field (or file, column and row)."""

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(f"{field}: {detail}")
        self.field = field
        self.detail = detail


class ReleaseRefused(Permanent):
    """A release directory that is damaged, incomplete or does not fit."""


class DoesNotStart(Permanent):
    """A process that Ray started raised this instead of serving, each time it was tried."""


class ConfigurationError(Permanent):
    """A setting that is unknown or impossible; names the key and what to do."""
