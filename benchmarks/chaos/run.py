"""A run: plant, break things for a while, let everything come to rest, and judge."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from benchmarks.chaos import verdict
from benchmarks.chaos.faults import Faults
from benchmarks.chaos.judgement import judge, not_injected
from benchmarks.chaos.licences import LicenceServers
from benchmarks.chaos.load import WAITING_FRAMES, Load
from benchmarks.chaos.site import REPORT_SECONDS, Site, Witness, site
from benchmarks.chaos.verdict import ChaosReport
from opencue_sched.embedded.servers.fleet import Fleet
from opencue_sched.insight.audit import run_audit

LEAST_SAMPLES_PER_SECOND = 20.0
PROGRESS_SECONDS = 5.0
# Between two faults. A short run has shorter ones, so that every kind still has its turn.
PAUSE_SECONDS = (0.2, 3.5)
SHORT_PAUSE_SECONDS = (0.1, 1.0)
_SHORT_RUN_SECONDS = 120.0
_TICK_SECONDS = 0.1
_REFILL_SECONDS = 0.5
_READY_SECONDS = 60.0
_STILL_SECONDS = 3.0
_REST_SECONDS = 60.0
_DRAIN_SECONDS = 150.0
_LAST_RUN_SECONDS = (0.05, 0.1)
_AFTER_A_VIOLATION_SECONDS = 15.0

_LEFT = text("SELECT count(*) FROM frame WHERE str_state <> 'SUCCEEDED'")
_PROCS = text("SELECT pk_proc FROM proc")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is to be. ``seconds``: how long things are broken; ``waiting_frames``: what a show is kept filled to.

    ``samples_per_second``: with fewer samples than that the run does not pass. ``logs``: a directory for the logs of
    all processes. ``report_seconds``: from one report of a host to its next, at least and at most.
    """

    seconds: float
    workers: int
    seed: int = 1
    beats: int = 2
    waiting_frames: int = WAITING_FRAMES
    samples_per_second: float = LEAST_SAMPLES_PER_SECOND
    logs: Path | None = None
    report_seconds: tuple[float, float] = REPORT_SECONDS
    fleet_type: type[Fleet] = Fleet


def run_chaos(plan: Plan, console: Console, *, progress: Console | None = None) -> ChaosReport:
    """Break things for a while, then judge. ``console`` hears every fault; ``progress`` how it stands, now and then."""
    report = ChaosReport(plan.seed, plan.seconds, plan.workers)
    with site(
        workers=plan.workers,
        beats=plan.beats,
        seed=plan.seed,
        logs=plan.logs,
        report_seconds=plan.report_seconds,
        fleet_type=plan.fleet_type,
    ) as here:
        run = _Run(here, plan, report, console, progress or console)
        try:
            run.work_up()
            run.break_things(plan.seconds)
            run.come_to_rest()
            run.drain()
        finally:
            run.close()
        run.judge()
    return report


