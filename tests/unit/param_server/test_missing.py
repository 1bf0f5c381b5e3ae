"""Keys that are not held: asked for once, forgotten when written to, and who waits is read first."""

from __future__ import annotations

import numpy as np

from param_server.contract import Op
from param_server.missing import Missing
from param_server.rowstate import Write


def write(order: int = 0) -> Write:
    return Write(Op.ADD, 1, np.ones(2, np.float32), False, order)


def keys_of(read: tuple[int, np.ndarray] | None) -> list[int]:
    return [] if read is None else read[1].tolist()


def test_a_key_is_read_once_however_often_it_is_asked_for() -> None:
    missing = Missing()
    assert missing.unknown(5, 0.0)
    missing.ask(5)
    assert not missing.unknown(5, 0.0)
    assert keys_of(missing.next_read(10)) == [5]
    assert not missing.unknown(5, 0.0)
    assert missing.next_read(10) is None


def test_a_read_counts_only_if_nothing_was_written_to_its_key_since() -> None:
    missing = Missing()
    missing.ask(5)
    read = missing.next_read(10)
    assert read is not None
    missing.forget([5])
    missing.ask(5)
    later = missing.next_read(10)
    assert later is not None
    assert not missing.arrived(read[0], 5)
    assert missing.arrived(later[0], 5)
    assert not missing.arrived(later[0], 5)


def test_an_absent_key_is_remembered_for_a_while_and_until_it_is_written_to() -> None:
    missing = Missing()
    missing.remember_absent(5, 10.0, sure=True)
    assert not missing.unknown(5, 9.9)
    assert missing.surely_absent(5, 9.9)
    assert not missing.surely_absent(5, 10.0)
    assert missing.unknown(5, 10.0)
    missing.remember_absent(5, 20.0, sure=False)
    assert not missing.surely_absent(5, 11.0)
    missing.forget([5])
    assert missing.unknown(5, 11.0)


def test_memory_of_absent_keys_and_of_wishes_is_bounded() -> None:
    missing = Missing()
    for key in range(70_000):
        missing.remember_absent(key, 10.0, sure=True)
    assert missing.n_absent == 65_536
    assert missing.unknown(0, 1.0)
    assert not missing.unknown(69_999, 1.0)
    assert [missing.ask(key) for key in range(100_000, 100_000 + 16_385)][-2:] == [True, False]


def test_keys_that_writes_wait_for_are_read_first_and_are_not_forgotten() -> None:
    missing = Missing()
    for key in range(5):
        missing.ask(key)
    missing.wait(9, write(1))
    missing.wait(9, write(2))
    missing.forget([9, 0])
    assert keys_of(missing.next_read(2)) == [9, 1]
    assert missing.waits(9)
    assert missing.n_waiting == 2
    assert [w.order for w in missing.take_waiting(9) or []] == [1, 2]
    assert missing.n_waiting == 0
    assert missing.take_waiting(9) is None


def test_a_write_waits_for_the_read_that_is_under_way() -> None:
    missing = Missing()
    missing.ask(5)
    read = missing.next_read(10)
    assert read is not None
    missing.wait(5, write())
    assert missing.next_read(10) is None
    assert missing.arrived(read[0], 5)
    missing.ask_again(5)
    assert keys_of(missing.next_read(10)) == [5]
