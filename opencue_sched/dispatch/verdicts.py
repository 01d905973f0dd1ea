"""The last verdict of every layer: why its frames were, or were not, placed, for `explain` and the metrics.

The verdicts are one hash a job, ``{namespace}:verdicts:{job id}``. A layer may be looked at by several clusters, one
for each kind of tag it names, so a field is ``{layer id}|{cluster}`` and its value the verdict as JSON. The hash of a
job that no pass looks at any more expires after a day, so nothing is left of jobs that are gone. A pass notes its
verdicts in memory, and a thread writes them (`VerdictNotes`).

Three kinds of hashes stand beside them:

- ``{namespace}:shortages:{show id}`` has, by cluster, what many layers wait for at once. No pass looks at these layers
  one by one, so the reason is kept once for all of them.
- ``{namespace}:waiting`` has, by facility scope, how many frames wait by which verdict, as the leading beat of the
  scope counted them last.
- ``{namespace}:failed-commits:{cluster}`` says since when, how often and why the commits of a cluster have failed. The
  first commit that succeeds deletes it.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import islice
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import redis
import structlog

from opencue_sched.accounting.ledger import ERROR, UNSEEDED, BookingRefused
from opencue_sched.background import PeriodicThread
from opencue_sched.coordination import keys
from opencue_sched.dispatch.report import LONGEST_ERROR
from opencue_sched.domain.hosts import Resources
from opencue_sched.domain.plans import PlannedProc
from opencue_sched.domain.verdicts import LayerVerdict, Shortage, Verdict
from opencue_sched.errors import BookingError

log = structlog.get_logger(__name__)

KEPT_SECONDS = 24 * 3600
"""Life of verdicts and shortages in Redis after they were last written. What waits is written every half minute, so
this bounds what ended jobs leave behind; for so long ``explain`` can tell what was found before all workers went
away."""
FAILED_COMMITS_SECONDS = 600
"""Life of what is kept of failed commits: a cluster with waiting frames has another pass long before."""
_COMPARED_SECONDS = 120.0
"""How much older than the newest verdict on a layer those of other clusters may be to be compared with it: twice the
minute within which passes over each cluster look at the layer."""
BELIEVED_SECONDS = 90.0
"""How long a verdict is believed: a layer that waits is looked at within a minute, and its verdict is written half a
minute later at most."""
_WRITE_SECONDS = 1.0
"""The time between two writes of what changed: a layer that changes in every pass is written once in it. With more time
``explain`` knows less of now; with less, passes of a busy farm are written one by one."""
_WRITE_AGAIN_SECONDS = 30.0
"""The time between two writes of a verdict that has not changed, which has the time of the last look. BELIEVED_SECONDS
count on it."""
MOST_WRITTEN = 2_000
"""How many verdicts and shortages one write has at most. There is a write a second, so this is the most that a worker
puts upon Redis."""
_SEPARATOR = "|"
_SCOPE = "facility:"
"""How the fields begin that have the frames waiting in one facility, or in all."""


@dataclass(frozen=True, slots=True)
class RecordedVerdict:
    """A verdict, and the pass that gave it."""

    verdict: LayerVerdict
    cluster: str
    """The key of the cluster of the pass."""
    at: float
    """Epoch seconds of the recording process."""


@dataclass(frozen=True, slots=True)
class RecordedShortages:
    """What layers of a show wait for, as the last pass over a cluster found it."""

    show_id: str
    cluster: str
    """The key of the cluster."""
    shortages: tuple[Shortage, ...]
    at: float
    """Epoch seconds of the worker that made the pass."""


ShortagesOfShows = Mapping[tuple[str, str], Sequence[Shortage]]
"""Shortages by the show (id) and the cluster (key) of a pass."""


@dataclass(frozen=True, slots=True)
class FailedCommits:
    """The last commits of a cluster, none of which PostgreSQL took."""

    cluster: str
    failures: int
    since: float
    """The time of the first failure, in epoch seconds of a worker."""
    error: str
    """The error of the last failure."""


def most_telling(recorded: Sequence[RecordedVerdict]) -> RecordedVerdict | None:
    """The verdict on a layer that says most: of those of several clusters, ``recorded`` newest first, the one that
    stands first in `Verdict`. None where there is none; much older ones than the newest do not count."""
    order = list(Verdict)
    recent = [verdict for verdict in recorded if recorded[0].at - verdict.at <= _COMPARED_SECONDS]
    return min(recent, key=lambda verdict: order.index(verdict.verdict.verdict), default=None)


class WaitingCount(NamedTuple):
    """How many frames waited, by verdict."""

    frames: Counter[str]
    counted_at: float | None
    """Epoch seconds of the count, of several scopes the oldest; None where nothing was counted."""


class VerdictLog:
    """Writes and reads verdicts. Holds no state; thread-safe."""

    def __init__(self, client: redis.Redis, namespace: str, *, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._namespace = namespace
        self._clock = clock
        self._waiting_key = keys.waiting_frames(namespace)

    def record(
        self,
        clusters: Mapping[str, Sequence[LayerVerdict]],
        *,
        commits: Mapping[str, str] = MappingProxyType({}),
        shortages: ShortagesOfShows = MappingProxyType({}),
    ) -> None:
        """Write what one pass over clusters says: its verdicts by the clusters' keys, the ``shortages`` for which other
        layers wait, and which ``commits`` failed (`record_commits`).

        All this is for people only, so an error of Redis is logged and not raised.
        """
        at = self._clock()
        said = [RecordedVerdict(verdict, key, at) for key, verdicts in clusters.items() for verdict in verdicts]
        try:
            self.write(said, [RecordedShortages(*key, tuple(found), at) for key, found in shortages.items()])
        except redis.RedisError as error:
            log.warning("verdicts_not_recorded", clusters=len(clusters), verdicts=len(said), error=str(error))
        self.record_commits(commits)

    def write(self, said: Iterable[RecordedVerdict], shortages: Iterable[RecordedShortages] = ()) -> None:
        """Write verdicts and shortages, in one round trip. Raises RedisError."""
        by_job: defaultdict[str, dict[Any, Any]] = defaultdict(dict)
        for recorded in said:
            verdict = recorded.verdict
            value = [verdict.verdict.value, verdict.frames, verdict.waiting, verdict.detail[:LONGEST_ERROR]]
            field = f"{verdict.layer_id}{_SEPARATOR}{recorded.cluster}"
            by_job[verdict.job_id][field] = json.dumps([*value, round(recorded.at, 3)])
        shows = list(shortages)
        if not (by_job or shows):
            return
        with self._client.pipeline(transaction=False) as pipeline:
            for of_show in shows:
                key = keys.shortages(self._namespace, of_show.show_id)
                pipeline.hset(key, of_show.cluster, _shortages_text(of_show))
                pipeline.expire(key, KEPT_SECONDS)
            for job_id, fields in by_job.items():
                key = keys.verdicts(self._namespace, job_id)
                pipeline.hset(key, mapping=fields)
                pipeline.expire(key, KEPT_SECONDS)
            pipeline.execute()

    def record_commits(self, commits: Mapping[str, str]) -> None:
        """Write why the last commit of each cluster (by its key) failed; an empty text says that the commit succeeded.
        An error of Redis is logged and not raised."""
        if not commits:
            return
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                for cluster_key, error in commits.items():
                    key = keys.failed_commits(self._namespace, cluster_key)
                    if error:
                        pipeline.hincrby(key, "failures", 1)
                        pipeline.hsetnx(key, "since", round(self._clock(), 3))
                        pipeline.hset(key, "error", error[:LONGEST_ERROR])
                        pipeline.expire(key, FAILED_COMMITS_SECONDS)
                    else:
                        pipeline.delete(key)
                pipeline.execute()
        except redis.RedisError as problem:
            log.warning("commits_not_recorded", clusters=len(commits), error=str(problem))

    def of_jobs(self, job_ids: Sequence[str]) -> dict[str, dict[str, tuple[RecordedVerdict, ...]]]:
        """The verdicts by job id and layer id, those on one layer with the newest first. One round trip. Raises
        RedisError."""
        with self._client.pipeline(transaction=False) as pipeline:
            for job_id in job_ids:
                pipeline.hgetall(keys.verdicts(self._namespace, job_id))
            found = zip(job_ids, pipeline.execute(), strict=True)
            return {job_id: _by_layer(job_id, fields) for job_id, fields in found}

    def of_show(self, show_id: str) -> tuple[RecordedShortages, ...]:
        """The shortages of a show as the last pass over each of its clusters found them, the newest first. Deletes
        those that are older than a day or cannot be read. Raises RedisError."""
        key = keys.shortages(self._namespace, show_id)
        oldest = self._clock() - KEPT_SECONDS
        fields = cast("Mapping[str, str]", self._client.hgetall(key))
        read = {cluster: _read_shortages(show_id, cluster, text) for cluster, text in fields.items()}
        found = [recorded for recorded in read.values() if recorded is not None and recorded.at >= oldest]
        if gone := read.keys() - {recorded.cluster for recorded in found}:
            self._client.hdel(key, *gone)
        return tuple(sorted(found, key=lambda recorded: recorded.at, reverse=True))

    def failed_commits(self, cluster_keys: Iterable[str]) -> list[FailedCommits]:
        """Which of these clusters had their last two commits or more all fail; the cluster that fails longest comes
        first. One round trip. Raises RedisError."""
        asked = list(cluster_keys)
        with self._client.pipeline(transaction=False) as pipeline:
            for cluster_key in asked:
                pipeline.hmget(keys.failed_commits(self._namespace, cluster_key), "failures", "since", "error")
            answers = pipeline.execute()
        failed = [
            FailedCommits(cluster_key, int(failures), float(since), error)
            for cluster_key, (failures, since, error) in zip(asked, answers, strict=True)
            if int(failures or 0) > 1
        ]
        return sorted(failed, key=lambda commits: commits.since)

    def record_waiting(self, scope: str, frames: Mapping[str, int]) -> None:
        """Write how many frames of a facility scope wait, by verdict. Raises RedisError."""
        self._client.hset(self._waiting_key, _SCOPE + scope, json.dumps([self._clock(), frames]))

    def waiting(self, *, believed_seconds: float) -> WaitingCount:
        """What was counted last, in all facility scopes. Deletes counts older than ``believed_seconds``. Raises
        RedisError."""
        found: Counter[str] = Counter()
        counted_at: list[float] = []
        oldest = self._clock() - believed_seconds
        for name, text in cast("Mapping[str, str]", self._client.hgetall(self._waiting_key)).items():
            if name.startswith(_SCOPE):
                at, frames_of_scope = json.loads(text)
                if at >= oldest:
                    found.update(frames_of_scope)
                    counted_at.append(at)
                    continue
            # Too old, or of another release, which counted in another way.
            self._client.hdel(self._waiting_key, name)
        return WaitingCount(found, min(counted_at, default=None))


class VerdictNotes:
    """The verdicts of this process's passes, in memory, and the thread that writes them: what changed once a second,
    what passes only looked at again every half minute. Thread-safe.

    ``known`` says which of some layers (ids) still wait; verdicts on others are forgotten. A verdict has the time of
    the last look, so those of several processes on one layer differ by what each has seen, not by when it wrote.
    """

    def __init__(
        self,
        verdicts: VerdictLog,
        known: Callable[[Collection[str]], Collection[str]],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._log = verdicts
        self._known = known
        self._clock = clock
        # Passes of several threads note, and the writing thread takes: everything up to ``writing`` is under the lock.
        self._lock = threading.Lock()
        self._notes: dict[tuple[str, str], RecordedVerdict] = {}
        """The last verdict on each layer in each cluster, by their ids."""
        self._changed: dict[tuple[str, str], None] = {}
        """Keys of the notes that are to be written, the first noted first."""
        self._seen_again: set[tuple[str, str]] = set()
        """Keys of the notes that were confirmed by another look since they were written."""
        self._shortages: dict[tuple[str, str], RecordedShortages] = {}
        """The last shortages, by show and cluster."""
        self._changed_shortages: dict[tuple[str, str], None] = {}
        """Keys of the shortages that are to be written, the first noted first."""
        self._shortages_seen_again: set[tuple[str, str]] = set()
        """Keys of the shortages that were confirmed by another look since they were written."""
        self._again_at = clock() + _WRITE_AGAIN_SECONDS
        self.writing = PeriodicThread(
            "verdicts", self._round, failed="verdicts_not_recorded", retry_seconds=1.0, longest_retry_seconds=10.0
        )

    def __len__(self) -> int:
        """The number of verdicts in memory. It is read without the lock: any moment's number will do."""
        return len(self._notes)

    def record(
        self,
        clusters: Mapping[str, Sequence[LayerVerdict]],
        *,
        commits: Mapping[str, str] = MappingProxyType({}),
        shortages: ShortagesOfShows = MappingProxyType({}),
    ) -> None:
        """Note what one pass over clusters says: its verdicts by the clusters' keys, and the ``shortages`` for which
        other layers wait. Which ``commits`` failed is written at once (VerdictLog.record_commits)."""
        at = self._clock()
        with self._lock:
            had_none = not (self._notes or self._shortages)
            for cluster_key, verdicts in clusters.items():
                for verdict in verdicts:
                    key = verdict.layer_id, cluster_key
                    before = self._notes.get(key)
                    self._notes[key] = RecordedVerdict(verdict, cluster_key, at)
                    if before is None or before.verdict != verdict:
                        self._changed[key] = None
                    else:
                        self._seen_again.add(key)
            for place, place_shortages in shortages.items():
                last = self._shortages.get(place)
                self._shortages[place] = RecordedShortages(*place, tuple(place_shortages), at)
                if last is None or last.shortages != self._shortages[place].shortages:
                    self._changed_shortages[place] = None
                else:
                    self._shortages_seen_again.add(place)
        if had_none:
            self.writing.wake()
        self._log.record_commits(commits)

    def write(self) -> None:
        """Write what changed and what is due to be written again, MOST_WRITTEN verdicts and shortages at most. Raises
        RedisError; the next call writes then what this one did not."""
        now = self._clock()
        shows: list[str] = []
        with self._lock:
            if now >= self._again_at:
                shows = [show_id for show_id, _ in self._shortages]
                self._again_at = now + _WRITE_AGAIN_SECONDS
                self._changed |= dict.fromkeys(self._seen_again)
                self._seen_again.clear()
                self._changed_shortages |= dict.fromkeys(self._shortages_seen_again)
                self._shortages_seen_again.clear()
                self._forget(now - BELIEVED_SECONDS)
            places = list(islice(self._changed_shortages, MOST_WRITTEN))
            shortages = [self._shortages[place] for place in places]
            for place in places:
                del self._changed_shortages[place]
            chosen = list(islice(self._changed, MOST_WRITTEN - len(places)))
            for key in chosen:
                del self._changed[key]
        try:
            known = self._known({layer_id for layer_id, _ in chosen})
            with self._lock:
                for key in chosen:
                    if key[0] not in known:
                        self._notes.pop(key, None)
                said = [recorded for key in chosen if (recorded := self._notes.get(key)) is not None]
            self._log.write(said, shortages)
            if shows:
                # Reading a show's shortages deletes those that workers left which are gone. One show is read each half
                # minute, drawn anew, so that all shows come to be read without a list of who has read which.
                self._log.of_show(random.choice(shows))
        except BaseException:  # whatever it was, nothing that was taken above may be lost
            with self._lock:
                self._changed |= dict.fromkeys(chosen)
                self._changed_shortages |= dict.fromkeys(places)
            raise

    def _forget(self, oldest: float) -> None:
        """Forget verdicts and shortages that no pass has found since ``oldest``, except verdicts that are still to be
        written. The caller holds the lock."""
        old_notes = [key for key, recorded in self._notes.items() if recorded.at < oldest and key not in self._changed]
        for key in old_notes:
            del self._notes[key]
        old_shortages = [place for place, recorded in self._shortages.items() if recorded.at < oldest]
        for place in old_shortages:
            del self._shortages[place]
            self._changed_shortages.pop(place, None)

    def _round(self) -> float | None:
        """Write once. Returns the seconds until the next write; None where nothing is noted, until `record` wakes the
        thread."""
        self.write()
        with self._lock:
            return _WRITE_SECONDS if self._notes or self._shortages else None


