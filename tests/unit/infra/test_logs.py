"""One line per record: a constant message and the fields of whoever logged it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from infra.logs import configure_logging


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, factory = root.handlers[:], root.level, logging.getLogRecordFactory()
    # Ray, if another test has loaded it, makes records that have its field already.
    logging.setLogRecordFactory(logging.LogRecord)
    yield
    logging.setLogRecordFactory(factory)
    root.handlers[:] = handlers
    root.setLevel(level)


def test_fields_follow_the_message_without_what_ray_adds(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("INFO")
    logging.getLogger("here").info("done", extra={"rows": 3, "_ray_timestamp_ns": 1796160442463196417})
    logging.getLogger("here").debug("not shown")
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(" INFO here: done rows=3")


def test_debug_is_ours_and_not_that_of_libraries_that_say_more_than_one_can_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("DEBUG")
    for name in ("numba.core.byteflow", "redis.connection", "kafka.conn", "ray.serve", "asyncio"):
        logging.getLogger(name).debug("a thousand of these")
    logging.getLogger("infra.wire.server").debug("answered", extra={"trace": "r-1"})
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("answered trace=r-1")
