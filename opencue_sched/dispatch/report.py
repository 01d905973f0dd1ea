"""What one cluster pass did, for metrics, logs and the task's result, and why frames wait after it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import structlog

from opencue_sched.accounting.ledger import BookingRefused
from opencue_sched.domain.cluster import Cluster, LayerVerdict, Verdict
from opencue_sched.domain.farm import Host, PlannedProc
from opencue_sched.errors import BookingError
from opencue_sched.placement.planner import Plan

log = structlog.get_logger(__name__)

LONGEST_ERROR = 500
"""Characters of an error that an answer carries."""


class PassEnd(StrEnum):
    """Why a pass ended (``scheduler_pass_terminated_reason_total``)."""

    BOOKED = "booked"
    SATURATED = "saturated"
    NO_JOBS = "no_jobs"
    QUERY_ERROR = "query_error"
    NOT_READY = "not_ready"
    CLAIM_LOST = "claim_lost"

    @property
    def did_its_work(self) -> bool:
        """Whether the pass looked at its cluster to the end, be there anything to book or not."""
        return self in (PassEnd.BOOKED, PassEnd.SATURATED, PassEnd.NO_JOBS)


@dataclass(slots=True)
class PassReport:
    """Filled in step by step, so that a pass that fails half-way still says what it did. Times in seconds."""

    cluster: Cluster
    ended: PassEnd = PassEnd.NO_JOBS
    show_name: str = ""
    jobs: int = 0
    planned: bool = False
    """Whether the pass got as far as looking for hosts."""
    frames_planned: int = 0
    frames_booked: int = 0
    frames_launched: int = 0
    attempts: tuple[int, ...] = ()
    """Hosts tried by each layer that got to try any."""
    scores: tuple[float, ...] = ()
    wasted_attempts: int = 0
    layers_given_up: int = 0
    """Layers whose hosts were taken by other passes too often."""
    cache_hits: int = 0
    cache_misses: int = 0
    statements: int = 0
    lazy_seeds: int = 0
    """Vertices whose caps had to be loaded before they could be booked."""
    refusals: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    bad_rows: Counter[str] = field(default_factory=Counter)
    verdicts: tuple[LayerVerdict, ...] = ()
    skipped: Mapping[str, LayerVerdict] = field(default_factory=dict)
    """Layers that were not looked at because they could not be placed a moment ago, by id."""
    refused: frozenset[str] = frozenset()
    """Layers of which the ledger refused frames."""
    go_on: bool = False
    """Nothing was booked, but there are jobs not yet looked at, or something happened since others were."""
    look_again: float | None = None
    """Seconds after which to look again at layers for which a host changed in their cooldown."""
    next_start: float | None = None
    """Seconds until a layer of the cluster that may not start yet may; None when none does soon."""
    hosts_back_in: float | None = None
    """Seconds until a host that PostgreSQL or an RQD refused may be tried again; None when all may."""
    seconds_to_book: list[float] = field(default_factory=list)
    """Of each frame booked: from its becoming eligible, once more after a retry, to the answer to the COMMIT."""
    gather_seconds: float = 0.0
    plan_seconds: float = 0.0
    book_seconds: float = 0.0
    commit_seconds: float = 0.0
    launch_seconds: float = 0.0
    total_seconds: float = 0.0
    error: str = ""

    @property
    def hosts_attempted(self) -> int:
        return sum(self.attempts)

    @property
    def jobs_processed(self) -> int:
        """Jobs that went through the whole pass: none when it was given up on its way."""
        return self.jobs if self.planned and self.ended in (PassEnd.BOOKED, PassEnd.SATURATED) else 0

    def summary(self) -> dict[str, object]:
        """A small JSON-able answer for the task."""
        error = {"error": self.error[:LONGEST_ERROR]} if self.error else {}
        return {
            "cluster": self.cluster.key,
            "ended": self.ended.value,
            "jobs": self.jobs,
            "planned": self.frames_planned,
            "booked": self.frames_booked,
            "launched": self.frames_launched,
            "seconds": round(self.total_seconds, 4),
            **error,
        }

    def log(self) -> None:
        """What the pass did and why frames wait, at the debug level only."""
        if not logging.getLogger(__name__).isEnabledFor(logging.DEBUG):
            return
        log.debug("pass_ended", **self.summary())
        for it in self.verdicts:
            log.debug(
                "layer_verdict",
                cluster=self.cluster.key,
                job=it.job_id,
                layer=it.layer_id,
                verdict=it.verdict.value,
                placed=it.frames,
                waiting=it.waiting,
                detail=it.detail,
            )


# What becomes of a plan's verdicts when not all of it is booked.
#
# The planner says why frames wait before any store was asked. The ledger may refuse what the snapshot had headroom for,
# because its counters are ahead or its caps are older, and the commit loses what others took in the meantime.

_BY_TABLE = {
    "subscription": Verdict.OVER_SUBSCRIPTION,
    "folder": Verdict.OVER_FOLDER,
    "folder_gpus": Verdict.OVER_FOLDER_GPUS,
    "job": Verdict.OVER_JOB,
    "job_gpus": Verdict.OVER_JOB_GPUS,
    "limit": Verdict.OVER_LIMIT,
    "unseeded": Verdict.FAILED,
    "error": Verdict.FAILED,
}


@dataclass(frozen=True, slots=True)
class Booked:
    """Verdicts after a booking. ``refused`` are the layers of which the ledger refused frames, ``lost`` those of which
    every frame that it took was lost to others before the commit."""

    verdicts: tuple[LayerVerdict, ...]
    refused: frozenset[str]
    lost: frozenset[str]


def after_refusals(plan: Plan, apart: Mapping[tuple[str, str], str]) -> tuple[LayerVerdict, ...]:
    """The verdicts of a plan, in RQD's words where the only hosts left are kept ``apart`` from a layer: its id
    and the host's name -> what RQD said."""
    said: dict[str, dict[str, str]] = {}
    for (layer, host), words in apart.items():
        said.setdefault(layer, {})[host] = words
    judged = []
    blocked = {it.verdict.layer_id for it in plan.unschedulable}
    for it in plan.verdicts:
        words_by_host = said.get(it.layer_id)
        if it.verdict is Verdict.CAPACITY and words_by_host and it.layer_id not in blocked:
            hosts = "1 host" if len(words_by_host) == 1 else f"{len(words_by_host)} hosts"
            detail = f"{hosts} refused its frames and will be tried again: {next(iter(words_by_host.values()))}"
            it = replace(it, verdict=Verdict.BACKING_OFF, detail=detail)
        judged.append(it)
    return tuple(judged)


