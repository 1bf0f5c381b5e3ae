"""Ending tasks for certain."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from infra import tasks
from infra.tasks import ended


async def _stubborn(times: int, met: list[int]) -> None:
    """Loses the first `times` cancellations, as a library's clean-up may."""
    for number in range(times):
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        met.append(number)
    await asyncio.Event().wait()


async def _fails() -> None:
    raise ValueError("on its own")


def test_a_task_that_loses_cancellations_ends_all_the_same(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(tasks, "CANCEL_AGAIN_S", 0.01)
    met: list[int] = []

    async def main() -> None:
        task = asyncio.create_task(_stubborn(2, met))
        await asyncio.sleep(0)
        await ended(task)
        assert task.cancelled()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert met == [0, 1]


def test_tasks_that_have_ended_in_any_way_are_no_trouble() -> None:
    async def main() -> None:
        failed, done = asyncio.create_task(_fails()), asyncio.create_task(asyncio.sleep(0))
        await asyncio.wait([failed, done])
        await ended(failed, done)
        await ended()

    asyncio.run(main())
