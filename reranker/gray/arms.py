"""The split one gateway serves by, for how long it may, and what is still on its way under an older one.

Belongs to one event loop. Refuses to go back to an older version, and to serve the candidate release once nobody has
confirmed the split for `lease_s`: this gateway may have been cut off or stopped while somebody took the release back.
Then stable serves everybody until the split is read again. Invariant: a request is assigned once, and everything about
it (arm, epoch, counts) goes by that split, unless its release is taken back before it is answered.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from reranker.gray.split import Arm, Assignment, SplitPlan, assign, unit_of
from reranker.gray.tally import Tally

# Longer than three reads of the split, shorter than anybody wants to wait for a gateway that does not answer.
LEASE_S = 3.0


class Arms:
    """Assigns requests. `clock_s` is monotonic and goes on while the process is stopped."""

    def __init__(self, stable: str, clock_s: Callable[[], float] = time.monotonic, *, lease_s: float = LEASE_S) -> None:
        self.base = stable
        self.split = SplitPlan(stable=stable)
        self.tally = Tally()
        self._clock_s = clock_s
        self._lease_s = lease_s
        self._good_until_s = 0.0
        self._flying: Counter[int] = Counter()

    def follow(self, split: SplitPlan) -> bool:
        """Serve by this split from the next request on; False when it is older than the one in force."""
        if split.version < self.split.version:
            return False
        self.split = split
        self.tally.begin(split.epoch)
        return True

    def renew(self, began_s: float) -> None:
        """The split in force is the newest: a read that began at `began_s` says so."""
        self._good_until_s = began_s + self._lease_s

    def hold(self, began_s: float) -> None:
        """At `began_s` nobody could change the split: keep serving by it. Does not bring back a lease that has ended:
        the split may have changed in between."""
        if began_s <= self._good_until_s:
            self._good_until_s = began_s + self._lease_s

    @property
    def fenced(self) -> bool:
        """Whether the candidate release must not be served because the split was not confirmed in time."""
        return self.split.candidate is not None and self._clock_s() > self._good_until_s

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
        assigned = assign(split, unit, user_id, forced)
        if split.candidate is not None and self._clock_s() > self._good_until_s:
            return self.withdrawn(assigned)
        return assigned

    def stands(self, assigned: Assignment) -> bool:
        """Whether an answer made by this assignment may leave now."""
        if assigned.arm == "stable":
            return True
        if self.split.candidate == assigned.release:
            return not self.fenced
        return self.split.stable == assigned.release

    def withdrawn(self, assigned: Assignment) -> Assignment:
        """The assignment instead of one that must not be served (any more): stable, and counted nowhere."""
        split = self.split
        reason = "fenced" if split.candidate is not None else split.idle_reason
        return Assignment(split.stable, "stable", assigned.bucket_ppm, reason)

    @contextmanager
    def flying(self, assigned: Assignment) -> Iterator[None]:
        """A request of the candidate release is on its way until its reply has been made."""
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
