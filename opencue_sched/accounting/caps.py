"""Caps on their way from PostgreSQL to Redis: single vertices on demand, whole shows every five minutes.

A vertex whose caps are in Redis is *seeded*; scripts refuse a booking under any other. Caps are written without
compare-and-swap, which would skip reloads under load, as in the reference: every write carries the version of the
snapshot in which the caps were read, and an older version of the same server never replaces a newer one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any, cast

import redis
from sqlalchemy import Connection, Engine, Row

from opencue_sched.accounting import keys
from opencue_sched.accounting.imported_shows import imported_shows
from opencue_sched.accounting.keys import VertexKind
from opencue_sched.accounting.ledger import CapRow, Ledger, answering, id_calls
from opencue_sched.accounting.seats import Settling
from opencue_sched.clients.postgres import repeatable_read
from opencue_sched.domain.units import cap_cores
from opencue_sched.errors import InvalidInput
from opencue_sched.settings import Accounting
from opencue_sched.store import accounting as store
from opencue_sched.store.limit_types import LicenceReport, database_seconds, reports_of

_SCAN_COUNT = 1000
"""How many keys one step of a SCAN looks at."""


def make_ledger(engine: Engine, client: redis.Redis, *, owner: str, accounting: Accounting) -> Ledger:
    """A ledger that loads the caps of unseeded vertices from ``engine``. ``accounting``: the settings of the fleet."""
    settling = Settling(accounting.limit_settle_window_seconds, accounting.commit_deadline)
    ledger = Ledger(client, owner=owner, settling=settling)
    ledger.load_caps = partial(load_caps, engine, ledger)
    return ledger


_NO_SUBSCRIPTION = ("size", "0", "burst", "0")
"""The fields of a subscription that does not exist, under which nothing may be booked."""
_RECLAIMED = (VertexKind.JOB, VertexKind.LAYER)
"""The kinds of vertices whose keys are deleted once nothing is booked and PostgreSQL has no caps for them."""
_IN_CENTICORES = ("size", "burst", "int_min_cores", "int_max_cores")
"""The fields of caps that PostgreSQL has in centicores and the store in whole cores."""


def load_caps(engine: Engine, ledger: Ledger, vertex_keys: Collection[str]) -> tuple[int, int]:
    """Read the caps of these vertices and write them; returns as Ledger.write_caps. A subscription that does not exist
    has burst 0, other vertices that PostgreSQL does not know stay unseeded.

    Called for vertices that a booking found unseeded, for those that a notification names, and to read again the frames
    of unmanaged shows that hold a limit.
    """
    wanted: dict[VertexKind, list[tuple[str, ...]]] = {}
    for kind, ids in filter(None, map(keys.parse, vertex_keys)):
        if kind is not VertexKind.LAYER:
            wanted.setdefault(kind, []).append(ids)
    imported = imported_shows(ledger.client) if VertexKind.LIMIT in wanted else {}
    with repeatable_read(engine) as connection:
        version = store.caps_version(connection)
        rows = [
            cap_row
            for kind, ids in wanted.items()
            for cap_row in _cap_rows(connection, ledger, kind, imported, ids=ids)
        ]
    _add_absent_subscriptions(rows, vertex_keys)
    return ledger.write_caps(version, rows)


def reseed_limits(engine: Engine, ledger: Ledger, show_ids: Collection[str] | None = None) -> tuple[int, int]:
    """Write all caps of these shows (default: the managed ones), and every limit; returns as Ledger.write_caps.

    Subscriptions that were deleted get burst 0. Of all shows the keys of layers, and of jobs that are finished or gone,
    are freed if they count nothing: a layer has no caps, and those of a job are loaded again when it is booked.
    """
    with answering(ledger.client):
        wanted = keys.EVERYTHING if show_ids is None else keys.subscription("*")
        scanned = cast("Iterable[str]", ledger.client.scan_iter(wanted, count=_SCAN_COUNT))
        stored = {key: found for key in scanned if (found := keys.parse(key))}
    imported = imported_shows(ledger.client)
    with repeatable_read(engine) as connection:
        version = store.caps_version(connection)
        of_shows = store.managed_show_ids(connection) if show_ids is None else frozenset(show_ids)
        rows = cap_rows_of_shows(connection, ledger, of_shows, imported)
    if show_ids is None:
        capped = {key for key, _ in rows}
        left = [key for key, (kind, _) in stored.items() if kind in _RECLAIMED and key not in capped]
        ledger.call_under(id_calls("free", left, ledger.epoch().text, "idle"))
    _add_absent_subscriptions(rows, [key for key, (_, ids) in stored.items() if ids[0] in of_shows])
    return ledger.write_caps(version, rows)


def cap_rows_of_shows(
    connection: Connection, ledger: Ledger, show_ids: Collection[str], imported: Mapping[str, str]
) -> list[CapRow]:
    """Vertex keys and hash fields of all caps of these shows, and of every limit, for this ledger."""
    return [
        cap_row
        for kind in VertexKind
        if kind is not VertexKind.LAYER
        for cap_row in _cap_rows(connection, ledger, kind, imported, show_ids=show_ids)
    ]


def _cap_rows(
    connection: Connection,
    ledger: Ledger,
    kind: VertexKind,
    imported: Mapping[str, str],
    *,
    ids: Collection[tuple[str, ...]] | None = None,
    show_ids: Collection[str] = (),
) -> list[CapRow]:
    """The caps of vertices of one kind, chosen as store.fetch_caps chooses them."""
    settling = ledger.settling
    if settling is None:
        raise InvalidInput("a ledger that knows no settle window reads no caps")
    rows = store.fetch_caps(
        connection, kind, imported, settle_window_seconds=settling.window_seconds, ids=ids, show_ids=show_ids
    )
    if kind is not VertexKind.LIMIT:
        return [_cap_row(kind, row) for row in rows]
    reported = [row[0] for row in rows if row.reported_at is not None]
    if not reported:
        return [_limit_row(row) for row in rows]
    # The time of Redis is read before the database's: so Redis is never thought to be further ahead than it is, and the
    # bound is never too late.
    with answering(ledger.client):
        seconds, microseconds = ledger.client.time()
    ahead = seconds + microseconds / 1e6 - database_seconds(connection)
    reports = reports_of(connection, reported)
    after = {row[0]: settling.bound(row.reported_at, ahead) for row in rows if row[0] in reports}
    return [_limit_row(row, reports.get(row[0]), after.get(row[0])) for row in rows]


def _limit_row(row: Row[Any], report: LicenceReport | None = None, after: int | None = None) -> CapRow:
    """The caps of a limit. A limit that counts machines has two lists behind its fields: see ledger.caps_calls.

    ``after``: see Settling.bound.
    """
    fields: list[str | list[str]] = []
    for name in ("int_max_value", "int_foreign", "int_machines", "terms", "opens_at", "int_frames"):
        fields += [name, str(getattr(row, name))]
    settled = (report.tokens if report else 0) + (row.foreign_pending or 0)
    fields += ["int_settled", str(settled) if row.int_frames else "", "after", "" if after is None else str(after)]
    if row.int_machines:
        counting = {*row.other_machines, *(report.machines if report else ())}
        holding = {*row.past_machines, *(report.namesakes if report else ())} - counting
        fields += [sorted(map(keys.machine_of, counting)), sorted(map(keys.machine_of, holding))]
    return keys.limit(row[0]), fields


def _cap_row(kind: VertexKind, row: Row[Any]) -> CapRow:
    """A row of PostgreSQL (centicores) as the key and the fields of the reference (whole cores)."""
    size = keys.ids_of(kind)
    fields = zip(row._fields[size:], row[size:], strict=True)
    texts = ((name, str(cap_cores(value) if name in _IN_CENTICORES else value)) for name, value in fields)
    return keys.vertex(kind, *row[:size]), tuple(text for pair in texts for text in pair)


def _add_absent_subscriptions(rows: list[CapRow], vertex_keys: Iterable[str]) -> None:
    """Add a burst of 0 for each subscription of ``vertex_keys`` that PostgreSQL does not have."""
    found, prefix = {key for key, _ in rows}, keys.subscription("")
    rows += [(key, _NO_SUBSCRIPTION) for key in vertex_keys if key.startswith(prefix) and key not in found]
