"""A letter is kept until the log has acknowledged it."""

from __future__ import annotations

import json

from infra.errors import LogUnavailable, Permanent
from param_server.deadletter import BYTES_AT_ONCE, FULL_AT, LETTERS_AT_ONCE, LETTERS_PER_S, DeadLetters
from param_server.updates import Letter
from tests.unit.param_server.support import SlowLog, StillClock

LETTER = Letter("crc", "the checksum differs", 3, 17, b"bytes")


def test_a_letter_says_what_it_is_and_where_it_was() -> None:
    log = SlowLog()
    DeadLetters(log, "dead", "embeddings", StillClock()).put(LETTER)
    topic, partition, value, key = log.sent[0]
    assert (topic, partition, value) == ("dead", 0, b"bytes")
    assert json.loads(key or b"") == {
        "reason": "crc",
        "detail": "the checksum differs",
        "topic": "embeddings",
        "partition": 3,
        "offset": 17,
        "skipped": 0,
    }


def test_a_letter_is_pending_until_it_is_acknowledged() -> None:
    log = SlowLog()
    letters = DeadLetters(log, "dead", "embeddings", StillClock())
    letters.put(LETTER)
    letters.settle()
    assert letters.pending == 1
    log.acknowledge()
    letters.settle()
    assert letters.pending == 0


def test_a_letter_that_failed_is_sent_again() -> None:
    log = SlowLog()
    letters = DeadLetters(log, "dead", "embeddings", StillClock())
    letters.put(LETTER)
    log.futures[0].set_exception(LogUnavailable("away"))
    letters.settle()
    letters.settle()
    log.acknowledge()
    letters.settle()
    assert letters.pending == 0
    assert len(log.sent) == 2


def test_a_letter_waits_while_the_log_takes_none() -> None:
    log = SlowLog()
    log.full = True
    letters = DeadLetters(log, "dead", "embeddings", StillClock())
    letters.put(LETTER)
    letters.settle()
    assert (letters.pending, log.sent) == (1, [])
    log.full = False
    letters.settle()
    assert len(log.sent) == 1


def test_a_letter_the_log_will_never_take_is_given_up() -> None:
    log = SlowLog()
    letters = DeadLetters(log, "dead", "embeddings", StillClock())
    letters.put(LETTER)
    log.futures[0].set_exception(Permanent("too large"))
    letters.settle()
    assert letters.pending == 0


def test_too_many_letters_hold_up_the_stream() -> None:
    letters = DeadLetters(SlowLog(), "dead", "embeddings", StillClock())
    for _ in range(FULL_AT):
        letters.put(LETTER)
    assert letters.full


def test_a_flood_is_counted_and_sampled_and_does_not_bury_the_topic() -> None:
    log, clock = SlowLog(), StillClock()
    letters = DeadLetters(log, "dead", "embeddings", clock)
    for _ in range(int(LETTERS_AT_ONCE) + 70):
        letters.put(LETTER)
    assert len(log.sent) == LETTERS_AT_ONCE
    assert letters.skipped == {"crc": 70}
    clock.time_s += 2 / LETTERS_PER_S
    for _ in range(5):
        letters.put(LETTER)
    told = [json.loads(key or b"")["skipped"] for *_, key in log.sent[int(LETTERS_AT_ONCE) :]]
    assert told == [70, 0]
    assert letters.skipped == {"crc": 73}


def test_large_letters_count_by_their_bytes() -> None:
    log = SlowLog()
    letters = DeadLetters(log, "dead", "embeddings", StillClock())
    large = Letter("crc", "", 0, 0, bytes(int(BYTES_AT_ONCE) // 4 + 1))
    for _ in range(8):
        letters.put(large)
    assert len(log.sent) == 3
    assert letters.skipped == {"crc": 5}


def test_a_letter_larger_than_the_limit_goes_through_when_nothing_went_before() -> None:
    log = SlowLog()
    DeadLetters(log, "dead", "embeddings", StillClock()).put(Letter("crc", "", 0, 0, bytes(int(BYTES_AT_ONCE) + 1)))
    assert len(log.sent) == 1
