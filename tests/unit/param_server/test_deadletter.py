"""A letter is kept until the log has acknowledged it."""

from __future__ import annotations

import json

from infra.errors import LogUnavailable, Permanent
from param_server.deadletter import FULL_AT, DeadLetters
from param_server.updates import Letter
from tests.unit.param_server.support import SlowLog

LETTER = Letter("crc", "the checksum differs", 3, 17, b"bytes")


def test_a_letter_says_what_it_is_and_where_it_was() -> None:
    log = SlowLog()
    DeadLetters(log, "dead", "embeddings").put(LETTER)
    topic, partition, value, key = log.sent[0]
    assert (topic, partition, value) == ("dead", 0, b"bytes")
    assert json.loads(key or b"") == {
        "reason": "crc",
        "detail": "the checksum differs",
        "topic": "embeddings",
        "partition": 3,
        "offset": 17,
    }


def test_a_letter_is_pending_until_it_is_acknowledged() -> None:
    log = SlowLog()
    letters = DeadLetters(log, "dead", "embeddings")
    letters.put(LETTER)
    letters.settle()
    assert letters.pending == 1
    log.acknowledge()
    letters.settle()
    assert letters.pending == 0


def test_a_letter_that_failed_is_sent_again() -> None:
    log = SlowLog()
    letters = DeadLetters(log, "dead", "embeddings")
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
    letters = DeadLetters(log, "dead", "embeddings")
    letters.put(LETTER)
    letters.settle()
    assert (letters.pending, log.sent) == (1, [])
    log.full = False
    letters.settle()
    assert len(log.sent) == 1


def test_a_letter_the_log_will_never_take_is_given_up() -> None:
    log = SlowLog()
    letters = DeadLetters(log, "dead", "embeddings")
    letters.put(LETTER)
    log.futures[0].set_exception(Permanent("too large"))
    letters.settle()
    assert letters.pending == 0


def test_too_many_letters_hold_up_the_stream() -> None:
    letters = DeadLetters(SlowLog(), "dead", "embeddings")
    for _ in range(FULL_AT):
        letters.put(LETTER)
    assert letters.full
