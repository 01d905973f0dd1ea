"""What passes say: what one did, for metrics, logs and the task's result, and the last verdict of every layer: why its
frames were, or were not, placed, for `explain` and the metrics.

The verdicts are one hash a job, ``{namespace}:verdicts:{job id}``. A layer may be looked at by several clusters, one
for each kind of tag it names, so a field is ``{layer id}|{cluster}`` and its value the verdict as JSON. The hash of a
job that no pass looks at any more expires after a day, so nothing is left of jobs that are gone. How many frames wait
by which verdict is in one more hash, ``{namespace}:waiting``, with a field for each facility scope, as its leading beat
counted them last.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, cast

import redis
import structlog
from sqlalchemy import Connection, Row

from opencue_sched.accounting.ledger import BookingRefused
from opencue_sched.coordination import keys
from opencue_sched.dispatch.clusters import load_clusters, scoped_facilities
from opencue_sched.domain.clusters import Cluster, normalise_tag
from opencue_sched.domain.plans import PlannedProc
from opencue_sched.domain.verdicts import LayerVerdict, Verdict
from opencue_sched.errors import BookingError
from opencue_sched.placement.planner import Plan
from opencue_sched.settings import Settings
from opencue_sched.store.pending import fetch_waiting_work
from opencue_sched.store.schema import SchemaFacts

log = structlog.get_logger(__name__)

KEPT_SECONDS = 24 * 3600
LONGEST_ERROR = 500
"""Characters of an error that an answer carries, and of a verdict's detail."""

SAME_PASS_SECONDS = 120.0
"""Verdicts of several clusters on one layer are compared when they are no further apart than this."""

_SEPARATOR = "|"
_SCOPE = "facility:"


class PassEnd(StrEnum):
    """Why a pass ended (``scheduler_pass_terminated_reason_total``)."""

    BOOKED = "booked"
    SATURATED = "saturated"
    NO_JOBS = "no_jobs"
    QUERY_ERROR = "query_error"
    NOT_READY = "not_ready"
    CLAIM_LOST = "claim_lost"


@dataclass(slots=True)
class PassReport:
    """Of one cluster. Filled in step by step, so that a pass that fails half-way still says what it did. Of several
    clusters of one pass, the first has what they share: ``seconds``.
    Times in seconds."""

    cluster: Cluster
    ended: PassEnd = PassEnd.NO_JOBS
    show_name: str = ""
    jobs: int = 0
    plan: Plan | None = None
    """None when the pass did not get as far as looking for hosts."""
    frames_booked: int = 0
    frames_launched: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    verdicts: tuple[LayerVerdict, ...] = ()
    go_on: bool = False
    """Nothing was booked, but there are jobs not yet looked at, or something happened since others were."""
    look_again: float | None = None
    """Seconds after which a host that PostgreSQL or an RQD refused may be tried again, which no event tells of. None
    for no such host."""
    seconds_to_book: list[float] = field(default_factory=list)
    """Of each frame booked: from its becoming eligible, once more after a retry, to the answer to the COMMIT."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of each step the pass came to: gather, plan, book, commit, launch (and settle); and in ``total``."""
    error: str = ""

    @property
    def jobs_processed(self) -> int:
        """Jobs that went through the whole pass: none when it was given up on its way."""
        return self.jobs if self.plan is not None and self.ended in (PassEnd.BOOKED, PassEnd.SATURATED) else 0

    def summary(self) -> dict[str, object]:
        """A small JSON-able answer for the task."""
        error = {"error": self.error[:LONGEST_ERROR]} if self.error else {}
        return {
            "cluster": self.cluster.key,
            "ended": self.ended.value,
            "jobs": self.jobs,
            "planned": 0 if self.plan is None else len(self.plan.procs),
            "booked": self.frames_booked,
            "launched": self.frames_launched,
            "seconds": round(self.seconds.get("total", 0.0), 4),
            **error,
        }


@dataclass(frozen=True, slots=True)
class RecordedVerdict:
    """A verdict, the cluster whose pass gave it, and when: epoch seconds of the recording process."""

    verdict: LayerVerdict
    cluster: str
    at: float


def most_telling(recorded: Sequence[RecordedVerdict]) -> RecordedVerdict | None:
    """Of the verdicts of several clusters on one layer, newest first, the one that says most."""
    recent = [one for one in recorded if recorded[0].at - one.at <= SAME_PASS_SECONDS]
    return min(recent, key=lambda one: list(Verdict).index(one.verdict.verdict), default=None)


