"""The split one gateway serves by, and what is still on its way under an older one.

Belongs to one event loop. Refuses to go back to an older version. Invariant: a request is assigned once, and everything
about it (arm, epoch, counts) goes by the split it was assigned with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from reranker.gray.split import Arm, Assignment, SplitPlan, assign, unit_of
from reranker.gray.tally import Tally


class Arms:
    """Assigns requests."""

    def __init__(self, stable: str) -> None:
        self.base = stable
        self.split = SplitPlan(stable=stable)
        self.tally = Tally()
        self._flying: Counter[int] = Counter()

    def follow(self, split: SplitPlan) -> bool:
        """Serve by this split from the next request on; False when it is older than the one in force."""
        if split.version < self.split.version:
            return False
        self.split = split
        self.tally.begin(split.epoch)
        return True

    def assign(
        self,
        *,
        user_id: str | None,
        session_id: str | None,
        request_id: str,
        header: str | None = None,
        forced: Arm | None = None,
    ) -> Assignment:
        """The arm of one request."""
        split = self.split
        unit = unit_of(split.unit, user_id=user_id, session_id=session_id, request_id=request_id, header=header)
        return assign(split, unit, user_id, forced)

    @contextmanager
    def flying(self, assigned: Assignment) -> Iterator[None]:
        """A request of the candidate release is on its way until its reply has been sent."""
        if assigned.arm != "candidate":
            yield
            return
        version = self.split.version
        self._flying[version] += 1
        try:
            yield
        finally:
            self._flying[version] -= 1
            if not self._flying[version]:
                del self._flying[version]

    def flying_before(self, version: int) -> int:
        """Requests of the candidate release that were assigned by an older split and are still on their way."""
        return sum(n for older, n in self._flying.items() if older < version)
