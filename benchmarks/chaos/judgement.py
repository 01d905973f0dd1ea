"""The judgement at the end of a run: what was broken, what the witness saw, and all that must not have happened."""

from __future__ import annotations

import time

from sqlalchemy import text

from benchmarks.chaos import verdict
from benchmarks.chaos.faults import Faults
from benchmarks.chaos.holds import against_holds
from benchmarks.chaos.licences import LicenceServers
from benchmarks.chaos.load import Load
from benchmarks.chaos.silent_changes import too_small
from benchmarks.chaos.site import Site, Witness
from benchmarks.chaos.verdict import NAMED, ChaosReport


def judge(
    report: ChaosReport,
    *,
    least_samples: float,
    here: Site,
    faults: Faults,
    load: Load,
    servers: LicenceServers,
    witness: Witness,
) -> None:
    """Put everything into the report. ``least_samples``: how many samples a second the witness must have taken."""
    farms = here.farms
    found = verdict.recoveries(faults.injected, witness.booked)
    known = sorted(value for values in found.values() for value in values if value is not None)
    report.by_kind = verdict.figures(found)
    report.faults = len(faults.injected)
    report.kinds_not_injected = not_injected(faults)
    report.flips, report.flips_interrupted = faults.flips, faults.flips_interrupted
    if known:
        report.recovery_median, report.recovery_longest = round(known[len(known) // 2], 2), round(known[-1], 2)
    report.bookings, report.jobs = len(witness.booked), load.jobs
    runs = verdict.all_runs(farms)
    report.runs = len(runs)
    report.runs_the_sampler_missed = sum(run.proc_id not in witness.seen for run in runs)
    _judge_sampler(report, least_samples, faults, witness)
    now = time.monotonic()
    overlaps = verdict.overlaps(runs, now)
    report.overlapping_runs = len(overlaps)
    not_given_away = (run for run in runs if run.frame_id not in faults.given_away)
    report.overlapping_runs_not_given_away = len(verdict.overlaps(not_given_away, now))
    report.longest_overlap = round(max(overlaps, default=0.0), 2)
    report.frames_rendered_twice = verdict.rendered_twice(runs)
    report.starts_failed = dict(here.crew.starts_failed)
    report.log_errors = verdict.log_errors(here.crew.fleet.directory)
    with here.engine.connect() as connection:
        report.frames = int(connection.execute(text("SELECT count(*) FROM frame")).scalar() or 0)
        _name(report, "lost frames", verdict.unfinished(connection))
        _name(report, "against a hold", against_holds(connection))
        _name(report, "with too little memory", too_small(connection))
        _name(report, "results", verdict.results_counted_wrongly(connection, farms))
    _name(report, "over a cap", [str(excess) for excess in witness.violations])
    _name(report, "over a licence", [str(booking) for booking in witness.forbidden])
    report.licence_reports, report.licences_judged = servers.reports, dict(witness.judged)
    _name(report, "processes that fell", here.crew.fell)
    _name(report, "damage to RQD", [line for farm in farms for line in farm.violations()])


def not_injected(faults: Faults) -> list[str]:
    """The kinds of faults that have not had their turn."""
    return sorted(faults.kinds - {fault.kind for fault in faults.injected})


def _judge_sampler(report: ChaosReport, least_samples: float, faults: Faults, witness: Witness) -> None:
    """A sampler that did not look is a violation too: without it nothing is shown."""
    away = [(f.began - 0.1, f.over + 0.5) for f in faults.injected if f.kind.startswith("postgresql")]
    seen = verdict.sample_figures(witness.samples, away, began=witness.began, ended=witness.ended)
    report.samples, report.samples_per_second = seen.count, round(seen.per_second, 1)
    report.median_gap_between_samples = round(seen.median_gap, 4)
    report.longest_gap_between_samples = round(seen.longest_gap, 2)
    if seen.per_second < least_samples:
        report.violations.append(f"only {seen.per_second:.1f} samples a second")


def _name(report: ChaosReport, what: str, offenders: list[str]) -> None:
    """Add a violation that names ``offenders``, if there are any."""
    if offenders:
        more = f" and {len(offenders) - NAMED} more" if len(offenders) > NAMED else ""
        report.violations.append(f"{what}: {len(offenders)}: {'; '.join(offenders[:NAMED])}{more}")
