"""What goes onto the wire comes off it unchanged; anything else is refused with WireProtocolError and nothing worse."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from infra.errors import (
    DeadlineExceeded,
    InvalidInput,
    LogUnavailable,
    Overloaded,
    Permanent,
    RemoteFailure,
    Retryable,
    TrirankError,
    WireProtocolError,
)
from infra.wire.messages import (
    PROTOCOL_VERSION,
    Reply,
    call_id_of,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)

DTYPES = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", ">i8", ">f4", ">u2")
arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6))
)
names = st.text(min_size=1, max_size=8)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def sent(frames: list[Any], *, shift: int = 0) -> list[Any]:
    """The frames as they arrive: bytes of their own, at an address that is `shift` off its alignment."""
    return [memoryview(b"\0" * shift + bytes(memoryview(frame).cast("B")))[shift:] for frame in frames]


def same(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    return (
        left.shape == right.shape
        and left.dtype == right.dtype.newbyteorder("<")
        and left.tobytes() == right.astype(right.dtype.newbyteorder("<")).tobytes()
    )


@given(st.dictionaries(names, arrays, max_size=6), st.dictionaries(names, plain, max_size=4), st.integers(0, 7))
@settings(deadline=None)
def test_a_request_comes_off_the_wire_as_it_went_on(tensors: dict[str, Any], args: dict[str, Any], shift: int) -> None:
    frames = encode_request(7, "rank", release="r1", trace_id="t", tensors=tensors, args=args)
    call_id, request = decode_request(sent(frames, shift=shift))
    assert (call_id, request.method, request.release, request.trace_id) == (7, "rank", "r1", "t")
    assert request.args == args
    assert request.remaining_s is None
    assert request.tensors.keys() == tensors.keys()
    assert all(same(request.tensors[name], tensors[name]) for name in tensors)


@given(st.dictionaries(names, arrays, max_size=6), st.integers(0, 7))
@settings(deadline=None)
def test_what_is_decoded_is_aligned_contiguous_and_read_only(tensors: dict[str, Any], shift: int) -> None:
    _, reply = decode_reply(sent(encode_reply(1, Reply({}, tensors)), shift=shift))
    assert isinstance(reply, Reply)
    for array in reply.tensors.values():
        assert array.flags.aligned
        assert array.flags.c_contiguous
        assert not array.flags.writeable


def test_large_tensors_travel_alone_and_small_ones_together_without_losing_their_names() -> None:
    tensors = {
        "hist": np.random.default_rng(0).random((50, 64), dtype=np.float32),
        "target": np.random.default_rng(1).random((500, 64), dtype=np.float32),
        "mask": np.ones(50, dtype=np.float32),
        "none": np.zeros((0, 64), dtype=np.float32),
        "rows": np.arange(9000, dtype=np.int64)[::2],
    }
    frames = encode_request(1, "rank", tensors=tensors)
    assert [memoryview(frame).nbytes for frame in frames[1:]] == [12800 + 200, 128000, 36000]
    assert frames[2] is tensors["target"]
    _, request = decode_request(sent(frames))
    assert all(same(request.tensors[name], tensors[name]) for name in tensors)


def test_views_over_received_frames_are_not_copies() -> None:
    frames = sent(encode_reply(1, Reply({}, {"a": np.arange(8, dtype=np.int64)})))
    _, reply = decode_reply(frames)
    assert isinstance(reply, Reply)
    assert np.shares_memory(reply.tensors["a"], np.frombuffer(frames[1], dtype=np.uint8))


def test_the_time_a_message_waited_is_taken_off_what_is_left() -> None:
    frames = encode_request(1, "rank", remaining_s=5.0)
    header = msgspec.msgpack.decode(frames[0])
    header[6] -= 3_000_000
    _, request = decode_request([msgspec.msgpack.encode(header)])
    assert request.remaining_s is not None
    assert 1.0 < request.remaining_s <= 2.0
    header[7] = "a clock of another host"
    _, request = decode_request([msgspec.msgpack.encode(header)])
    assert request.remaining_s == 5.0


def test_numpy_scalars_in_args_travel_as_numbers() -> None:
    _, request = decode_request(encode_request(1, "x", args={"a": np.int64(3), "b": np.float32(0.5)}))
    assert request.args == {"a": 3, "b": 0.5}


@pytest.mark.parametrize(
    ("error", "arrives_as"),
    [
        (Overloaded("full"), Overloaded),
        (DeadlineExceeded("late"), DeadlineExceeded),
        (RemoteFailure("broken"), RemoteFailure),
        (WireProtocolError("what"), WireProtocolError),
        (InvalidInput("k", "is negative"), Permanent),
        (LogUnavailable("away"), Retryable),
        (TrirankError("?"), RemoteFailure),
    ],
)
def test_an_error_travels_as_the_nearest_class_that_says_the_same_action(
    error: TrirankError, arrives_as: type[TrirankError]
) -> None:
    call_id, answer = decode_reply(encode_reply(3, error))
    assert call_id == 3
    assert type(answer) is arrives_as
    assert str(answer) == str(error)


@pytest.mark.parametrize(
    "cannot",
    [
        {"tensors": {"a": np.array(["text"])}},
        {"tensors": {"a": np.array([object()])}},
        {"tensors": {"a": np.zeros(3, dtype="M8[s]")}},
        {"tensors": {"a": np.zeros((1,) * 9)}},
        {"tensors": {str(n): np.zeros(1) for n in range(257)}},
        {"args": {"a": object()}},
        {"args": {"a": 2**80}},
    ],
)
def test_what_cannot_travel_is_refused_before_it_is_sent(cannot: dict[str, Any]) -> None:
    with pytest.raises(WireProtocolError):
        encode_request(1, "x", **cannot)


def request_with(specs: list[Any], *frames: bytes) -> list[Any]:
    return [msgspec.msgpack.encode([PROTOCOL_VERSION, 1, "m", "", "", None, 0, "", {}, specs]), *frames]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\x93\x01\x01"],
        [msgspec.msgpack.encode([PROTOCOL_VERSION + 1, 1, "m", "", "", None, 0, "", {}, []])],
        request_with([["a", "f4", [2]]]),
        request_with([["a", "f4", [2]]], b"1234567"),
        request_with([["a", "f4", [2]]], b"123456789abcdefgh"),
        request_with([["a", "f4", [2]]], b"12345678", b""),
        request_with([["a", "f4", [2]], ["a", "f4", [2]]], b"1" * 16),
        request_with([["a", "f4", [-2]]], b"12345678"),
        request_with([["a", "O", [1]]], b"12345678"),
        request_with([["a", "f4", [0, 2**62, 2**62]]]),
        request_with([["a", "f4", [2**62, 2**62]]], b"12345678"),
        request_with([["a", "f4", [1] * 9]], b"1234"),
        request_with([], b"more"),
    ],
)
def test_a_malformed_message_is_refused(frames: list[Any]) -> None:
    with pytest.raises(WireProtocolError):
        decode_request(frames)


@given(st.lists(st.binary(max_size=80), max_size=4))
def test_random_bytes_are_refused_and_nothing_worse(frames: list[bytes]) -> None:
    for decode in (decode_request, decode_reply):
        with pytest.raises(WireProtocolError):
            decode(frames)
    call_id_of(frames)


@given(st.data())
@settings(deadline=None)
def test_a_damaged_message_is_refused_or_understood_but_never_fails_otherwise(data: st.DataObject) -> None:
    tensors = {"a": np.arange(5, dtype=np.int64), "b": np.ones((2, 3), dtype=np.float32)}
    frames = [bytearray(memoryview(f).cast("B")) for f in encode_request(9, "m", args={"k": [1, "x"]}, tensors=tensors)]
    frame = frames[data.draw(st.integers(0, len(frames) - 1))]
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    received = [bytes(frame) for frame in frames]
    try:
        decode_request(received)
    except WireProtocolError:
        call_id_of(received)


def test_the_call_id_of_another_protocol_version_can_be_read() -> None:
    assert call_id_of([msgspec.msgpack.encode([99, 41, {"something": "new"}])]) == 41
    assert call_id_of([msgspec.msgpack.encode([99, "41"])]) is None
    assert call_id_of([msgspec.msgpack.encode({"a": 1})]) is None
    assert call_id_of([]) is None
