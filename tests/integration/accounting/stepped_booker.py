"""A booker of the model-based test: book, commit, settle, as a dispatch pass does, with its own small transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from opencue_sched.accounting.keys import Booking
from opencue_sched.accounting.ledger import BookAnswers, Ledger
from opencue_sched.clients.store_errors import in_doubt
from opencue_sched.dispatch.commit import by_vertex, fit_caps, fit_terms
from opencue_sched.domain.hosts import Resources
from opencue_sched.domain.plans import PlannedProc
from opencue_sched.store.booking import read_caps
from tests.integration.accounting.stepped_farm import INSERT_PROC, SteppedFarm
from tests.integration.accounting.stepping import Actor, Clock, boundary, current

DEADLINE = 10.0
"""Seconds of the test's clock in which a booking must be committed."""


@dataclass(eq=False)
class Attempt:
    """One booking and how far it came. ``backend``: PostgreSQL's process of its open transaction, 0 for none;
    ``hanging``: its COMMIT is PostgreSQL's, whoever sent it."""

    booking: Booking
    frame: str
    host_id: str
    at: float
    accepted: bool = False
    decided: bool = False
    backend: int = 0
    hanging: bool = False
    actor: Actor | None = None

    def may_commit(self, now: float) -> bool:
        """Accepted, and its COMMIT can still come."""
        alive = self.actor is not None and self.actor.alive
        return self.accepted and not self.decided and (self.hanging or (alive and now - self.at < DEADLINE))

    def planned(self) -> PlannedProc:
        """As much of a planned proc as the comparison of caps asks for."""
        b = self.booking
        named = SimpleNamespace(id=b.vertices.layer_id, name="host")
        taken = Resources(b.cores, 1, b.gpus)
        proc = SimpleNamespace(proc_id=b.proc_id, vertices=b.vertices, resources=taken, host=named, layer=named)
        return cast("PlannedProc", proc)


class Booker:
    """Works off attempts in one process. ``accepted`` and ``buried`` (ids rolled back) tell the test what happened."""

    def __init__(self, farm: SteppedFarm, clock: Clock, ledger: Ledger, attempts: Sequence[Attempt]) -> None:
        self.farm = farm
        self.clock = clock
        self.ledger = ledger
        self.attempts = attempts
        self.accepted: list[Attempt] = []
        self.buried: list[str] = []

    def work(self) -> None:
        """One plan. Raises NotReady as the ledger does."""
        answers = self.ledger.book([attempt.booking for attempt in self.attempts])
        accepted = [attempt for attempt in self.attempts if attempt.booking.proc_id in answers.accepted]
        for attempt in accepted:
            attempt.accepted = True
        self.accepted += accepted
        committed = self._commit(accepted, answers) if accepted else []
        if committed is None:
            return
        lost = [attempt.booking for attempt in accepted if attempt not in committed]
        self.ledger.rollback(lost)
        self.buried += [booking.proc_id for booking in lost]
        self.ledger.settle([attempt.booking for attempt in committed])

    def _commit(self, attempts: Sequence[Attempt], answers: BookAnswers) -> Sequence[Attempt] | None:
        """Those that were committed; None when nobody can say."""
        sent = False
        try:
            with self.farm.engine.connect() as connection, connection.begin() as transaction:
                done = self._write(connection, attempts, answers)
                if any(self.clock.now - attempt.at >= DEADLINE for attempt in attempts):
                    transaction.rollback()
                    return []
                sent = True
                transaction.commit()
            _ended(attempts)
            boundary("after COMMIT")
            actor = current()
            return None if actor is not None and actor.deaf else done
        except DBAPIError as error:
            return None if sent and in_doubt(error) else []
        finally:
            _ended(attempts)

    def _write(self, connection: Connection, attempts: Sequence[Attempt], answers: BookAnswers) -> Sequence[Attempt]:
        planned = [attempt.planned() for attempt in attempts]
        now = read_caps(connection, by_vertex(planned))
        kept, _ = fit_terms(planned, answers.terms, now)
        kept, _ = fit_caps(kept, answers.caps, now)
        ids = {proc.proc_id for proc in kept}
        return [a for a in attempts if a.booking.proc_id in ids and self._insert(connection, a)]

    def _insert(self, connection: Any, attempt: Attempt) -> bool:
        b = attempt.booking
        row = {"proc": b.proc_id, "host": attempt.host_id, "frame": attempt.frame, "gpus": b.gpus, "foreign": False}
        inserted = connection.execute(INSERT_PROC, {**row, "centicores": b.cores * 100})
        attempt.backend = connection.connection.dbapi_connection.info.backend_pid
        return bool(inserted.rowcount)


def _ended(attempts: Sequence[Attempt]) -> None:
    for attempt in attempts:
        attempt.backend, attempt.decided = 0, not attempt.hanging