class VerdictLog:
    """Writes and reads verdicts. Holds no state; thread-safe."""

    def __init__(self, client: redis.Redis, namespace: str, *, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._namespace = namespace
        self._clock = clock
        self._waiting_key = keys.waiting_frames(namespace)

    def record(self, clusters: Mapping[str, Sequence[LayerVerdict]]) -> None:
        """Keep the verdicts of one pass over clusters, by their keys, in one round trip. They are for people only: a
        failure is logged."""
        at = round(self._clock(), 3)
        by_job: defaultdict[str, dict[Any, Any]] = defaultdict(dict)
        for cluster_key, verdicts in clusters.items():
            for it in verdicts:
                said = [it.verdict.value, it.frames, it.waiting, it.detail[:LONGEST_ERROR], at]
                by_job[it.job_id][f"{it.layer_id}{_SEPARATOR}{cluster_key}"] = json.dumps(said)
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                for job_id, fields in by_job.items():
                    key = keys.verdicts(self._namespace, job_id)
                    pipeline.hset(key, mapping=fields)
                    pipeline.expire(key, KEPT_SECONDS)
                pipeline.execute()
        except redis.RedisError as error:
            log.warning("verdicts_not_recorded", clusters=len(clusters), jobs=len(by_job), error=str(error))

    def of_jobs(self, job_ids: Sequence[str]) -> dict[str, dict[str, tuple[RecordedVerdict, ...]]]:
        """The verdicts of jobs, by their ids, on each of their layers, the newest first; in one round trip. Raises
        RedisError."""
        with self._client.pipeline(transaction=False) as pipeline:
            for job_id in job_ids:
                pipeline.hgetall(keys.verdicts(self._namespace, job_id))
            found = zip(job_ids, pipeline.execute(), strict=True)
            return {job_id: _by_layer(job_id, fields) for job_id, fields in found}

    def record_waiting(self, scope: str, frames: Mapping[str, int]) -> None:
        """Keep how many frames of a facility scope wait, by verdict. Raises RedisError."""
        self._client.hset(self._waiting_key, _SCOPE + scope, json.dumps([self._clock(), frames]))

    def waiting(self, *, believed_seconds: float) -> Counter[str]:
        """The frames that waited when they were counted last, by verdict, in all facility scopes. Deletes counts older
        than ``believed_seconds``. Raises RedisError."""
        found, oldest = Counter[str](), self._clock() - believed_seconds
        for name, text in cast("Mapping[str, str]", self._client.hgetall(self._waiting_key)).items():
            at, frames = json.loads(text) if name.startswith(_SCOPE) else (0.0, {})
            if at < oldest:
                self._client.hdel(self._waiting_key, name)
            else:
                found.update(frames)
        return found


def _by_layer(job_id: str, fields: Mapping[str, str]) -> dict[str, tuple[RecordedVerdict, ...]]:
    found: defaultdict[str, list[RecordedVerdict]] = defaultdict(list)
    for name, text in fields.items():
        layer_id, _, cluster = name.partition(_SEPARATOR)
        try:
            what, frames, waiting, detail, at = json.loads(text)
            verdict = LayerVerdict(job_id, layer_id, Verdict(what), int(frames), int(waiting), str(detail))
            found[layer_id].append(RecordedVerdict(verdict, cluster, float(at)))
        except (ValueError, TypeError) as error:  # what another version of this program wrote
            log.warning("verdict_unreadable", job=job_id, layer=layer_id, error=str(error))
    return {layer: tuple(sorted(recorded, key=lambda one: one.at, reverse=True)) for layer, recorded in found.items()}


# What becomes of a plan's verdicts when not all of it is booked.
#
# The planner says why frames wait before any store was asked. The ledger may refuse what the snapshot had headroom for,
# because its counters are ahead or its caps are older, and the commit loses what others took in the meantime.


def after_booking(
    verdicts: Iterable[LayerVerdict],
    procs: Iterable[PlannedProc],
    refusals: Mapping[str, BookingRefused],
    losses: Mapping[str, BookingError],
) -> tuple[LayerVerdict, ...]:
    """Take from each verdict the frames that were refused or lost, both by proc id, and say why they wait."""
    gone: defaultdict[str, list[BookingRefused | BookingError]] = defaultdict(list)
    for proc in procs:
        if (why := refusals.get(proc.proc_id) or losses.get(proc.proc_id)) is not None:
            gone[proc.layer.id].append(why)
    return tuple(_judged(it, gone[it.layer_id]) for it in verdicts)


def _judged(verdict: LayerVerdict, gone: Sequence[BookingRefused | BookingError]) -> LayerVerdict:
    if not gone:
        return verdict
    refused = [it for it in gone if isinstance(it, BookingRefused)]
    if refused:
        said, detail = _refusal(refused[-1])
    else:
        said = verdict.verdict
        reasons = ", ".join(sorted({it.reason for it in gone if isinstance(it, BookingError)}))
        detail = f"{len(gone)} of its frames were lost before they were booked ({reasons}); tried again"
    frames, waiting = verdict.frames - len(gone), verdict.waiting + len(gone)
    return replace(verdict, verdict=said, frames=frames, waiting=waiting, detail=detail)


def _refusal(refused: BookingRefused) -> tuple[Verdict, str]:
    if refused.table == "unseeded":
        return Verdict.FAILED, f"PostgreSQL has no row with the caps of {refused.text}"
    if refused.table == "error":
        spoilt = f"its counters in Redis are spoilt, and put right by the next recompute: {refused.text}"
        return Verdict.FAILED, spoilt
    over = f"over_{refused.table}"
    if over not in list(Verdict):
        return Verdict.FLOWING, "its booking was taken back before it was made; tried again"
    of = refused.table.removesuffix("_gpus")
    used = f"the counters have {refused.current:g} of {refused.limit:g} in use under the cap of its {of}"
    return Verdict(over), used


# How many frames wait, and why: each once, by the verdict on its layer, or by what keeps passes from looking at it.

_LASTING = (Verdict.QUARANTINED.value, Verdict.OVER_JOB.value, Verdict.OVER_FOLDER.value)
"""What else keeps frames waiting changes from one moment to the next."""


def count_waiting_frames(
    connection: Connection,
    settings: Settings,
    verdicts: VerdictLog,
    facts: SchemaFacts,
    *,
    cooled_down: Collection[str],
    believed_seconds: float,
) -> Counter[str]:
    """Count them in the facility scope, and keep the figures with the verdicts; returns those of all scopes by verdict.
    ``cooled_down`` are keys of clusters; verdicts and figures older than ``believed_seconds`` say nothing.

    Raises SQLAlchemyError, RedisError, and InvalidInput where the facility does not exist.
    """
    work = fetch_waiting_work(connection, scoped_facilities(connection, settings), facts)
    clusters = load_clusters(connection, settings) if work else ()
    oldest = time.time() - believed_seconds
    said = {
        layer_id: best.verdict.verdict.value
        for layers in verdicts.of_jobs(sorted({job_id for it in work for job_id in it.jobs})).values()
        for layer_id, recorded in layers.items()
        if (best := most_telling([it for it in recorded if it.at >= oldest])) is not None
    }
    ignored = frozenset(map(normalise_tag, settings.scheduler.ignore_tags))
    cooled_down = {key.partition("@")[0] for key in cooled_down}
    frames = waiting_by_verdict(clusters, work, said, ignored=ignored, cooled_down=cooled_down)
    verdicts.record_waiting(settings.scheduler.facility or "", frames)
    return verdicts.waiting(believed_seconds=believed_seconds)


def waiting_by_verdict(
    clusters: Iterable[Cluster],
    work: Iterable[Row[Any]],
    said: Mapping[str, str],
    *,
    ignored: frozenset[str] = frozenset(),
    cooled_down: Collection[str] = (),
) -> dict[str, int]:
    """The frames of ``work`` (fetch_waiting_work) by verdict; ``said``: the last one on a layer, by its id.

    Frames that no cluster reaches, because no host has such a tag, have no host; but they are not counted if their tags
    are ``ignored``, for another scheduler has them. ``cooled_down``: keys of clusters that no pass looks at now.
    """
    reached: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    looked_at: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for cluster in clusters:
        place = cluster.facility_id, cluster.show_id
        reached[place].update(cluster.tags)
        if cluster.key not in cooled_down:
            looked_at[place].update(cluster.tags)
    frames = Counter[str]()
    for it in work:
        place, tags = (it.pk_facility, it.pk_show), frozenset(it.tags.split("|"))
        why = ""
        if tags.isdisjoint(reached[place]):
            if tags <= ignored:
                continue
            why = Verdict.NO_HOST.value
        elif it.why in _LASTING:
            why = it.why
        elif tags.isdisjoint(looked_at[place]):
            why = Verdict.COOLED_DOWN.value
        for layer_id, waiting in zip(it.layers, it.waiting, strict=True):
            frames[why or said.get(layer_id, Verdict.BEHIND.value)] += waiting
    return dict(frames)
