"""Ending asyncio tasks for certain.

A task that is cancelled while a library inside it cleans up can lose the cancellation (what the clean-up raises takes
its place), and then goes on for ever. Invariant: after `ended` returns, none of the tasks runs.
"""

from __future__ import annotations

import asyncio
from typing import Any

CANCEL_AGAIN_S = 0.5


async def ended(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks, again and again where that is needed, and return when all have ended, whatever way."""
    running = {task for task in tasks if not task.done()}
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=CANCEL_AGAIN_S)
    # Retrieved, so that what they ended with is not reported as lost.
    await asyncio.gather(*tasks, return_exceptions=True)
