"""Figures about a farm as a whole, for somebody who asks whether it can work at all. Reads only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, text

_SERVER = text(
    """
    SELECT CAST(current_setting('server_version_num') AS int) AS version, clock_timestamp() AS now,
           current_setting('application_name') AS client
    """
)
_SHOWS = text(
    """
    SELECT show.str_name, show.b_active AND show.b_booking_enabled AND show.b_dispatch_enabled AND NOT show.b_paused,
           coalesce(max(subscription.int_burst), 0)
      FROM show LEFT JOIN subscription ON subscription.pk_show = show.pk_show
     WHERE show.b_scheduler_managed GROUP BY show.pk_show ORDER BY show.str_name
    """
)
_HOSTS = text(
    """
    SELECT count(*), count(*) FILTER (WHERE str_state = 'UP'),
           count(*) FILTER (WHERE str_state = 'UP' AND str_lock_state = 'OPEN'),
           count(*) FILTER (WHERE str_state = 'UP' AND str_lock_state = 'OPEN'
                              AND ts_ping > clock_timestamp() - CAST(:staleness AS double precision) * interval '1 s'),
           (SELECT count(*) FROM alloc WHERE coalesce(b_enabled, true)), (SELECT count(*) FROM subscription)
      FROM host JOIN host_stat ON host_stat.pk_host = host.pk_host
    """
)
_NEWEST_REPORT = text(
    """
    SELECT CAST(extract(epoch FROM clock_timestamp() - max(ts_ping)) AS double precision)
      FROM host_stat JOIN host ON host.pk_host = host_stat.pk_host JOIN alloc ON alloc.pk_alloc = host.pk_alloc
     WHERE CAST(:facilities AS varchar[]) IS NULL OR alloc.pk_facility = ANY(CAST(:facilities AS varchar[]))
    """
)
_RECENT_HOSTS = text(
    """
    SELECT str_name FROM host JOIN host_stat ON host_stat.pk_host = host.pk_host
     WHERE str_state = 'UP' ORDER BY ts_ping DESC, str_name LIMIT :most
    """
)
_UNKNOWN_HOSTS = text(
    """
    SELECT name FROM unnest(CAST(:names AS varchar[])) AS given(name)
     WHERE NOT EXISTS (SELECT 1 FROM host WHERE str_name = name) ORDER BY name
    """
)


@dataclass(frozen=True, slots=True)
class Server:
    """PostgreSQL's version (150004) and clock, and the name it knows our session by."""

    version: int
    now: datetime
    client: str


@dataclass(frozen=True, slots=True)
class ManagedShow:
    """A show of ours: whether its frames may be booked at all, and its largest burst in centicores."""

    name: str
    bookable: bool
    largest_burst: int


@dataclass(frozen=True, slots=True)
class Hosts:
    """Hosts by what keeps them from being used, and the allocations and subscriptions there are."""

    total: int
    up: int
    open: int
    fresh: int
    allocations: int
    subscriptions: int


def server(connection: Connection) -> Server:
    """The server as it answers."""
    return Server(*connection.execute(_SERVER).one())


def managed_shows(connection: Connection) -> list[ManagedShow]:
    """All shows managed by this scheduler."""
    return [ManagedShow(*row) for row in connection.execute(_SHOWS)]


def hosts(connection: Connection, *, staleness: float) -> Hosts:
    """Counts of hosts; ``staleness``: seconds after which a report is too old."""
    return Hosts(*connection.execute(_HOSTS, {"staleness": staleness}).one())


def newest_report_age(connection: Connection, facilities: Sequence[str] | None) -> float | None:
    """Seconds since any host of ``facilities``, or of all, last reported; None when there is no host."""
    asked = {"facilities": None if facilities is None else list(facilities)}
    age: float | None = connection.execute(_NEWEST_REPORT, asked).scalar_one()
    return age


def recent_hosts(connection: Connection, most: int) -> list[str]:
    """Names of hosts that are up, those that reported last first."""
    return list(connection.execute(_RECENT_HOSTS, {"most": most}).scalars())


def unknown_hosts(connection: Connection, names: list[str]) -> list[str]:
    """Those of these names that no host has."""
    return list(connection.execute(_UNKNOWN_HOSTS, {"names": names}).scalars())
