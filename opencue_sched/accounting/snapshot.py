"""The proc table as ledger entries, at one moment."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import structlog
from sqlalchemy import Connection, Engine

from opencue_sched.accounting.differences import additions
from opencue_sched.accounting.entries import SEPARATORS, Booking
from opencue_sched.accounting.scripts import Change, chunks
from opencue_sched.domain.farm import Vertices
from opencue_sched.domain.units import booked_cores
from opencue_sched.store import accounting as store
from opencue_sched.store import proc_snapshot

log = structlog.get_logger(__name__)

_IDS_PER_STATEMENT = 5000
_ROWS_BETWEEN_PAUSES = 2000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The proc table at one moment: managed shows, and the entry of each of their procs."""

    managed: frozenset[str]
    entries: Mapping[str, str]


def read_snapshot(engine: Engine, only: Collection[str] | None = None) -> Snapshot:
    """Managed shows and their procs in one transaction that sees one moment."""
    with repeatable_read(engine) as connection:
        return snapshot_of(connection, only)


@contextmanager
def repeatable_read(engine: Engine) -> Iterator[Connection]:
    """A transaction whose statements all see the same moment."""
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection, connection.begin():
        yield connection


def snapshot_of(
    connection: Connection, only: Collection[str] | None = None, *, meanwhile: Callable[[], object] | None = None
) -> Snapshot:
    """The snapshot a transaction sees; ``meanwhile`` is called now and then while it is read."""
    managed = store.managed_show_ids(connection)
    procs = proc_snapshot.procs(connection, only)
    return Snapshot(managed, entries_of(procs if meanwhile is None else _with_pauses(procs, meanwhile)))


def _with_pauses(rows: Iterable[proc_snapshot.ProcRow], pause: Callable[[], object]) -> Iterator[proc_snapshot.ProcRow]:
    for number, row in enumerate(rows):
        if number % _ROWS_BETWEEN_PAUSES == 0:
            pause()
        yield row


def entries_of(rows: Iterable[proc_snapshot.ProcRow]) -> dict[str, str]:
    """Procs as ledger entries: cores rounded up per proc."""
    return {row.proc_id: _booking(row).packed() for row in rows if _countable(row.show_id)}


def _booking(row: proc_snapshot.ProcRow) -> Booking:
    alloc, folder, job, layer, dept = (
        vertex_id if _countable(vertex_id) else ""
        for vertex_id in (row.alloc_id, row.folder_id, row.job_id, row.layer_id, row.dept_id)
    )
    limits = tuple(filter(_countable, row.limit_ids))
    vertices = Vertices(row.show_id, alloc, folder, job, layer, dept, limits)
    return Booking(row.proc_id, vertices, booked_cores(row.centicores), row.gpus)


def _countable(vertex_id: str) -> bool:
    """Whether an id can be counted by. One that cannot is left out: nothing can be booked there either, and whatever
    else the proc takes has to count."""
    if not any(separator in vertex_id for separator in SEPARATORS):
        return True
    log.error("vertex_cannot_be_counted", id=vertex_id)
    return False


def may_still_commit(engine: Engine, age_seconds: float) -> bool:
    """Whether what was booked an age ago may still be committed, because PostgreSQL has not ended with its COMMIT.

    That was sent within a commit deadline, at most a third of an age. To be asked before the snapshot is taken: what
    has ended by then is in it.
    """
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        stalled = proc_snapshot.unfinished_commits(connection, age_seconds / 3)
    if stalled:
        log.warning("commits_are_stalled", commits=stalled, seconds=age_seconds / 3)
    return stalled > 0


def fresh_additions(engine: Engine, proc_ids: Collection[str]) -> list[Change]:
    """Procs the ledger lacks, as they are now: one that is gone meanwhile is not added."""
    changes: list[Change] = []
    for part in chunks(list(proc_ids), _IDS_PER_STATEMENT):
        with engine.begin() as connection:
            changes += additions(entries_of(proc_snapshot.procs_by_id(connection, part)))
    return changes