def _shortages_text(recorded: RecordedShortages) -> str:
    """Shortages as Redis keeps them: ``_read_shortages`` reads this text."""
    found = [
        [shortage.tags, astuple(shortage.need), shortage.verdict.value, shortage.detail[:LONGEST_ERROR]]
        for shortage in recorded.shortages
    ]
    return json.dumps([round(recorded.at, 3), found])


def _read_shortages(show_id: str, cluster: str, text: str) -> RecordedShortages | None:
    """The shortages in a text of Redis; None, and a line in the log, for a text that cannot be read."""
    try:
        at, found = json.loads(text)
        shortages = tuple(
            Shortage(tuple(tags), Resources(*need), Verdict(what), str(detail)) for tags, need, what, detail in found
        )
        return RecordedShortages(show_id, cluster, shortages, float(at))
    except (ValueError, TypeError) as error:  # what another version of this program wrote
        log.warning("shortages_unreadable", show=show_id, cluster=cluster, error=str(error))
        return None


def _by_layer(job_id: str, fields: Mapping[str, str]) -> dict[str, tuple[RecordedVerdict, ...]]:
    """The verdicts in the hash of a job, by layer id, those on one layer with the newest first. Fields that cannot be
    read are logged and left out."""
    found: defaultdict[str, list[RecordedVerdict]] = defaultdict(list)
    for name, text in fields.items():
        layer_id, _, cluster = name.partition(_SEPARATOR)
        try:
            what, frames, waiting, detail, at = json.loads(text)
            verdict = LayerVerdict(job_id, layer_id, Verdict(what), int(frames), int(waiting), str(detail))
            found[layer_id].append(RecordedVerdict(verdict, cluster, float(at)))
        except (ValueError, TypeError) as error:  # what another version of this program wrote
            log.warning("verdict_unreadable", job=job_id, layer=layer_id, error=str(error))
    return {layer: tuple(sorted(recorded, key=attrgetter("at"), reverse=True)) for layer, recorded in found.items()}


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
    not_booked: defaultdict[str, list[BookingRefused | BookingError]] = defaultdict(list)
    for proc in procs:
        why = refusals.get(proc.proc_id) or losses.get(proc.proc_id)
        if why is not None:
            not_booked[proc.layer.id].append(why)
    return tuple(_without(not_booked[verdict.layer_id], verdict) for verdict in verdicts)


