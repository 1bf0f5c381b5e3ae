"""Putting the history of a recorded request where a running stack reads it."""

from __future__ import annotations

from feature_service.hashing import USER, key_of
from feature_service.schema import schema_of
from feature_service.store import HistoryWriter
from infra.redis import connect
from infra.release import RecordedRequest, Release, User
from tests.running_stack import RunningStack


def put_history(stack: RunningStack, release: Release, recorded: RecordedRequest) -> None:
    """Replace the history of the recorded request's user by the one it was recorded with."""
    state = stack.state()
    manifest = release.manifest
    user = User(recorded.user_id, recorded.attributes, recorded.history_items, recorded.history_ts_us)
    key = key_of(USER, recorded.user_id) & 0xFFFFFFFFFFFFFFFF
    with connect(state["redis"]) as redis:
        redis.delete(f"{state['stack']}:h:{key:016x}", f"{state['stack']}:a:{key:016x}")
    writer = HistoryWriter(state["redis"], state["stack"], schema_of(manifest.schema, manifest.schema_fingerprint))
    try:
        writer.seed([user])
    finally:
        writer.close()
