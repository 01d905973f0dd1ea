"""Caps on their way from PostgreSQL to Redis: single vertices on demand, whole shows every five minutes.

Written without compare-and-swap (the reference's CAS made upstream skip cap reloads under load): every write carries
the version of the snapshot it was read in, and an older one of the same server never replaces a newer one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import redis
import structlog
from sqlalchemy import Connection, Engine

from opencue_sched.accounting import keys
from opencue_sched.accounting.keys import VertexKind, VertexRef
from opencue_sched.accounting.ledger import Ledger, answering
from opencue_sched.domain.units import UNLIMITED, cap_cores
from opencue_sched.store import accounting as store
from opencue_sched.store.engine import repeatable_read

log = structlog.get_logger(__name__)

CapRow = tuple[str, tuple[str, ...]]
_SCAN_COUNT = 1000


@dataclass(frozen=True, slots=True)
class CapsReport:
    """What a load of caps did. ``missing`` are vertices PostgreSQL does not know; ``kept`` had newer caps already."""

    written: int
    kept: int
    missing: tuple[str, ...] = ()


def make_ledger(engine: Engine, client: redis.Redis, *, owner: str) -> Ledger:
    """A ledger that loads the caps of unseeded vertices from ``engine``."""
    ledger = Ledger(client, owner=owner)
    ledger.load_caps = partial(_load_on_demand, engine, ledger)
    return ledger


def _load_on_demand(engine: Engine, ledger: Ledger, vertex_keys: Sequence[str]) -> None:
    report = load_caps(engine, ledger, vertex_keys)
    log.info("caps_loaded_on_demand", vertices=len(vertex_keys), written=report.written, missing=report.missing)


# Which shows the ledger has the frames of. Frames of all other shows are foreign to a limit: they lower its cap.


@dataclass(frozen=True, slots=True)
class ImportNote:
    """A field of ``acct:counted``: ``version`` of the show's row when it was imported; ``due``: when to import it again
    and book it (Redis TIME, seconds), or 0 when it may be booked (accounting.show_handover)."""

    version: str
    due: float = 0.0

    @property
    def text(self) -> str:
        return f"{self.version}|{self.due:.3f}"

    @classmethod
    def parse(cls, text: str | None) -> ImportNote | None:
        """None for no note, and for an unreadable one."""
        version, found, due = (text or "").partition("|")
        try:
            return cls(version, float(due)) if found else None
        except ValueError:
            return None


def imported_shows(client: redis.Redis) -> dict[str, str]:
    """Shows that are ours, each with the version of its row then. Raises NotReady.

    To be read before PostgreSQL is asked for frames that the ledger does not have: a show that is imported in between
    is taken for one that is not, and its frames count twice for a moment rather than not at all.
    """
    with answering():
        texts = cast("Mapping[str, str]", client.hgetall(keys.IMPORTED))
    notes = {show_id: ImportNote.parse(text) for show_id, text in texts.items()}
    return {show_id: note.version for show_id, note in notes.items() if note is not None and not note.due}


def note_imported(client: redis.Redis, versions: Mapping[str, str]) -> None:
    """These shows are ours, as their rows were in these versions: by a flip, or by filling the store.

    A row that was changed since belongs to a show that may have been away meanwhile: it is imported again.
    """
    if versions:
        with answering():
            client.hset(keys.IMPORTED, mapping={show: ImportNote(version).text for show, version in versions.items()})


# Caps, read and written.


def load_caps(engine: Engine, ledger: Ledger, vertex_keys: Collection[str]) -> CapsReport:
    """Read the caps of these vertices and write them. A subscription that does not exist has burst 0.

    Also the answer to a cap notification, and to "re-read the frames of unmanaged shows that hold a limit".
    """
    wanted = _by_vertex_kind(vertex_keys)
    imported = imported_shows(ledger.client) if VertexKind.LIMIT in wanted else {}
    with repeatable_read(engine) as connection:
        version = store.caps_version(connection)
        rows = _rows_of(connection, wanted, imported)
    written, kept = ledger.write_caps(version, rows)
    found = {key for key, _ in rows}
    missing = tuple(key for key in vertex_keys if key not in found)
    return CapsReport(written, kept, missing)


def reseed_limits(engine: Engine, ledger: Ledger, show_ids: Collection[str]) -> CapsReport:
    """Write all caps of these shows, and every limit. Subscriptions that were deleted get burst 0."""
    stored = _stored_subscriptions(ledger.client, show_ids)
    imported = imported_shows(ledger.client)
    with repeatable_read(engine) as connection:
        version = store.caps_version(connection)
        rows = cap_rows_of_shows(connection, show_ids, imported)
    found = {key for key, _ in rows}
    rows += [(key, _NO_SUBSCRIPTION) for key in stored if key not in found]
    return CapsReport(*ledger.write_caps(version, rows))


def cap_rows_of_shows(connection: Connection, show_ids: Collection[str], imported: Mapping[str, str]) -> list[CapRow]:
    """Vertex keys and hash fields of all caps of these shows, and of every limit (see store.all_limits)."""
    return [
        *map(_subscription, store.subscriptions_of_shows(connection, show_ids)),
        *map(_folder, store.folders_of_shows(connection, show_ids)),
        *map(_job, store.jobs_of_shows(connection, show_ids)),
        *map(_point, store.points_of_shows(connection, show_ids)),
        *map(_limit, store.all_limits(connection, imported)),
    ]


def _by_vertex_kind(vertex_keys: Collection[str]) -> dict[VertexKind, list[VertexRef]]:
    wanted: dict[VertexKind, list[VertexRef]] = {}
    for key in vertex_keys:
        ref = keys.parse(key)
        if ref is not None:
            wanted.setdefault(ref.kind, []).append(ref)
    return wanted


def _rows_of(
    connection: Connection, wanted: Mapping[VertexKind, Sequence[VertexRef]], imported: Mapping[str, str]
) -> list[CapRow]:
    rows: list[CapRow] = []
    if refs := wanted.get(VertexKind.SUBSCRIPTION):
        pairs = [(ref.ids[0], ref.ids[1]) for ref in refs]
        rows += map(_subscription, store.subscriptions(connection, pairs))
        found = {key for key, _ in rows}
        rows += [(key, _NO_SUBSCRIPTION) for key in (keys.subscription(*pair) for pair in pairs) if key not in found]
    if refs := wanted.get(VertexKind.FOLDER):
        rows += map(_folder, store.folders(connection, [ref.ids[0] for ref in refs]))
    if refs := wanted.get(VertexKind.JOB):
        rows += map(_job, store.jobs(connection, [ref.ids[0] for ref in refs]))
    if refs := wanted.get(VertexKind.POINT):
        rows += map(_point, store.points(connection, [(ref.ids[0], ref.ids[1]) for ref in refs]))
    if refs := wanted.get(VertexKind.LIMIT):
        rows += map(_limit, store.limits(connection, [ref.ids[0] for ref in refs], imported))
    return rows


def _stored_subscriptions(client: redis.Redis, show_ids: Collection[str]) -> list[str]:
    with answering():
        scanned = cast(
            "Iterable[str]", client.scan_iter(match=keys.pattern(VertexKind.SUBSCRIPTION), count=_SCAN_COUNT)
        )
        refs = {key: keys.parse(key) for key in scanned}
    shows = frozenset(show_ids)
    return [key for key, ref in refs.items() if ref is not None and ref.ids[0] in shows]


# One function per kind: a row of PostgreSQL (centicores) to the fields of the reference (whole cores).

_NO_SUBSCRIPTION = ("size", "0", "burst", "0")


def _subscription(row: store.SubscriptionCaps) -> CapRow:
    fields = ("size", _cores(row.size_centicores), "burst", _cores(row.burst_centicores))
    return keys.subscription(row.show_id, row.alloc_id), fields


def _folder(row: store.FolderCaps) -> CapRow:
    return keys.folder(row.folder_id), (
        *("int_min_cores", _cores(row.min_centicores), "int_max_cores", _cores(row.max_centicores)),
        *("int_min_gpus", str(row.min_gpus), "int_max_gpus", str(row.max_gpus)),
        *("show_id", row.show_id),
    )


def _job(row: store.JobCaps) -> CapRow:
    return keys.job(row.job_id), (
        *("int_max_cores", _cores(row.max_centicores), "int_max_gpus", str(row.max_gpus)),
        *("int_priority", str(row.priority)),
    )


def _point(row: store.PointCaps) -> CapRow:
    fields = ("int_min_cores", _cores(row.min_centicores), "int_max_cores", str(UNLIMITED))
    return keys.point(row.dept_id, row.show_id), fields


def _limit(row: store.LimitCaps) -> CapRow:
    return keys.limit(row.limit_id), (
        *("int_max_value", str(row.max_value or 0)),
        *("int_foreign", str(row.foreign_running)),
    )


def _cores(centicores: int) -> str:
    return str(cap_cores(centicores))