class _Run:
    def __init__(self, here: Site, plan: Plan, report: ChaosReport, console: Console, progress: Console) -> None:
        self._site = here
        self._plan = plan
        self._report = report
        self._console = console
        self._progress = progress
        self._load = Load(here.engine, random.Random(f"{plan.seed}:load"), waiting_frames=plan.waiting_frames)
        self._load.plant()
        self._chance = random.Random(f"{plan.seed}:faults")
        self._servers = LicenceServers(here.engine, random.Random(f"{plan.seed}:licences"))
        self._faults = Faults(here, self._load, self._servers, self._chance)
        self._witness = Witness(here.settings.sqlalchemy_url)
        self._began = time.monotonic()
        self._next_refill = self._next_progress = 0.0
        self._refilling = False

    def work_up(self) -> None:
        """Until the first frames run. None is booked before the witness looks."""
        self._until(lambda: bool(self._witness.samples), _READY_SECONDS, "the first sample")
        self._refilling = True
        self._until(lambda: len(self._witness.booked) > 20, _READY_SECONDS, "the first bookings")

    def break_things(self, seconds: float) -> None:
        """For so long, and on a slow machine up to half as long again, until every kind has had its turn."""
        end = time.monotonic() + seconds
        pauses = SHORT_PAUSE_SECONDS if seconds < _SHORT_RUN_SECONDS else PAUSE_SECONDS
        while (late := time.monotonic() - end) < 0 or (late < seconds / 2 and not_injected(self._faults)):
            self._until(lambda: False, self._chance.uniform(*pauses), "")
            fault = self._faults.inject()
            if fault is not None:
                self._console.print(f"{self._clock()}  {fault.kind}: {fault.target}")

    def come_to_rest(self) -> None:
        """No more faults; frames that start now do not end. When the caps are full nothing moves: then all agree."""
        self._site.agenda.run_due(everything=True)
        if not self._faults.wait_for_flips():
            self._report.violations.append("a show was still being flipped 90 s after the last fault")
        self._site.agenda.run_due(everything=True)
        began = time.monotonic()
        self._until(self._site.crew.all_ready, _READY_SECONDS, "the processes being up again")
        self._site.behave(run_seconds=(3600.0, 3600.0))
        self._servers.at_rest = True
        self._until(lambda: not self._placeable(), _REST_SECONDS, "no frame waits in vain", self._placeable)
        self._until(lambda: self._unchanged_for(_STILL_SECONDS), _REST_SECONDS, "procs that do not change")
        self._until(self._audit_passes, _REST_SECONDS, "an audit that passes at rest", explain=self._audit_lines)
        self._report.audited_procs = len(self._procs)
        self._report.seconds_to_quiescence = round(time.monotonic() - began, 1)

    def drain(self) -> None:
        """Everything that was ever submitted ends well."""
        self._refilling = False
        self._site.behave(run_seconds=_LAST_RUN_SECONDS)
        for farm in self._site.farms:
            for frame_id, host_name in farm.running().items():
                farm.finish(host_name, frame_id)
        self._until(lambda: not self._left() and not self._held(), _DRAIN_SECONDS, "every frame succeeded")
        self._until(self._audit_passes, _REST_SECONDS, "an audit that passes at the end", explain=self._audit_lines)

    def close(self) -> None:
        self._site.agenda.run_due(everything=True)
        self._faults.close()
        self._witness.stop()

    def judge(self) -> None:
        """Put everything into the report."""
        judge(
            self._report,
            least_samples=self._plan.samples_per_second,
            here=self._site,
            faults=self._faults,
            load=self._load,
            servers=self._servers,
            witness=self._witness,
        )

    # While things happen

    def _until(
        self,
        check: Callable[[], bool],
        seconds: float,
        what: str,
        explain: Callable[[], str] | None = None,
    ) -> None:
        """Keep the farm going until ``check`` holds. Not within ``seconds``: a violation, if ``what`` says of what.

        After a violation nothing more is waited for as long: what follows from it is only to be named.
        """
        if what and self._report.violations:
            seconds = min(seconds, _AFTER_A_VIOLATION_SECONDS)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._tend()
            if check():
                return
            time.sleep(min(_TICK_SECONDS, max(0.0, end - time.monotonic())))
        if what:
            self._report.violations.append(
                f"{what}: not within {seconds:.0f} s{': ' + explain() if explain is not None else ''}"
            )

    def _tend(self) -> None:
        now = time.monotonic()
        self._site.agenda.run_due()
        self._site.crew.tend()
        self._servers.tend()
        if self._refilling and now >= self._next_refill:
            self._next_refill = now + _REFILL_SECONDS
            self._load.refill()
        if now >= self._next_progress:
            self._next_progress = now + PROGRESS_SECONDS
            witness = self._witness
            self._progress.print(
                f"{self._clock()}  {witness.procs} procs, {witness.centicores // 100} cores; {len(witness.booked)} "
                f"booked, {len(self._faults.injected)} faults, "
                f"{len(witness.violations)} over a cap, {len(witness.forbidden)} over a licence"
            )

    def _clock(self) -> str:
        return f"{time.monotonic() - self._began:6.1f} s"

    _procs: frozenset[str] = frozenset()
    _procs_since: float = 0.0

    def _unchanged_for(self, seconds: float) -> bool:
        with self._site.engine.connect() as connection:
            procs = frozenset(connection.execute(_PROCS).scalars())
        if procs != self._procs or not procs:
            self._procs, self._procs_since = procs, time.monotonic()
        return time.monotonic() - self._procs_since >= seconds

    def _placeable(self) -> str:
        """The layers that wait in vain."""
        with self._site.engine.connect() as connection:
            return ", ".join(verdict.placeable(connection))

    def _audit_passes(self) -> bool:
        try:
            return not run_audit(self._site.engine, self._site.client, self._site.settings).failed
        except SQLAlchemyError:
            return False

    def _audit_lines(self) -> str:
        report = run_audit(self._site.engine, self._site.client, self._site.settings)
        return "\n".join(report.lines())

    def _left(self) -> int:
        with self._site.engine.connect() as connection:
            return int(connection.execute(_LEFT).scalar() or 0)

    def _held(self) -> int:
        with self._site.engine.connect() as connection:
            return len(connection.execute(_PROCS).all())