def not_launchable(verdicts: Iterable[LayerVerdict], reasons: Mapping[str, str]) -> tuple[LayerVerdict, ...]:
    """The verdicts, with FAILED and why for the layers that cannot be launched (``reasons``: layer id -> why)."""
    return tuple(
        replace(verdict, verdict=Verdict.FAILED, frames=0, waiting=verdict.waiting + verdict.frames, detail=why)
        if (why := reasons.get(verdict.layer_id)) is not None
        else verdict
        for verdict in verdicts
    )


def _without(not_booked: Sequence[BookingRefused | BookingError], verdict: LayerVerdict) -> LayerVerdict:
    """The verdict on a layer without the frames that were not booked, for a reason each."""
    if not not_booked:
        return verdict
    refusals = [why for why in not_booked if isinstance(why, BookingRefused)]
    if refusals:
        # A verdict has one reason: the last refusal stands for all.
        said, detail = _refusal(refusals[-1])
    else:
        said = verdict.verdict
        reasons = ", ".join(sorted({why.reason for why in not_booked if isinstance(why, BookingError)}))
        detail = f"{len(not_booked)} of its frames were lost before they were booked ({reasons}); tried again"
    frames, waiting = verdict.frames - len(not_booked), verdict.waiting + len(not_booked)
    return replace(verdict, verdict=said, frames=frames, waiting=waiting, detail=detail)


def _refusal(refused: BookingRefused) -> tuple[Verdict, str]:
    """The verdict on a layer whose booking the ledger refused, and a sentence for an operator."""
    if refused.table == UNSEEDED:
        return Verdict.FAILED, f"PostgreSQL has no row with the caps of {refused.text}"
    if refused.table == ERROR:
        damaged = f"its counters in Redis are damaged, and put right by the next recompute: {refused.text}"
        return Verdict.FAILED, damaged
    over = f"over_{refused.table}"
    if over not in list(Verdict):  # the refusal of a tombstone, the only one left that is of no cap
        return Verdict.FLOWING, "its booking was taken back before it was made; tried again"
    capped = refused.table.removesuffix("_gpus")
    used = f"the counters have {refused.current:g} of {refused.limit:g} in use under the cap of its {capped}"
    return Verdict(over), used
