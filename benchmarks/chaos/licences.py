"""Licences of the chaos, and the licence servers, which say who holds them and sometimes say nothing.

A server says what it was asked a moment ago: most of the machines that run frames, artists' machines, and now and then
one of the farm on which an artist works. It may say so without a word to the fleet.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import SQLAlchemyError

SETTLE_WINDOW_SECONDS = 1.0
"""What started later than this before a server was asked need not be in its report."""
TIME_TO_LIVE_SECONDS = 12
"""Age of a report from which its limit is open."""
REPORT_SECONDS = 1.0
"""From one report to the next."""
_ASKED_AGO_SECONDS = 0.8
_KNOWN, _ON_A_HOST, _UNHEARD = 0.85, 0.2, 0.3
_ARTISTS = 2


@dataclass(frozen=True, slots=True)
class Licence:
    """A limit: what it counts (FRAME, HOST), how many there are, whether a server reports of it, and whether faults may
    change its maximum."""

    name: str
    counts: str
    maximum: int
    reported: bool = False
    changes: bool = True


LICENCES = (
    Licence("nuke", "FRAME", 4),
    Licence("houdini", "FRAME", 6),
    Licence("katana", "HOST", 2, changes=False),
    Licence("mari", "HOST", 3),
    Licence("ocula", "HOST", 3, reported=True),
    Licence("arnold", "FRAME", 6, reported=True),
)

_BECOME = text("UPDATE limit_record SET str_type = :counts, int_report_ttl = :life WHERE pk_limit_record = :limit")
_REPORTED_LIMITS = text(
    "SELECT pk_limit_record AS id, str_name AS name FROM limit_record WHERE str_name = ANY(:names) ORDER BY 1"
)
_HOLDING = text(
    """
    SELECT h.str_name AS name, count(*) AS tokens
    FROM proc p JOIN layer_limit ll USING (pk_layer) JOIN host h USING (pk_host)
    WHERE ll.pk_limit_record = :limit GROUP BY h.str_name ORDER BY 1
    """
)
_HOSTS = text("SELECT str_name FROM host ORDER BY 1")
_BRIEFLY = text("SET LOCAL lock_timeout = '1s'")
_UNHEARD_OF = text("SET LOCAL opencue_sched.quiet_caps = 'on'")
# Of two reports the one that was asked for later counts.
_ASKED = text(
    """
    UPDATE limit_record SET ts_reported = clock_timestamp() - make_interval(secs => :ago), str_report_source = 'chaos'
    WHERE pk_limit_record = :limit
      AND coalesce(ts_reported < clock_timestamp() - make_interval(secs => :ago), true)
    """
)
_FORGET = text("DELETE FROM limit_host WHERE pk_limit_record = :limit")
_SAY = text(
    """
    INSERT INTO limit_host (pk_limit_host, pk_limit_record, str_host_name, str_reported_name, int_tokens, ts_reported)
    SELECT gen_random_uuid()::text, :limit, said.name, upper(said.name) || '.studio.example', said.tokens, now()
    FROM unnest(CAST(:names AS varchar[]), CAST(:tokens AS int[])) AS said(name, tokens)
    """
)


def become(connection: Connection, licence: Licence, limit_id: str) -> None:
    """Make a limit count what its licence counts."""
    connection.execute(_BECOME, {"counts": licence.counts, "life": TIME_TO_LIVE_SECONDS, "limit": limit_id})


class LicenceServers:
    """Reports of who holds the licences that are reported. One thread calls it."""

    def __init__(self, engine: Engine, chance: random.Random) -> None:
        self.reports = 0
        self.at_rest = False
        """Whether reports are exact by now: all that run, and one artist."""
        self._engine = engine
        self._chance = chance
        self._due = 0.0
        self._silent_until = 0.0

    def fall_silent(self, seconds: float) -> None:
        self._silent_until = time.monotonic() + seconds

    def tend(self) -> None:
        """Report where that is due. Nothing while the database is away, or somebody keeps the limit."""
        now = time.monotonic()
        if now < self._due or (now < self._silent_until and not self.at_rest):
            return
        self._due = now + REPORT_SECONDS
        names = [licence.name for licence in LICENCES if licence.reported]
        try:
            with self._engine.begin() as connection:
                limits = connection.execute(_REPORTED_LIMITS, {"names": names}).all()
            for limit in limits:
                with self._engine.begin() as connection:
                    self._report(connection, limit.id, limit.name)
                self.reports += 1
        except SQLAlchemyError:
            return

    def _report(self, connection: Connection, limit_id: str, name: str) -> None:
        chance = self._chance
        holding = {row.name: row.tokens for row in connection.execute(_HOLDING, {"limit": limit_id})}
        if self.at_rest:
            ago, said = 0.0, holding | {f"{name}-artist0": 1}
        else:
            ago = chance.uniform(0.0, _ASKED_AGO_SECONDS)
            said = {machine: tokens for machine, tokens in holding.items() if chance.random() < _KNOWN}
            said |= {f"{name}-artist{number}": 1 for number in range(chance.randint(0, _ARTISTS))}
            # On a busy machine no host has reported yet when the first licences are.
            if chance.random() < _ON_A_HOST and (hosts := connection.execute(_HOSTS).scalars().all()):
                said |= {chance.choice(hosts): 1}
        connection.execute(_BRIEFLY)
        if not self.at_rest and chance.random() < _UNHEARD:
            connection.execute(_UNHEARD_OF)
        if connection.execute(_ASKED, {"limit": limit_id, "ago": ago}).rowcount:
            _say(connection, limit_id, said.items())


def _say(connection: Connection, limit_id: str, said: Iterable[tuple[str, int]]) -> None:
    connection.execute(_FORGET, {"limit": limit_id})
    names, tokens = zip(*said, strict=True) if said else ((), ())
    connection.execute(_SAY, {"limit": limit_id, "names": list(names), "tokens": list(tokens)})
