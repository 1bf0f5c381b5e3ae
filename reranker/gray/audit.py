"""Who changed what, when and why: a chain of entries, each holding the hash of the one before it. Pure.

An entry carries the whole split it led to, so that the split at any past moment can be read from it. Any edit, removal,
insertion or exchange inside the chain breaks it; a chain cut at its end differs from the head that is kept elsewhere.
The hash is no signature: somebody who can write both chain and head can forge both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from infra.errors import Permanent
from reranker.gray.split import SplitPlan
from reranker.gray.state import Action, State

GENESIS = "0" * 64


class ChainBroken(Permanent):
    """The audit log was changed after it was written."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One change. `previous` and `digest` are hex sha256."""

    seq: int
    at_us: int
    who: str
    action: Action
    why: str
    release: str
    version: int
    state: State
    step: int
    split: SplitPlan
    previous: str
    digest: str = ""


def appended(chain_head: str, entry: Entry) -> Entry:
    """The entry as the successor of the one with digest `chain_head`."""
    linked = msgspec.structs.replace(entry, previous=chain_head, digest="")
    return msgspec.structs.replace(linked, digest=_digest(linked))


def verify_chain(entries: Sequence[Entry], head: str) -> None:
    """Raises ChainBroken naming the first entry that is not what was written, or when the end is not `head`."""
    previous = GENESIS
    for number, entry in enumerate(entries, start=1):
        if entry.seq != number:
            raise ChainBroken(f"entry {number} of the audit log says that it is number {entry.seq}")
        if entry.previous != previous or entry.digest != _digest(entry):
            raise ChainBroken(f"entry {number} of the audit log was changed, or one before it was taken out")
        previous = entry.digest
    if previous != head:
        raise ChainBroken(f"the audit log ends at entry {len(entries)}, but more was written")


def split_at(entries: Sequence[Entry], at_us: int, before: SplitPlan) -> SplitPlan:
    """The split that was in force at a moment; `before` the first entry, that one."""
    split = before
    for entry in entries:
        if entry.at_us > at_us:
            break
        split = entry.split
    return split


def _digest(entry: Entry) -> str:
    content = msgspec.structs.replace(entry, digest="")
    return hashlib.sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()
