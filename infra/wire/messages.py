"""What travels on the wire: a msgpack header, then the tensors as raw bytes.

    frame 0      header, a msgpack array whose first two members are protocol version and call id, for ever
    frame 1...   tensors, see tensors.py

Refuses everything that is not exactly that, with WireProtocolError. Invariant: decoding never raises anything else,
whatever the bytes. Time left travels as a duration, because clocks of two machines do not agree; between processes
of one host the age of a message is known too and is taken off.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from infra.errors import (
    DeadlineExceeded,
    Overloaded,
    Permanent,
    RemoteFailure,
    Retryable,
    TrirankError,
    WireProtocolError,
)
from infra.wire.tensors import Array, Buffer, Spec, lay_out, pick_up

PROTOCOL_VERSION = 1
_MAX_DETAIL_CHARS = 500

# What an error is called on the wire; any other error travels as the nearest of its bases.
_ERRORS: dict[str, type[TrirankError]] = {
    error.__name__: error
    for error in (DeadlineExceeded, Overloaded, Permanent, RemoteFailure, Retryable, WireProtocolError)
}


@dataclass(frozen=True, slots=True)
class Request:
    """One call as a handler sees it; `remaining_s` is the time left at the moment of receipt, None is no deadline."""

    method: str
    release: str = ""
    trace_id: str = ""
    remaining_s: float | None = None
    args: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one call. Tensors of 512 KiB or more are not copied: do not write to them after returning."""

    args: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hello:
    """Who a server says it is; a client that expected another role or release does not use it."""

    role: str
    name: str
    release: str
    generation: int
    schema: str


class _RequestHeader(msgspec.Struct, array_like=True, frozen=True):
    version: int
    call_id: int
    method: str
    release: str
    trace_id: str
    remaining_us: int | None
    sent_us: int
    clock: str
    args: dict[str, Any]
    tensors: list[Spec]


class _ReplyHeader(msgspec.Struct, array_like=True, frozen=True):
    version: int
    call_id: int
    error: str
    detail: str
    args: dict[str, Any]
    tensors: list[Spec]


_Header = TypeVar("_Header", _RequestHeader, _ReplyHeader)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot travel in args")


def _clock_name() -> str:
    """Names the monotonic clock of this host: processes with the same name read the same clock."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        parts = boot + os.readlink("/proc/self/ns/time")
    except OSError:
        parts = f"{os.getpid()} {time.time_ns()}"  # unknown host: the clock is this process's alone
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


_CLOCK = _clock_name()
_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_request_decoder = msgspec.msgpack.Decoder(_RequestHeader)
_reply_decoder = msgspec.msgpack.Decoder(_ReplyHeader)


def encode_request(
    call_id: int,
    method: str,
    *,
    release: str = "",
    trace_id: str = "",
    remaining_s: float | None = None,
    args: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Array] | None = None,
) -> list[Buffer]:
    """The frames of a request. Raises WireProtocolError for what cannot travel."""
    specs, frames = lay_out(tensors) if tensors else ([], [])
    remaining_us = None if remaining_s is None else int(remaining_s * 1e6)
    sent_us = time.monotonic_ns() // 1000
    header = _RequestHeader(
        PROTOCOL_VERSION, call_id, method, release, trace_id, remaining_us, sent_us, _CLOCK, dict(args or {}), specs
    )
    return [_encode(header), *frames]


def decode_request(frames: Sequence[Buffer]) -> tuple[int, Request]:
    """Call id and request. The time it waited in buffers is taken off `remaining_s` when the sender has our clock."""
    header = _decode(_request_decoder, frames)
    remaining_s = None
    if header.remaining_us is not None:
        waited_us = time.monotonic_ns() // 1000 - header.sent_us if header.clock == _CLOCK else 0
        remaining_s = (header.remaining_us - max(0, waited_us)) / 1e6
    tensors = pick_up(header.tensors, frames)
    request = Request(header.method, header.release, header.trace_id, remaining_s, header.args, tensors)
    return header.call_id, request


def encode_reply(call_id: int, reply: Reply | TrirankError) -> list[Buffer]:
    """The frames of an answer. Raises WireProtocolError for what cannot travel."""
    if isinstance(reply, TrirankError):
        detail = str(reply)[:_MAX_DETAIL_CHARS]
        return [_encode(_ReplyHeader(PROTOCOL_VERSION, call_id, _error_name(reply), detail, {}, []))]
    specs, frames = lay_out(reply.tensors) if reply.tensors else ([], [])
    return [_encode(_ReplyHeader(PROTOCOL_VERSION, call_id, "", "", reply.args, specs)), *frames]


def decode_reply(frames: Sequence[Buffer]) -> tuple[int, Reply | TrirankError]:
    """Call id and answer; an error comes back as a value. An error name we do not know is a RemoteFailure."""
    header = _decode(_reply_decoder, frames)
    if header.error:
        return header.call_id, _ERRORS.get(header.error, RemoteFailure)(header.detail)
    return header.call_id, Reply(header.args, pick_up(header.tensors, frames))


def call_id_of(frames: Sequence[Buffer]) -> int | None:
    """The call id of a message we may not otherwise understand (another version), so that it can be refused by name."""
    try:
        parts = msgspec.msgpack.decode(frames[0])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, IndexError):
        return None
    if isinstance(parts, list) and len(parts) >= 2 and all(type(part) is int for part in parts[:2]):
        return int(parts[1]) if 0 <= parts[1] < 1 << 63 else None
    return None


def _error_name(error: TrirankError) -> str:
    return next((base.__name__ for base in type(error).__mro__ if base.__name__ in _ERRORS), "RemoteFailure")


def _encode(header: _RequestHeader | _ReplyHeader) -> bytes:
    try:
        return _encoder.encode(header)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireProtocolError(f"args cannot travel: {error}") from error


def _decode(decoder: msgspec.msgpack.Decoder[_Header], frames: Sequence[Buffer]) -> _Header:
    if not frames:
        raise WireProtocolError("no header")
    try:
        header = decoder.decode(frames[0])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireProtocolError(f"header: {error}") from error
    if header.version != PROTOCOL_VERSION:
        raise WireProtocolError(f"protocol {header.version}; this is protocol {PROTOCOL_VERSION}")
    return header
