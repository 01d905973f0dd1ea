"""The last verdict of every layer, kept for `explain` and the metrics: why its frames were, or were not, placed.

One hash a job, ``{namespace}:verdicts:{job id}``. A layer may be looked at by several clusters, one for each kind of
tag it names, so a field is ``{layer id}|{cluster}`` and its value the verdict as JSON. The hash of a job that no pass
looks at any more expires after a day, so nothing is left of jobs that are gone. How many frames each cluster's last
pass left waiting is in one more hash, ``{namespace}:waiting``, of which the leading beat shows the sum: frames that
several clusters reach are in it once for each. Beside the clusters it has a field for the frames that no pass looked at
(`count_frames_not_looked_at`), and for all that wait, each once; one for each facility scope.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import redis
import structlog
from sqlalchemy import Engine

from opencue_sched.coordination import names
from opencue_sched.dispatch.clusters import load_clusters, scoped_facilities
from opencue_sched.domain.cluster import Cluster, LayerVerdict, Verdict, normalise_tag
from opencue_sched.settings import Settings
from opencue_sched.store.pending import WaitingWork, fetch_waiting_work
from opencue_sched.store.schema import SchemaFacts

log = structlog.get_logger(__name__)

KEPT_SECONDS = 24 * 3600
LONGEST_DETAIL = 500

_SEPARATOR = "|"
_BEHIND = "behind:"


@dataclass(frozen=True, slots=True)
class RecordedVerdict:
    """A verdict, the cluster whose pass gave it, and when: epoch seconds of the recording process."""

    verdict: LayerVerdict
    cluster: str
    at: float


@dataclass(frozen=True, slots=True)
class WaitingFrames:
    """``by_verdict``: once for each cluster that reaches them. ``distinct``: each once, as counted lately."""

    by_verdict: Counter[str]
    distinct: int


class VerdictLog:
    """Writes and reads verdicts. Holds no state; thread-safe."""

    def __init__(self, client: redis.Redis, namespace: str, *, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._namespace = namespace
        self._clock = clock

    def key(self, job_id: str) -> str:
        """The hash of a job."""
        return names.verdicts(self._namespace, job_id)

    @property
    def waiting_key(self) -> str:
        """The hash of what clusters have waiting."""
        return names.waiting_frames(self._namespace)

    def record(
        self, verdicts: Sequence[LayerVerdict], cluster_key: str, *, skipped: Mapping[str, LayerVerdict] | None = None
    ) -> None:
        """Keep the verdicts of one pass, in one round trip. They are for people only: a failure is logged.

        ``skipped`` layers, by id, were not looked at; their frames wait as they did when they were.
        """
        at = round(self._clock(), 3)
        by_job: defaultdict[str, dict[Any, Any]] = defaultdict(dict)
        waiting = Counter[str]()
        left_out = (skipped or {}).keys() - {verdict.layer_id for verdict in verdicts}
        for verdict in ((skipped or {})[layer] for layer in left_out):
            waiting[verdict.verdict.value] += verdict.waiting
        for verdict in verdicts:
            by_job[verdict.job_id][f"{verdict.layer_id}{_SEPARATOR}{cluster_key}"] = _encoded(verdict, at)
            waiting[verdict.verdict.value] += verdict.waiting
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                for job_id, fields in by_job.items():
                    pipeline.hset(self.key(job_id), mapping=fields)
                    pipeline.expire(self.key(job_id), KEPT_SECONDS)
                if +waiting:
                    pipeline.hset(self.waiting_key, cluster_key, json.dumps({"at": at, "frames": +waiting}))
                else:
                    pipeline.hdel(self.waiting_key, cluster_key)
                pipeline.execute()
        except redis.RedisError as error:
            log.warning("verdicts_not_recorded", cluster=cluster_key, verdicts=len(verdicts), error=str(error))

    def of_job(self, job_id: str) -> dict[str, tuple[RecordedVerdict, ...]]:
        """The verdicts of each layer of a job, the newest first. Raises RedisError."""
        fields = cast("Mapping[str, str]", self._client.hgetall(self.key(job_id)))
        found: defaultdict[str, list[RecordedVerdict]] = defaultdict(list)
        for field, text in fields.items():
            layer_id, _, cluster = field.partition(_SEPARATOR)
            recorded = _decoded(job_id, layer_id, cluster, text)
            if recorded is not None:
                found[layer_id].append(recorded)
        return {
            layer: tuple(sorted(recorded, key=lambda one: one.at, reverse=True)) for layer, recorded in found.items()
        }

    def left_waiting(self) -> dict[str, dict[str, int]]:
        """Frames that the last pass over each cluster (by key) left waiting, by verdict. Raises RedisError."""
        fields = cast("Mapping[str, str]", self._client.hgetall(self.waiting_key))
        decoded = {key: _decoded_waiting(text) for key, text in fields.items() if not key.startswith(_BEHIND)}
        return {cluster: left[1] for cluster, left in decoded.items() if left is not None}

    def record_not_looked_at(self, scope: str, frames: Mapping[str, int], *, distinct: int) -> None:
        """Keep how many frames no pass looked at, by verdict, and how many wait at all. Raises RedisError."""
        entry = {"at": self._clock(), "frames": dict(frames), "distinct": distinct}
        self._client.hset(self.waiting_key, _BEHIND + scope, json.dumps(entry))

    def waiting(self, *, believed_seconds: float) -> WaitingFrames:
        """Frames that the last passes left waiting, or did not look at, by verdict, in all clusters of the namespace.
        Raises RedisError.

        A cluster without a pass for ``believed_seconds`` has no work any more, and is forgotten.
        """
        fields = cast("Mapping[str, str]", self._client.hgetall(self.waiting_key))
        oldest = self._clock() - believed_seconds
        frames: Counter[str] = Counter()
        distinct = 0
        gone = []
        for cluster, text in fields.items():
            left = _decoded_waiting(text)
            if left is None or left[0] < oldest:
                gone.append(cluster)
            else:
                frames.update(left[1])
                distinct += left[2]
        if gone:
            self._client.hdel(self.waiting_key, *gone)
        return WaitingFrames(frames, distinct)


def _decoded_waiting(text: str) -> tuple[float, dict[str, int], int] | None:
    """When, frames by verdict, and all that wait, each once (0 of a cluster); None for what another version wrote."""
    try:
        data = json.loads(text)
        frames = {Verdict(name).value: int(count) for name, count in data["frames"].items()}
        return float(data["at"]), frames, int(data.get("distinct", 0))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _encoded(verdict: LayerVerdict, at: float) -> str:
    return json.dumps(
        {
            "verdict": verdict.verdict.value,
            "detail": verdict.detail[:LONGEST_DETAIL],
            "frames": verdict.frames,
            "waiting": verdict.waiting,
            "at": at,
        },
        separators=(",", ":"),
    )


def _decoded(job_id: str, layer_id: str, cluster: str, text: str) -> RecordedVerdict | None:
    """None for what another version of this program wrote."""
    try:
        data = json.loads(text)
        verdict = LayerVerdict(
            job_id, layer_id, Verdict(data["verdict"]), int(data["frames"]), int(data["waiting"]), str(data["detail"])
        )
        return RecordedVerdict(verdict, cluster, float(data["at"]))
    except (ValueError, KeyError, TypeError) as error:
        log.warning("verdict_unreadable", job=job_id, layer=layer_id, error=str(error))
        return None


# Frames that no pass has looked at, although they wait: others come before them, their job stands at a cap or is in
# quarantine, or their cluster is cooled down.
#
# A pass looks at the first jobs that may book something. What it leaves waiting has a verdict; what it did not
# look at is the difference to all there is, cluster by cluster. Both are from different moments, so the figure is for
# people.

_BY_CAP = (Verdict.OVER_JOB.value, Verdict.OVER_FOLDER.value)


def count_frames_not_looked_at(
    engine: Engine, settings: Settings, verdicts: VerdictLog, facts: SchemaFacts, *, cooled_down: Collection[str]
) -> None:
    """Count them in the facility scope, and keep the figures with the verdicts. ``cooled_down`` are keys of clusters.

    Raises SQLAlchemyError, RedisError, and InvalidInput where the facility does not exist.
    """
    with engine.connect() as connection:
        clusters = load_clusters(connection, settings)
        work = fetch_waiting_work(connection, scoped_facilities(connection, settings), facts)
    ignored = frozenset(map(normalise_tag, settings.scheduler.ignore_tags))
    behind = frames_not_looked_at(clusters, work, verdicts.left_waiting(), ignored=ignored, cooled_down=cooled_down)
    verdicts.record_not_looked_at(settings.scheduler.facility or "", behind, distinct=sum(it.frames for it in work))


def frames_not_looked_at(
    clusters: Iterable[Cluster],
    work: Iterable[WaitingWork],
    judged: Mapping[str, Mapping[str, int]],
    *,
    ignored: frozenset[str] = frozenset(),
    cooled_down: Collection[str] = (),
) -> dict[str, int]:
    """Frames by verdict that are in ``work`` and of which the last passes said nothing.

    ``judged``: cluster key -> verdict -> frames left waiting. Like those, frames are counted once for each cluster that
    reaches them: nine of a layer with the tags of two clusters are eighteen. Those that no cluster reaches, because no
    host has such a tag, have no host; but not if their tags are ``ignored``, for another scheduler has them.
    ``cooled_down``: keys of clusters that no pass looks at now.
    """
    by_place: defaultdict[tuple[str, str], list[WaitingWork]] = defaultdict(list)
    for it in work:
        by_place[it.facility_id, it.show_id].append(it)
    frames = Counter[str]()
    reached: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for cluster in clusters:
        reached[cluster.facility_id, cluster.show_id].update(cluster.tags)
        tags = frozenset(cluster.tags)
        there = Counter[str]()
        for it in by_place.get((cluster.facility_id, cluster.show_id), ()):
            if not tags.isdisjoint(it.tags):
                there[it.why] += it.frames
        seen = Counter[str]()
        for verdict, count in judged.get(cluster.key, {}).items():
            seen[verdict if verdict in _BY_CAP else Verdict.BEHIND.value] += count
        left = there - seen
        if cluster.key in cooled_down:
            left[Verdict.COOLED_DOWN.value] = left.pop(Verdict.BEHIND.value, 0)
        frames += left
    for place, waiting in by_place.items():
        lost = sum(it.frames for it in waiting if it.tags - ignored and it.tags.isdisjoint(reached[place]))
        frames += Counter({Verdict.NO_HOST.value: lost})
    return dict(frames)
