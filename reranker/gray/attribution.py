"""The recommendation id: what showed an item, signed, so that feedback is attributed without remembering replies.

40 characters of URL-safe base64 over `flags u8 | epoch u32 | generation u32 | shown u32 (s since 1970) | request 8
bytes | HMAC-SHA256 cut to 9 bytes`, big-endian. A caller may add `.RANK` to say which place of the answer an event is
about. Refuses nothing loudly: an id that is missing, foreign or forged belongs to no arm. Pure.
"""

from __future__ import annotations

import hmac
import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass

from reranker.gray.split import Arm, Assignment

REQUEST_BYTES = 8
MAX_RANK = 500
_MAC_BYTES = 9
_BODY = struct.Struct(f">BIII{REQUEST_BYTES}s")
_CHARACTERS = 4 * (_BODY.size + _MAC_BYTES) // 3
_CANDIDATE, _COMPARED = 1, 2
_U32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Attribution:
    """What an id says. `epoch` is the gray release (0: none), `rank` the place the caller named, from 1 on."""

    epoch: int
    generation: int
    arm: Arm
    compared: bool
    shown_s: int
    request: bytes
    rank: int | None = None


class Signer:
    """Makes and reads recommendation ids with the key all gateways of a stack share."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def sign(self, assigned: Assignment, *, generation: int, shown_s: int, request: bytes) -> str:
        """The id of one reply; `request` are 8 bytes nobody else has."""
        flags = _CANDIDATE * (assigned.arm == "candidate") | _COMPARED * assigned.compared
        body = _BODY.pack(flags, assigned.epoch & _U32, generation & _U32, shown_s & _U32, request)
        return urlsafe_b64encode(body + self._mac(body)).decode()

    def read(self, recommendation_id: str | None) -> Attribution | None:
        """What the id says; None when it is none of ours."""
        if recommendation_id is None or not recommendation_id.isascii():
            return None
        signed, _, place = recommendation_id.partition(".")
        if len(signed) != _CHARACTERS or (place and not _is_rank(place)):
            return None
        try:
            raw = urlsafe_b64decode(signed)
        except ValueError:
            return None
        body, mac = raw[: _BODY.size], raw[_BODY.size :]
        # The encoding must be the one we make: decoders pass over characters that are not base64.
        if not hmac.compare_digest(mac, self._mac(body)) or urlsafe_b64encode(raw) != signed.encode():
            return None
        flags, epoch, generation, shown_s, request = _BODY.unpack(body)
        arm: Arm = "candidate" if flags & _CANDIDATE else "stable"
        rank = int(place) if place else None
        return Attribution(epoch, generation, arm, bool(flags & _COMPARED), shown_s, request, rank)

    def _mac(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256")[:_MAC_BYTES]


def _is_rank(text: str) -> bool:
    return text.isdecimal() and len(text) <= len(str(MAX_RANK)) and 1 <= int(text) <= MAX_RANK
