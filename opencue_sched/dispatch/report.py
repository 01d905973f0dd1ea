"""What passes say: what one did, for metrics, logs and the task's result, and the last verdict of every layer: why its
frames were, or were not, placed, for `explain` and the metrics.

The verdicts are one hash a job, ``{namespace}:verdicts:{job id}``. A layer may be looked at by several clusters, one
for each kind of tag it names, so a field is ``{layer id}|{cluster}`` and its value the verdict as JSON. The hash of a
job that no pass looks at any more expires after a day, so nothing is left of jobs that are gone. How many frames each
cluster's last pass left waiting is in one more hash, ``{namespace}:waiting``, of which the leading beat shows the sum:
frames that several clusters reach are in it once for each. Beside the clusters it has a field for the frames that no
pass looked at (`count_frames_not_looked_at`), and for all that wait, each once; one for each facility scope.
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
from sqlalchemy import Engine, Row

from opencue_sched.accounting.ledger import BookingRefused
from opencue_sched.coordination import names
from opencue_sched.dispatch.clusters import load_clusters, scoped_facilities
from opencue_sched.domain.cluster import Cluster, LayerVerdict, Verdict, normalise_tag
from opencue_sched.domain.farm import PlannedProc
from opencue_sched.errors import BookingError
from opencue_sched.placement.planner import Plan
from opencue_sched.settings import Settings
from opencue_sched.store.pending import fetch_waiting_work
from opencue_sched.store.schema import SchemaFacts

log = structlog.get_logger(__name__)

KEPT_SECONDS = 24 * 3600
LONGEST_DETAIL = 500

LONGEST_ERROR = 500
"""Characters of an error that an answer carries."""

_SEPARATOR = "|"
_BEHIND = "behind:"


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
    skipped: Mapping[str, LayerVerdict] = field(default_factory=dict)
    """Layers that were not looked at because they could not be placed a moment ago, by id."""
    go_on: bool = False
    """Nothing was booked, but there are jobs not yet looked at, or something happened since others were."""
    look_again: float | None = None
    """Seconds after which to look again although no event says so: a layer may start, or a host that PostgreSQL or an
    RQD refused may be tried again. None for nothing of that."""
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


@dataclass(frozen=True, slots=True)
class WaitingFrames:
    """``by_cluster``: what was left waiting, by verdict, of each cluster (by key, whatever shard), and under keys of
    their own what no pass looked at. ``distinct``: all that wait, each once, as counted lately."""

    by_cluster: Mapping[str, Mapping[str, int]]
    distinct: int

    def by_verdict(self) -> Counter[str]:
        """Frames in all clusters, once for each that reaches them."""
        frames = Counter[str]()
        for left in self.by_cluster.values():
            frames.update(left)
        return frames


class VerdictLog:
    """Writes and reads verdicts. Holds no state; thread-safe."""

    def __init__(self, client: redis.Redis, namespace: str, *, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._namespace = namespace
        self._clock = clock
        self._waiting_key = names.waiting_frames(namespace)

    def record(self, clusters: Mapping[str, tuple[Sequence[LayerVerdict], Mapping[str, LayerVerdict]]]) -> None:
        """Keep the verdicts of one pass over clusters, by their keys, in one round trip. They are for people only: a
        failure is logged.

        Of each cluster: the verdicts, and the layers, by id, that were not looked at; their frames wait as they did
        when they were.
        """
        at = round(self._clock(), 3)
        by_job: defaultdict[str, dict[Any, Any]] = defaultdict(dict)
        waiting: dict[str, Counter[str]] = {}
        for cluster_key, (verdicts, skipped) in clusters.items():
            left = waiting[cluster_key] = Counter[str]()
            for layer_id in skipped.keys() - {verdict.layer_id for verdict in verdicts}:
                left[skipped[layer_id].verdict.value] += skipped[layer_id].waiting
            for it in verdicts:
                said = [it.verdict.value, it.frames, it.waiting, it.detail[:LONGEST_DETAIL], at]
                by_job[it.job_id][f"{it.layer_id}{_SEPARATOR}{cluster_key}"] = json.dumps(said)
                left[it.verdict.value] += it.waiting
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                for job_id, fields in by_job.items():
                    key = names.verdicts(self._namespace, job_id)
                    pipeline.hset(key, mapping=fields)
                    pipeline.expire(key, KEPT_SECONDS)
                for cluster_key, left in waiting.items():
                    if +left:
                        pipeline.hset(self._waiting_key, cluster_key, json.dumps({"at": at, "frames": +left}))
                    else:
                        pipeline.hdel(self._waiting_key, cluster_key)
                pipeline.execute()
        except redis.RedisError as error:
            log.warning("verdicts_not_recorded", clusters=len(clusters), jobs=len(by_job), error=str(error))

    def of_jobs(self, job_ids: Sequence[str]) -> dict[str, dict[str, tuple[RecordedVerdict, ...]]]:
        """The verdicts of jobs, by their ids, on each of their layers, the newest first; in one round trip. Raises
        RedisError."""
        with self._client.pipeline(transaction=False) as pipeline:
            for job_id in job_ids:
                pipeline.hgetall(names.verdicts(self._namespace, job_id))
            found = zip(job_ids, pipeline.execute(), strict=True)
            return {job_id: _by_layer(job_id, fields) for job_id, fields in found}

    def record_not_looked_at(self, scope: str, frames: Mapping[str, int], *, distinct: int) -> None:
        """Keep how many frames no pass looked at, by verdict, and how many wait at all. Raises RedisError."""
        entry = {"at": self._clock(), "frames": dict(frames), "distinct": distinct}
        self._client.hset(self._waiting_key, _BEHIND + scope, json.dumps(entry))

    def waiting(self, *, believed_seconds: float, forget: bool = False) -> WaitingFrames:
        """Frames that the last passes left waiting, or did not look at, in all clusters of the namespace. Raises
        RedisError.

        A cluster without a pass for ``believed_seconds`` has no work any more; with ``forget`` its entry is deleted.
        """
        fields = cast("Mapping[str, str]", self._client.hgetall(self._waiting_key))
        oldest = self._clock() - believed_seconds
        believed: dict[str, dict[str, int]] = {}
        distinct = 0
        for key, text in fields.items():
            left = _decoded_waiting(text)
            if left is not None and left[0] >= oldest:
                believed[key] = left[1]
                distinct += left[2]
        gone = fields.keys() - believed.keys()
        if gone and forget:
            self._client.hdel(self._waiting_key, *gone)
        return WaitingFrames(_of_clusters(believed), distinct)


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


def _of_clusters(by_posting: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """What clusters left waiting, of what their passes in each shard did. These speak of the same frames: as many wait
    as in the shard with the most, each for the reason that says most of those the shards give."""
    of_shards: defaultdict[str, list[Mapping[str, int]]] = defaultdict(list)
    for key, frames in by_posting.items():
        of_shards[key.partition("@")[0]].append(frames)
    found: dict[str, dict[str, int]] = {}
    for cluster, counts in of_shards.items():
        left = max(sum(frames.values()) for frames in counts)
        found[cluster] = {}
        for verdict in Verdict:
            if count := min(left, max(frames.get(verdict.value, 0) for frames in counts)):
                found[cluster][verdict.value] = count
                left -= count
    return found


def _decoded_waiting(text: str) -> tuple[float, dict[str, int], int] | None:
    """When, frames by verdict, and all that wait, each once (0 of a cluster); None for what another version wrote."""
    try:
        data = json.loads(text)
        frames = {Verdict(name).value: int(count) for name, count in data["frames"].items()}
        return float(data["at"]), frames, int(data.get("distinct", 0))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


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
    refused: dict[str, list[BookingRefused]] = {}
    lost: dict[str, list[BookingError]] = {}
    for proc in procs:
        if proc.proc_id in refusals:
            refused.setdefault(proc.layer.id, []).append(refusals[proc.proc_id])
        elif proc.proc_id in losses:
            lost.setdefault(proc.layer.id, []).append(losses[proc.proc_id])
    return tuple(_judged(it, refused.get(it.layer_id, ()), lost.get(it.layer_id, ())) for it in verdicts)


def _judged(verdict: LayerVerdict, refused: Sequence[BookingRefused], lost: Sequence[BookingError]) -> LayerVerdict:
    gone = len(refused) + len(lost)
    if not gone:
        return verdict
    left = replace(verdict, frames=verdict.frames - gone, waiting=verdict.waiting + gone)
    if refused:
        said, detail = _refusal(refused[-1])
        return replace(left, verdict=said, detail=detail)
    reasons = ", ".join(sorted({error.reason for error in lost}))
    return replace(left, detail=f"{gone} of its frames were lost before they were booked ({reasons}); tried again")


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


# Frames that no pass has looked at, although they wait: others come before them, their job stands at a cap or is in
# quarantine, or their cluster is cooled down.
#
# A pass looks at the first jobs that may book something. What it leaves waiting has a verdict; what it did not
# look at is the difference to all there is, cluster by cluster. Both are from different moments, so the figure is for
# people.

_LASTING = (Verdict.QUARANTINED.value, Verdict.OVER_JOB.value, Verdict.OVER_FOLDER.value)
"""What else keeps frames waiting changes from one moment to the next."""


def count_frames_not_looked_at(
    engine: Engine,
    settings: Settings,
    verdicts: VerdictLog,
    facts: SchemaFacts,
    *,
    cooled_down: Collection[str],
    believed_seconds: float,
) -> None:
    """Count them in the facility scope, and keep the figures with the verdicts. ``cooled_down`` are keys of clusters;
    ``believed_seconds`` as of VerdictLog.waiting().

    Raises SQLAlchemyError, RedisError, and InvalidInput where the facility does not exist.
    """
    with engine.connect() as connection:
        clusters = load_clusters(connection, settings)
        work = fetch_waiting_work(connection, scoped_facilities(connection, settings), facts)
    ignored = frozenset(map(normalise_tag, settings.scheduler.ignore_tags))
    cooled_down = {key.partition("@")[0] for key in cooled_down}
    judged = verdicts.waiting(believed_seconds=believed_seconds).by_cluster
    behind = frames_not_looked_at(clusters, work, judged, ignored=ignored, cooled_down=cooled_down)
    verdicts.record_not_looked_at(settings.scheduler.facility or "", behind, distinct=sum(it.frames for it in work))


def frames_not_looked_at(
    clusters: Iterable[Cluster],
    work: Iterable[Row[Any]],
    judged: Mapping[str, Mapping[str, int]],
    *,
    ignored: frozenset[str] = frozenset(),
    cooled_down: Collection[str] = (),
) -> dict[str, int]:
    """Frames by verdict that are in ``work`` (fetch_waiting_work) and of which the last passes said nothing.

    ``judged``: cluster key -> verdict -> frames left waiting. Like those, frames are counted once for each cluster that
    reaches them: nine of a layer with the tags of two clusters are eighteen. Those that no cluster reaches, because no
    host has such a tag, have no host; but not if their tags are ``ignored``, for another scheduler has them.
    ``cooled_down``: keys of clusters that no pass looks at now.
    """
    by_place: defaultdict[tuple[str, str], Counter[tuple[frozenset[str], str]]] = defaultdict(Counter)
    for it in work:
        why = it.why if it.why in _LASTING else Verdict.BEHIND.value
        by_place[it.pk_facility, it.pk_show][frozenset(it.tags.split("|")), why] += it.frames
    frames = Counter[str]()
    reached: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for cluster in clusters:
        reached[cluster.facility_id, cluster.show_id].update(cluster.tags)
        tags = frozenset(cluster.tags)
        there = Counter[str]()
        for (its_tags, why), count in by_place[cluster.facility_id, cluster.show_id].items():
            if not tags.isdisjoint(its_tags):
                there[why] += count
        seen = Counter[str]()
        for verdict, count in judged.get(cluster.key, {}).items():
            seen[verdict if verdict in _LASTING else Verdict.BEHIND.value] += count
        left = there - seen
        if cluster.key in cooled_down:
            left[Verdict.COOLED_DOWN.value] = left.pop(Verdict.BEHIND.value, 0)
        frames += left
    for place, waiting in by_place.items():
        nowhere = (it for it in waiting if it[0] - ignored and it[0].isdisjoint(reached[place]))
        lost = sum(waiting[it] for it in nowhere)
        frames += Counter({Verdict.NO_HOST.value: lost})
    return dict(frames)