def after_booking(
    verdicts: Iterable[LayerVerdict],
    procs: Iterable[PlannedProc],
    refusals: Mapping[str, BookingRefused],
    losses: Mapping[str, BookingError],
) -> Booked:
    """Take from each verdict the frames that were refused or lost, both by proc id, and say why they wait."""
    refused: dict[str, list[BookingRefused]] = {}
    lost: dict[str, list[BookingError]] = {}
    for proc in procs:
        if proc.proc_id in refusals:
            refused.setdefault(proc.layer.id, []).append(refusals[proc.proc_id])
        elif proc.proc_id in losses:
            lost.setdefault(proc.layer.id, []).append(losses[proc.proc_id])
    judged = tuple(_judged(it, refused.get(it.layer_id, ()), lost.get(it.layer_id, ())) for it in verdicts)
    return Booked(
        judged,
        frozenset(refused),
        frozenset(it.layer_id for it in judged if it.layer_id in lost and it.layer_id not in refused and not it.frames),
    )


def _judged(verdict: LayerVerdict, refused: Sequence[BookingRefused], lost: Sequence[BookingError]) -> LayerVerdict:
    gone = len(refused) + len(lost)
    if not gone:
        return verdict
    left = replace(verdict, frames=verdict.frames - gone, waiting=verdict.waiting + gone)
    if refused:
        last = refused[-1]
        return replace(left, verdict=_BY_TABLE.get(last.table, Verdict.FLOWING), detail=_refusal(last))
    reasons = ", ".join(sorted({error.reason for error in lost}))
    return replace(left, detail=f"{gone} of its frames were lost before they were booked ({reasons}); tried again")


def _refusal(refused: BookingRefused) -> str:
    if refused.table == "unseeded":
        return f"PostgreSQL has no row with the caps of {refused.vertex}"
    if refused.table == "error":
        return f"its counters in Redis are spoilt, and put right by the next recompute: {refused.vertex}"
    if refused.table not in _BY_TABLE:
        return "its booking was taken back before it was made; tried again"
    of = refused.table.removesuffix("_gpus")
    return f"the counters have {refused.current:g} of {refused.limit:g} in use under the cap of its {of}"


def given_back(procs: Iterable[PlannedProc], kept: Collection[str]) -> tuple[Host, ...]:
    """The hosts of those procs of a plan, in its order, that are not ``kept`` (by id), as they are without them."""
    hosts: dict[str, Host] = {}
    some_back = set()
    for proc in procs:
        host = hosts.setdefault(proc.host.id, proc.host)
        if proc.proc_id in kept:
            hosts[host.id] = host.less(proc.reservation)
        else:
            some_back.add(host.id)
    return tuple(host for host in hosts.values() if host.id in some_back)
