"""What one cluster pass did, for metrics, logs and the task's result."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import structlog

from opencue_sched.dispatch.cooldown import Resting
from opencue_sched.domain.cluster import Cluster, LayerVerdict, Verdict
from opencue_sched.domain.farm import Host
from opencue_sched.placement.planner import UnschedulableLayer

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
    cache_hits: int = 0
    cache_misses: int = 0
    statements: int = 0
    lazy_seeds: int = 0
    """Vertices whose caps had to be loaded before they could be booked."""
    refusals: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    bad_rows: Counter[str] = field(default_factory=Counter)
    verdicts: tuple[LayerVerdict, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the rows of the layers that were looked at, by id."""
    refused: frozenset[str] = frozenset()
    """Layers of which the ledger refused frames."""
    lost: frozenset[str] = frozenset()
    """Layers all of whose planned frames went to somebody else."""
    resting: Mapping[str, LayerVerdict] = field(default_factory=dict)
    """Layers that were left out because they could not be placed a moment ago, by id."""
    blocked: tuple[UnschedulableLayer, ...] = ()
    """Layers of which nothing was placed because no host would do."""
    given_back: tuple[Host, ...] = ()
    """Hosts of which something was planned that was not booked, as they are without that."""
    look_again: float | None = None
    """Seconds after which to look again at layers for which there were news while they had to be left alone."""
    go_on: bool = False
    """Nothing was booked, but there are jobs behind those that this pass looked at, or something happened since those
    before them were."""
    wakes: int = 0
    """How often the cluster had been woken when the pass began."""
    roused: int = 0
    """How often hosts had changed when this pass looked at them."""
    next_start: float | None = None
    """Seconds until a layer of the cluster that may not start yet may; None when none does soon."""
    hosts_back_in: float | None = None
    """Seconds until a host that PostgreSQL or an RQD refused may be tried again; None when all may."""
    seconds_to_book: list[float] = field(default_factory=list)
    """Of each frame booked: from its becoming eligible, once more after a retry, to the answer to the COMMIT."""
    log_end: str = ""
    """Where the log of bookings ended when the pass began to read what waits."""
    layers_booked: frozenset[str] = frozenset()
    """Layers of which frames were committed, or may have been."""
    gathered_at: float = 0.0
    """When the pass had read what waits, by the runner's clock."""
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

    def in_vain(self, verdict: LayerVerdict) -> bool:
        """Whether the layer was looked at and got nothing. One for which a full plan had no room was not looked at."""
        tried = verdict.layer_id in self.lost or verdict.layer_id in self.refused
        return not verdict.frames and (tried or verdict.verdict is not Verdict.FLOWING)

    def as_is(self, verdict: LayerVerdict) -> Resting:
        """A layer to be left alone as long as its row is what it was in this pass."""
        return Resting(verdict, self.versions[verdict.layer_id])

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
