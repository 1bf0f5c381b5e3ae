"""What a shard begins with: for each of its partitions the snapshot that reaches furthest, else the release.

Looks into the folders of all shards, of any number of shards: rows and positions of one partition are always taken from
one snapshot, so that shards of another number find theirs by hashing again. Invariant: positions and rows agree, and
records that are neither in the rows nor in the log any more are counted as lost, never passed over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from infra.release import Release
from param_server.chain import Chain, Shelf
from param_server.contract import I64
from param_server.generation import Generation, fill_from_release, fill_from_state
from param_server.images import Begun
from param_server.routing import partition_of
from param_server.snapshot import LogState, Owner, Position, Stored, folder_of, read_tables
from param_server.table import Export

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """Some partitions of the key space."""

    partitions: tuple[int, ...]
    n_partitions: int

    def owns(self, keys: I64) -> I64:
        """Positions of the keys that belong here: i64[n] -> i64[m]."""
        wanted = np.zeros(self.n_partitions, np.bool_)
        wanted[list(self.partitions)] = True
        return np.flatnonzero(wanted[partition_of(keys, self.n_partitions)])


@dataclass(frozen=True, slots=True)
class Plan:
    """Which partitions come from which chain; `from_release` come from none. `refused`: what is not used, and why."""

    chains: tuple[tuple[Chain, Part], ...]
    from_release: Part
    refused: dict[str, str] = field(default_factory=dict)

    def log(self) -> LogState:
        """Where to go on. Partitions of a log that is gone begin anew, with their losses counted."""
        newest = max((chain for chain, _ in self.chains), key=lambda c: c.head.manifest.taken_us, default=None)
        if newest is None:
            return LogState.from_the_beginning(self.from_release.partitions)
        identity, positions = newest.log.identity, dict.fromkeys(self.from_release.partitions, Position(0, 0, 0))
        losses = 0
        for chain, part in self.chains:
            losses += chain.log.losses
            for partition in part.partitions:
                at = chain.log.positions[partition]
                if chain.log.identity != identity:
                    losses += at.offset > 0
                    at = Position(0, at.log_epoch + 1, at.event_time_us)
                positions[partition] = at
        truncations = sum(chain.log.truncations for chain, _ in self.chains)
        return LogState(identity, dict(sorted(positions.items())), losses, truncations)

    @property
    def source(self) -> str:
        """For people: what the rows come from."""
        parts = [str(Path(*chain.head.folder.parts[-3:])) for chain, _ in self.chains]
        return ", ".join(parts + ["release"] * bool(self.from_release.partitions))


@dataclass(frozen=True, slots=True)
class Restored:
    """Filled tables and where they stand. `goes_on` is the chain that deltas of this shard may continue."""

    generation: Generation
    log: LogState
    source: str
    refused: dict[str, str]
    goes_on: Chain | None = None


def plan(root: Path, owner: Owner, partitions: Iterable[int]) -> Plan:
    """Choose for each partition, among all snapshots under `root` that fit `owner`, what reaches furthest."""
    shelves = [Shelf(folder, owner).read() for folder in sorted(root.glob("of-*/shard-*"))]
    candidates = [(shelf, head) for shelf in shelves for head in shelf.heads()]
    known: dict[Path, Chain | None] = {}
    chosen: dict[Path, tuple[Chain, list[int]]] = {}
    left: list[int] = []
    for partition in partitions:
        able = [(shelf, head) for shelf, head in candidates if partition in head.manifest.log.positions]
        for shelf, head in sorted(able, key=lambda c: _reach(c[1], partition), reverse=True):
            if head.folder not in known:
                known[head.folder] = shelf.chain(head)
            if (chain := known[head.folder]) is not None:
                chosen.setdefault(head.folder, (chain, []))[1].append(partition)
                break
        else:
            left.append(partition)
    return Plan(
        tuple((chain, Part(tuple(parts), owner.n_partitions)) for chain, parts in chosen.values()),
        Part(tuple(left), owner.n_partitions),
        {f"{shelf.folder.parent.name}/{shelf.folder.name}/{name}": reason
         for shelf in shelves for name, reason in shelf.refused.items()},
    )  # fmt: skip


def restore(
    root: Path, owner: Owner, partitions: Iterable[int], release: Release, empty: Callable[[], Generation],
    begun: Callable[[], Begun] | None = None,
) -> Restored:  # fmt: skip
    """Fill the tables that `empty` makes, or lay snapshots over those that `begun` makes: they hold the release's rows.

    Raises ReleaseRefused, SnapshotRefused."""
    partitions = tuple(partitions)
    found = plan(root, owner, partitions)
    generation = _laid_over(begun(), found) if begun is not None else None
    if generation is None:
        filled = empty()
        generation = filled if _filled(filled, found, release) else None
    if generation is not None:
        return Restored(generation, found.log(), found.source, found.refused, _goes_on(root, owner, found))
    reason = "it has more rows than table_headroom leaves room for"
    logger.error("the snapshot is not used", extra={"reason": reason})
    if begun is not None:
        generation = begun().generation
    else:
        generation = empty()
        fill_from_release(generation, release, Part(partitions, owner.n_partitions))
    log = found.log()
    # The log is read from its beginning; should that be gone, the identity makes it show.
    positions = {p: Position(0, at.log_epoch, 0) for p, at in log.positions.items()}
    refused = found.refused | {found.source: reason}
    return Restored(generation, LogState(log.identity, positions, log.losses, log.truncations), "release", refused)


def _laid_over(begun: Begun, found: Plan) -> Generation | None:
    """The tables with all snapshots laid over the rows of the release; None when that is not what was saved.

    Oldest first, whatever the versions: an `add` may change a row and leave its version, so the place in the chain
    decides. A chain with a full snapshot is the whole of its partitions: a row of the release that it does not have
    must not be there, and a table forgets none.
    """
    begins = {name: table.held.used for name, table in begun.tables.items()}
    saved = {name: np.zeros(n, np.bool_) for name, n in begins.items()}
    for chain, part in found.chains:
        for link in chain.links if not chain.from_release else chain.links[1:]:
            entries = read_tables(link)
            for name, table in begun.tables.items():
                numbers = table.lay(chosen_of(entries[name], part.owns(entries[name].keys)))
                if numbers is None:
                    begun.give_up(name, "a snapshot has more rows than there is room for")
                    return None
                if not chain.from_release:
                    saved[name][numbers[numbers < begins[name]]] = True
    for name, table in begun.tables.items():
        other = table.held.arrays.keys[: begins[name]][~saved[name]]
        if any(part.owns(other).size for chain, part in found.chains if not chain.from_release):
            begun.give_up(name, "a full snapshot lacks rows of the release")
            return None
    return begun.generation


def merged(chain: Chain, part: Part) -> dict[str, Export]:
    """The entries of a chain that belong to `part`, of each key the newest. Raises SnapshotRefused."""
    pieces: dict[str, list[Export]] = {}
    for link in reversed(chain.links):
        for name, entries in read_tables(link).items():
            pieces.setdefault(name, []).append(chosen_of(entries, part.owns(entries.keys)))
    whole = {name: _joined(exports) for name, exports in pieces.items()}
    # Newest first: the first of equal keys counts.
    return {name: chosen_of(e, np.unique(e.keys, return_index=True)[1]) for name, e in whole.items()}


def chosen_of(entries: Export, at: I64) -> Export:
    """Some of the entries, copied."""
    return Export(entries.keys[at], entries.versions[at], entries.tombstones[at], entries.rows[at])


def _joined(exports: list[Export]) -> Export:
    return Export(
        np.concatenate([e.keys for e in exports]),
        np.concatenate([e.versions for e in exports]),
        np.concatenate([e.tombstones for e in exports]),
        np.concatenate([e.rows for e in exports]),
    )


def _filled(generation: Generation, found: Plan, release: Release) -> bool:
    if generation.tiers is not None:
        log = found.log()
        generation.tiers.follow(log.progress(), complete=log.losses == log.truncations == 0)
    for chain, part in found.chains:
        if generation.tiers is not None and not chain.from_release:
            # Rows may go down a tier as they are put, so each key must come once, in its newest state.
            if not fill_from_state(generation, merged(chain, part), part):
                return False
            continue
        for link in reversed(chain.links):
            if link.manifest.kind == "start":
                fill_from_release(generation, release, part)
            elif not fill_from_state(generation, read_tables(link), part):
                return False
    if found.from_release.partitions:
        fill_from_release(generation, release, found.from_release)
    return True


def _goes_on(root: Path, owner: Owner, found: Plan) -> Chain | None:
    if len(found.chains) != 1 or found.from_release.partitions:
        return None
    chain = found.chains[0][0]
    own = chain.head.folder.parent == folder_of(root, owner.n_shards, owner.index) and not chain.from_release
    return chain if own and chain.head.manifest.owner == owner else None


def _reach(head: Stored, partition: int) -> tuple[int, int, int, int]:
    at = head.manifest.log.positions[partition]
    return at.log_epoch, at.offset, head.manifest.taken_us, head.number
