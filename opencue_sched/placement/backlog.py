"""The waiting layers of one process, in the order in which they are served: what a plan takes its frames from.

The backlog has PostgreSQL's layers as they were last read, less what this process has planned and booked since, as the
host cache has hosts. Reads, bookings, losses and notices arrive in any order. Where they leave a doubt, a plan may take
a frame that is gone, which the commit finds out; no cap is ever passed.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import md5
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import Any, NamedTuple

from sortedcontainers import SortedKeyList

from opencue_sched.domain.clusters import Cluster
from opencue_sched.domain.frame_needs import smallest_need
from opencue_sched.domain.hosts import Resources
from opencue_sched.domain.jobs import BadLayer, Frame, Job, Layer
from opencue_sched.domain.plans import Place, PlannedProc, Waiting
from opencue_sched.domain.shards import ALL_BUCKETS, bucket_of
from opencue_sched.domain.verdicts import LayerVerdict, Verdict
from opencue_sched.placement.policies.order import VirtualTimes

PORTION_SECONDS = 10.0
"""Longest life of a portion of frames: an older one is read again before it is used."""
FIRST_FRAMES_OF_A_PORTION = 20
"""How many frames are read of a layer that a plan comes to first: on a full farm it takes a few frames of each."""
MOST_FRAMES_OF_A_PORTION = 200
"""How many usable frames a portion has at most, so that a frame that is retried is behind no more of its layer."""
JUDGED_SECONDS = 60.0
"""How long a plan may pass over a waiting layer because nothing that stood in the layer's way has changed."""
JUDGED_PER_PLAN = 100
"""How many layers one plan looks at only because JUDGED_SECONDS are over: 20,000 layers have their turn in a minute of
busy passes."""

SET_ASIDE = ("quarantined", "starts_later", "delayed", "failed")
"""What keeps a layer from being planned for a time: the quarantine of its job, a start time to come, a delay of all its
frames, rows that make no sense."""


class _Booked(NamedTuple):
    """A frame that this process booked."""

    waited_at: float
    """The instant at which the frame was last known to wait."""
    committed_at: float
    """The instant after the commit."""


@dataclass(slots=True)
class _Entry(Waiting):
    """A waiting layer as it was last read, and what this process knows better. Under the backlog's lock."""

    version: str
    """The version of the layer's rows, as they were last read."""
    listed_at: float
    """The instant at which the read began that found the layer first: what was booked of it before is forgotten."""
    read_at: float
    """The instant at which the read of the layer began: reads that began before do not count."""
    counted_at: float = -math.inf
    """The instant at which the read began that told how many frames wait."""
    portion: list[Frame] | None = None
    """The first waiting frames, also those in flight; None where they are to be read."""
    portion_at: float = -math.inf
    """The instant at which the read of the portion began."""
    came_at: dict[str, float] = field(default_factory=dict)
    """Frames of the portion, by id: the instant of the first reading since which every portion has had the frame."""
    in_flight: dict[str, float] = field(default_factory=dict)
    """Frames that a plan took and whose outcome is not known, by id: the instant at which the frame was last known to
    wait. A later count may have been made after the commit, before the pass has told of it: then they are not in it."""
    booked: OrderedDict[str, _Booked] = field(default_factory=OrderedDict)
    """Frames that this process booked, by id, the last at the end. Kept while a portion may be used that shows them."""
    taken: dict[str, float] = field(default_factory=dict)
    """Frames of which another process has the permits, by id: the moment until which they are left to that process."""
    used_at: float = -math.inf
    """The instant at which a frame left the portion last."""
    aside: bool = False
    """Whether a time or a fault keeps the layer from being planned: `Backlog.may_start` says which."""
    stale: bool = False
    """Whether the layer must be read again before it is planned: frames of it were lost in a commit, or none is
    left."""
    back_at: float = -math.inf
    """The moment before which the layer is not planned: a Cuebot may still write a delay for its frames until then."""
    failed: str = ""
    """Why the layer's rows make no sense; looked at again when it is read again, or after JUDGED_SECONDS."""
    failed_at: float = -math.inf
    """The instant at which ``failed`` was noted."""
    judged_at: float = -math.inf
    """The moment at which a plan last looked at the layer."""

    @property
    def unplanned(self) -> int:
        # Rather too many than too few: of frames that are not there the next read of the portion says so. Copied in one
        # step, because plans ask without the lock.
        known_to_wait = list(self.in_flight.values())
        return self.frames - sum(waited_at >= self.counted_at for waited_at in known_to_wait)

    def booked_since(self, read_at: float) -> Iterator[tuple[str, _Booked]]:
        """The bookings that a read begun at ``read_at`` may not show, by frame id, the last first."""
        for frame_id, frame in reversed(self.booked.items()):
            if frame.committed_at < read_at:
                return
            yield frame_id, frame

    def booked_last(self) -> int:
        """How many frames of the layer the plan had that was booked last."""
        newest = next(reversed(self.booked.values()), None)
        return sum(1 for _ in self.booked_since(newest.committed_at)) if newest else 0

    def forget_booked(self, before: float) -> None:
        """Forget the bookings whose commit was over at an instant before ``before``."""
        while self.booked and next(iter(self.booked.values())).committed_at < before:
            self.booked.popitem(last=False)


class _Show:
    """The waiting layers of a show in one facility. Under the backlog's lock."""

    def __init__(self) -> None:
        self.entries: dict[str, _Entry] = {}
        self.by_job: defaultdict[str, dict[str, _Entry]] = defaultdict(dict)
        self.by_limit: defaultdict[str, dict[str, _Entry]] = defaultdict(dict)
        """The layers under each limit, by their ids."""
        self.job_orders: dict[str, list[_Entry]] = {}
        """Layers of a job in dispatch order, made again when they are asked for after a change."""
        self.job_least: dict[str, dict[frozenset[str], Resources]] = {}
        """The least that layers of a job with these tags need, made again as the order is."""
        self.orders: dict[str, SortedKeyList[_Entry, Any]] = {}
        """The order in which layers are served, for each shard that plans were made for."""
        self.draws: dict[str, VirtualTimes] = {}
        """The turns of the drawn part, for each shard."""
        self.tags: Counter[frozenset[str]] = Counter()
        """How many layers have each set of tags."""
        self.least: dict[frozenset[str], Resources] = {}
        """No layer with these tags needs less. May be too low after one has gone."""
        self.judged: OrderedDict[str, None] = OrderedDict()
        """Ids of layers, those that were looked at longest ago first."""
        self.aside: dict[str, _Entry] = {}
        """The layers that are ``aside``, by id."""

    def add(self, entry: _Entry) -> None:
        """Take a layer in."""
        layer_id, tags = entry.layer.id, entry.place.tags
        self.entries[layer_id] = self.by_job[entry.job.id][layer_id] = entry
        self._job_changed(entry.job.id)
        for limit_id in entry.layer.limit_ids:
            self.by_limit[limit_id][layer_id] = entry
        for order in self.orders.values():
            order.add(entry)
        self.tags[tags] += 1
        least = self.least.get(tags)
        self.least[tags] = entry.need if least is None else Resources.least((least, entry.need))
        self.judged[layer_id] = None
        self.judged.move_to_end(layer_id, last=False)

    def remove(self, entry: _Entry) -> None:
        """Take a layer out."""
        layer_id, job_id, tags = entry.layer.id, entry.job.id, entry.place.tags
        del self.entries[layer_id], self.by_job[job_id][layer_id]
        self._job_changed(job_id)
        for limit_id in entry.layer.limit_ids:
            self.by_limit[limit_id].pop(layer_id, None)
            if not self.by_limit[limit_id]:
                del self.by_limit[limit_id]
        for order in self.orders.values():
            order.remove(entry)
        self.tags[tags] -= 1
        if not self.tags[tags]:
            del self.tags[tags], self.least[tags]
        self.judged.pop(layer_id, None)
        self.aside.pop(layer_id, None)

    def _job_changed(self, job_id: str) -> None:
        self.job_orders.pop(job_id, None)
        self.job_least.pop(job_id, None)

    def least_of_job(self, job_id: str) -> dict[frozenset[str], Resources]:
        """The least that layers of the job need, by their tags."""
        found = self.job_least.get(job_id)
        if found is None:
            found = {}
            for entry in self.by_job.get(job_id, {}).values():
                least = found.get(entry.place.tags)
                found[entry.place.tags] = entry.need if least is None else Resources.least((least, entry.need))
            # A plan may ask for a job that has gone meanwhile: nobody would forget it again.
            if job_id in self.by_job:
                self.job_least[job_id] = found
        return found

    def in_order(self, job_id: str) -> list[_Entry]:
        """The layers of a job in dispatch order."""
        found = self.job_orders.get(job_id)
        if found is None:
            found = sorted(
                self.by_job.get(job_id, {}).values(), key=lambda entry: (entry.layer.dispatch_order, entry.layer.id)
            )
            if job_id in self.by_job:
                self.job_orders[job_id] = found
        return found

    def forget_job(self, job_id: str) -> None:
        """Forget a job of which no layer is left."""
        if not self.by_job[job_id]:
            del self.by_job[job_id]
            self._job_changed(job_id)
            for draw in self.draws.values():
                draw.left(job_id)

    def order(self, shard: str) -> SortedKeyList[_Entry, Any]:
        """The order in which layers are served in a shard, made when it is first asked for."""
        if shard not in self.orders:
            # Shards come and go with instances; the order of one that comes again is made again.
            self.orders = {shard: SortedKeyList(self.entries.values(), key=partial(_rank, shard))}
        return self.orders[shard]

    def draw(self, shard: str, place: float) -> VirtualTimes:
        """The draw of a shard, made when it is first asked for; ``place`` is the shard's position among all."""
        if shard not in self.draws:
            self.draws = {shard: VirtualTimes()}
        self.draws[shard].place = place
        # Passes that had begun before a job left may have come to it since.
        self.draws[shard].keep(self.by_job)
        return self.draws[shard]


_job_id = attrgetter("job.id")


def _rank(shard: str, waiting: Waiting) -> tuple[int, str, float, str, int, str]:
    """The place of a layer in its show's order. Jobs of equal priority go by age where there is one shard, and
    otherwise each shard begins with others."""
    job, layer = waiting.job, waiting.layer
    first = md5(f"{shard}{job.id}".encode(), usedforsecurity=False).hexdigest() if shard else ""
    return -job.priority, first, job.started_at, job.id, layer.dispatch_order, layer.id


_LEAST = Resources(cores=1, memory_kb=0)
"""No frame needs less."""


def _failed(bad_layer: BadLayer) -> LayerVerdict:
    return LayerVerdict(bad_layer.job_id, bad_layer.layer_id, Verdict.FAILED, 0, bad_layer.waiting, bad_layer.why)


class Backlog:
    """What waits, by show and facility. Thread-safe; ``clock`` is in seconds and never runs backwards.

    A portion of frames may be used for ``portion_seconds``: no longer than another process keeps the permit of what it
    has booked of these frames since they were read.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, portion_seconds: float = PORTION_SECONDS
    ) -> None:
        self._clock = clock
        self._portion_seconds = portion_seconds
        self._lock = threading.RLock()
        """Guards all that follows."""
        self._latest = -math.inf
        """The last ``instant``."""
        self._entries: dict[str, _Entry] = {}
        """The waiting layers, by id."""
        self._shows: defaultdict[tuple[str, str], _Show] = defaultdict(_Show)
        """The shows with waiting layers, by facility and show id."""
        self._bad: dict[str, BadLayer] = {}
        """Layers of which no entry could be made from their rows, by id."""
        self._stale: set[str] = set()
        """Ids of layers whose entries are ``stale``."""
        self._with_gpus: set[str] = set()
        """Ids of layers whose frames need GPUs."""
        self._failed: set[str] = set()
        """Ids of layers whose entries have ``failed``."""

    def __len__(self) -> int:
        """How many layers wait, as far as is known, the bad ones too."""
        return len(self._entries) + len(self._bad)

    # Reading

    def instant(self) -> float:
        """The time, later than at any call before. A caller that reads for ``apply`` asks for it before its query
        begins."""
        with self._lock:
            self._latest = max(self._clock(), math.nextafter(self._latest, math.inf))
            return self._latest

    def apply(
        self,
        rows: Iterable[tuple[Job, Layer, str]],
        *,
        read_at: float,
        gone: Collection[str] = (),
        bad: Iterable[BadLayer] = (),
    ) -> None:
        """Take over layers that were read (with the versions of their rows), and forget those that were asked for and
        not found. ``read_at`` is the ``instant`` at which the read began: what is newer here stays."""
        with self._lock:
            for job, layer, version in rows:
                self._take_over(job, layer, version, read_at)
            for bad_layer in bad:
                self._forget(bad_layer.layer_id, read_at)
                self._bad[bad_layer.layer_id] = bad_layer
            for layer_id in gone:
                self._bad.pop(layer_id, None)
                self._forget(layer_id, read_at)

    def apply_counts(self, waiting: Mapping[str, int], *, read_at: float) -> None:
        """Take over how many frames of layers (ids) wait, where nothing else of them has changed."""
        with self._lock:
            for layer_id, frames in waiting.items():
                entry = self._entries.get(layer_id)
                if entry is not None and entry.read_at <= read_at:
                    self._count(entry, frames, read_at)

    def apply_portion(
        self, layer_id: str, waiting: int, frames: Sequence[Frame], back_in: float | None, *, read_at: float
    ) -> None:
        """Take over the first waiting frames of a layer, and how many wait.

        Frames that may still get a delay are left out of ``frames``; ``back_in``: seconds until the first of them may
        be planned, None where none is left out.
        """
        with self._lock:
            entry = self._entries.get(layer_id)
            if entry is None or read_at < max(entry.listed_at, entry.portion_at):
                return
            self._count(entry, waiting, read_at)
            now = self._clock()
            entry.taken = {frame_id: until for frame_id, until in entry.taken.items() if until > now}
            booked = {frame_id for frame_id, _ in entry.booked_since(read_at)}
            usable = [frame for frame in frames if frame.id not in booked and frame.id not in entry.taken]
            # More was read because of frames that others have taken (portion_sizes). Where these are committed by
            # now, more frames are usable than a portion may have.
            entry.portion = usable[: MOST_FRAMES_OF_A_PORTION + len(entry.in_flight)]
            entry.portion_at = read_at
            for frame_id in entry.in_flight.keys() & {frame.id for frame in frames}:  # not committed when counted
                entry.in_flight[frame_id] = max(entry.in_flight[frame_id], read_at)
            entry.came_at = {frame.id: entry.came_at.get(frame.id, read_at) for frame in entry.portion}
            if not frames and back_in is not None:
                entry.back_at = now + back_in
                self._set_aside(entry)
            elif waiting <= 0:
                self._mark_stale(entry)
            elif not frames:
                self.fail(layer_id, f"its counter says that {waiting} frames wait, and none does")

    def portion_sizes(self, wanted: Iterable[Waiting]) -> dict[str, int]:
        """How many frames of each layer to read: as many usable ones as plans have in flight or the last one booked, at
        least a few; and besides as many as are in flight or taken, because the read finds those as well."""
        with self._lock:
            sizes = {}
            for waiting in wanted:
                entry = self._entries.get(waiting.layer.id)
                if entry is not None:
                    # Booked frames are not among them: a read from now on does not find them waiting.
                    unusable = len(entry.in_flight) + len(entry.taken)
                    usable = max(FIRST_FRAMES_OF_A_PORTION, len(entry.in_flight), entry.booked_last())
                    sizes[waiting.layer.id] = min(MOST_FRAMES_OF_A_PORTION, usable) + unusable
            return sizes

    def versions(self, buckets: Collection[int] = ALL_BUCKETS) -> dict[str, str]:
        """The versions of the layers here whose jobs' ids are in these buckets, the bad ones too."""
        with self._lock:
            jobs = (of_job for show in self._shows.values() for of_job in show.by_job.items())
            asked = [layers for job_id, layers in jobs if bucket_of(job_id) in buckets]
            bad = {layer.layer_id: layer.version for layer in self._bad.values() if bucket_of(layer.job_id) in buckets}
            return bad | {layer_id: entry.version for layers in asked for layer_id, entry in layers.items()}

    def stale(self) -> set[str]:
        """The ids of layers that are not planned before they have been read again."""
        with self._lock:
            return set(self._stale)

    def known(self, layer_ids: Collection[str]) -> set[str]:
        """The layers among these that wait, the bad ones too."""
        with self._lock:
            return {layer_id for layer_id in layer_ids if layer_id in self._entries or layer_id in self._bad}

    def shows_of(self, layer_ids: Collection[str]) -> set[str]:
        """The shows of these layers, without the layers that do not wait."""
        with self._lock:
            return {self._entries[layer_id].job.show_id for layer_id in layer_ids if layer_id in self._entries}

    def of_jobs(self, job_ids: Collection[str]) -> set[str]:
        """The layers here of these jobs, the bad ones too."""
        with self._lock:
            layers = {
                layer_id for show in self._shows.values() for job in job_ids for layer_id in show.by_job.get(job, ())
            }
            return layers | {bad.layer_id for bad in self._bad.values() if bad.job_id in job_ids}

    def of_shows(self, show_ids: Collection[str]) -> set[str]:
        """The layers here of these shows, the bad ones too."""
        with self._lock:
            shows = [show for (_, show_id), show in self._shows.items() if show_id in show_ids]
            layers = {layer_id for show in shows for layer_id in show.entries}
            return layers | {bad.layer_id for bad in self._bad.values() if bad.show_id in show_ids}

    # What waits

    def waiting_tags(self) -> frozenset[tuple[str, str, str]]:
        """Each tag of a waiting layer, the bad ones too, as (facility id, show id, tag)."""
        with self._lock:
            waiting = [(*place, tags) for place, show in self._shows.items() for tags in show.tags]
            waiting += [(bad.facility_id, bad.show_id, bad.tags) for bad in self._bad.values()]
            return frozenset((facility, show, tag) for facility, show, tags in waiting for tag in tags)

    def bad(self, show_id: str) -> list[LayerVerdict]:
        """The verdicts on the layers of a show whose rows make no sense."""
        with self._lock:
            found = [
                BadLayer(entry.job.id, entry.layer.id, entry.job.show_id, entry.frames, entry.failed, entry.version)
                for entry in map(self._entries.__getitem__, self._failed)
            ]
            return [_failed(bad_layer) for bad_layer in (*self._bad.values(), *found) if bad_layer.show_id == show_id]

    def work(
        self,
        clusters: Sequence[Cluster],
        *,
        own: frozenset[int],
        now: float,
        place: float = 0.0,
        left_alone: Collection[str] = (),
    ) -> BacklogWork:
        """What waits of these clusters, which are of one show, facility and shard. ``own``: buckets whose frames this
        process takes first. ``place``: of the shard among all (domain.shards.place_of). ``now``: epoch seconds of the
        database. ``left_alone``: layers that are not planned."""
        cluster = clusters[0]
        with self._lock:
            show = self._shows[cluster.facility_id, cluster.show_id]
            return BacklogWork(self, show, tuple(clusters), own, now, place, left_alone)

    def set_aside(self, now: float) -> Counter[str]:
        """How many layers are not planned for each reason in SET_ASIDE. ``now``: epoch seconds of the database."""
        with self._lock:
            found = Counter(dict.fromkeys(SET_ASIDE, 0))
            found["failed"] = len(self._bad)
            for entry in self._entries.values():
                if entry.aside and not self.may_start(entry, now):
                    found[self._why_aside(entry, now)] += 1
            return found

    def with_gpus(self, now: float) -> list[Waiting]:
        """The layers that wait for GPUs."""
        with self._lock:
            entries = [self._entries[layer_id] for layer_id in self._with_gpus]
            return [
                entry
                for entry in entries
                if entry.frames > 0 and not entry.stale and (not entry.aside or self.may_start(entry, now))
            ]

    # What becomes of plans

    def take(self, procs: Iterable[PlannedProc]) -> None:
        """Note that these frames are planned: no other plan of this process takes them until ``settle``."""
        with self._lock:
            instant = self.instant()
            for proc in procs:
                entry = self._entries.get(proc.layer.id)
                if entry is not None:
                    entry.in_flight[proc.frame.id] = instant

    def settle(
        self,
        procs: Iterable[PlannedProc],
        *,
        booked: Collection[str] = (),
        lost: Collection[str] = (),
        taken: Collection[str] = (),
    ) -> None:
        """Note what became of planned frames. ``booked``, ``lost`` and ``taken`` are ids of their procs.

        A frame is lost when its rows were not as they were read, and taken when another process was faster. The frame
        of any other proc waits as before.
        """
        with self._lock:
            instant = self.instant()
            for proc in procs:
                entry = self._entries.get(proc.layer.id)
                if entry is None:
                    continue
                waited_at = entry.in_flight.pop(proc.frame.id, entry.portion_at)
                if proc.proc_id in booked or proc.proc_id in taken:
                    if entry.portion is not None:
                        entry.portion = [frame for frame in entry.portion if frame.id != proc.frame.id]
                    if waited_at >= entry.counted_at:  # or the count may be without the frame as it is
                        entry.frames -= 1
                    entry.used_at = instant
                    if proc.proc_id in booked:
                        entry.booked.pop(proc.frame.id, None)  # of an earlier try: the last is at the end
                        entry.booked[proc.frame.id] = _Booked(waited_at, instant)
                    else:
                        entry.taken[proc.frame.id] = instant + self._portion_seconds
                    if entry.frames <= 0:
                        self._mark_stale(entry)
                elif proc.proc_id in lost:
                    self._mark_stale(entry)

    def fail(self, layer_id: str, why: str) -> None:
        """Set a layer aside because its rows make no sense, and nothing of it can be started."""
        with self._lock:
            entry = self._entries.get(layer_id)
            if entry is not None:
                entry.failed, entry.failed_at = why, self._clock()
                self._failed.add(layer_id)
                self._set_aside(entry)

    def judged(self, layer_ids: Iterable[str]) -> None:
        """Note that a plan has looked at these layers."""
        with self._lock:
            now = self._clock()
            for layer_id in layer_ids:
                entry = self._entries.get(layer_id)
                if entry is not None:
                    entry.judged_at = now
                    self._show_of(entry).judged.move_to_end(layer_id)

    def look_again(self, layer_ids: Iterable[str]) -> None:
        """Have the next plan look at these layers, whatever was found a moment ago."""
        with self._lock:
            for layer_id in layer_ids:
                entry = self._entries.get(layer_id)
                if entry is not None:
                    entry.judged_at = -math.inf
                    self._show_of(entry).judged.move_to_end(layer_id, last=False)

    # Inside; under the lock

    def _show_of(self, entry: _Entry) -> _Show:
        return self._shows[entry.job.facility_id, entry.job.show_id]

    def _take_over(self, job: Job, layer: Layer, version: str, read_at: float) -> None:
        """Take over one layer, as a read that began at ``read_at`` found it, with the ``version`` of its rows.

        A new layer gets an entry. For a known one, job, layer, need and place are replaced, and a delay and a failure
        that were noted are forgotten: may_start() judges the new rows. What plans took and booked of the layer stays
        noted. An entry that was read later stays as it is. The entry leaves its show and joins it again, because what
        the show sorts and indexes layers by may have changed.
        """
        entry = self._entries.get(layer.id)
        self._bad.pop(layer.id, None)
        need, place = smallest_need(layer), Place(layer.tags, job.os_name, layer.threadable)
        if entry is None:
            entry = _Entry(job, layer, layer.waiting_frames, need, place, version, read_at, read_at)
            self._entries[layer.id] = entry
            self._show_of(entry).add(entry)
        elif read_at < entry.read_at:
            return
        else:
            before, before_job = self._show_of(entry), entry.job.id
            before.remove(entry)
            if entry.stale and read_at >= entry.counted_at:
                entry.portion, entry.stale = None, False
                self._stale.discard(layer.id)
            entry.job, entry.layer, entry.need, entry.place, entry.version = job, layer, need, place, version
            entry.failed, entry.back_at = "", -math.inf
            self._failed.discard(layer.id)
            self._show_of(entry).add(entry)
            before.forget_job(before_job)
        entry.read_at = read_at
        entry.aside = False
        if job.quarantined_until is not None or layer.starts_at is not None:
            self._set_aside(entry)
        self._count(entry, layer.waiting_frames, read_at)
        if need.gpus or need.gpu_memory_kb:
            self._with_gpus.add(layer.id)
        else:
            self._with_gpus.discard(layer.id)

    def _count(self, entry: _Entry, waiting: int, read_at: float) -> None:
        """Take over how many frames wait, less those booked that the read cannot know of."""
        entry.forget_booked(min(read_at, self._clock() - self._portion_seconds))
        if read_at < entry.counted_at:
            return  # a portion that comes late: what was counted since knows better
        entry.frames = waiting - sum(frame.waited_at >= read_at for _, frame in entry.booked_since(read_at))
        entry.counted_at = read_at

    def _forget(self, layer_id: str, read_at: float) -> None:
        """Drop a layer that a read which began at ``read_at`` did not find, or whose rows it found to make no sense."""
        entry = self._entries.get(layer_id)
        if entry is None or read_at < entry.read_at or any(entry.booked_since(read_at)):
            return
        show = self._show_of(entry)
        show.remove(entry)
        show.forget_job(entry.job.id)
        del self._entries[layer_id]
        self._stale.discard(layer_id)
        self._with_gpus.discard(layer_id)
        self._failed.discard(layer_id)

    def _set_aside(self, entry: _Entry) -> None:
        entry.aside = True
        self._show_of(entry).aside[entry.layer.id] = entry

    def _mark_stale(self, entry: _Entry) -> None:
        entry.stale = True
        self._stale.add(entry.layer.id)

    def may_start(self, entry: _Entry, now: float) -> bool:
        """Whether a layer that is set ``aside`` may be planned: its time has come, and its fault is to be looked at
        again. ``now``: epoch seconds of the database."""
        job, layer, clock = entry.job, entry.layer, self._clock()
        return (
            (job.quarantined_until is None or job.quarantined_until <= now)
            and (layer.starts_at is None or layer.starts_at <= now)
            and entry.back_at <= clock
            and (not entry.failed or clock - entry.failed_at >= JUDGED_SECONDS)
        )

    def _why_aside(self, entry: _Entry, now: float) -> str:
        """The reason, the first in the order of SET_ASIDE, for which a layer that may not start is not planned."""
        if entry.job.quarantined_until is not None and entry.job.quarantined_until > now:
            return "quarantined"
        if entry.layer.starts_at is not None and entry.layer.starts_at > now:
            return "starts_later"
        return "delayed" if entry.back_at > self._clock() else "failed"


class BacklogWork:
    """What waits of some clusters of one show and shard, for one pass: the planner's ``Work``."""

    def __init__(
        self,
        backlog: Backlog,
        show: _Show,
        clusters: tuple[Cluster, ...],
        own: frozenset[int],
        now: float,
        place: float,
        left_alone: Collection[str],
    ) -> None:
        self._backlog = backlog
        self._show = show
        self._clusters = clusters
        self._tags = frozenset(tag for cluster in clusters for tag in cluster.tags)
        self._own = own
        self._now = now
        self._left_alone = left_alone
        self._order = list(show.order(clusters[0].shard))
        self._draw = show.draw(clusters[0].shard, place)

    @property
    def clusters(self) -> Sequence[Cluster]:
        return self._clusters

    @property
    def draw(self) -> VirtualTimes:
        return self._draw

    def __iter__(self) -> Iterator[Waiting]:
        return self._open(self._order)

    def in_order(self, may_start: Callable[[str], bool]) -> Iterator[Waiting]:
        by_job = groupby(self._order, key=_job_id)
        return self._open(chain.from_iterable(entries for job_id, entries in by_job if may_start(job_id)))

    def _open(self, entries: Iterable[_Entry]) -> Iterator[Waiting]:
        """The layers among ``entries`` that a plan may take frames of, in the order given."""
        # Called for each waiting layer of a show: what decides mostly comes first, and nothing is called for it.
        reached, left_alone = frozenset(self.tags()), self._left_alone
        for entry in entries:
            if (
                entry.frames > 0
                and (not entry.in_flight or entry.unplanned > 0)
                and not entry.stale
                and entry.place.tags in reached
                and (not entry.aside or self._backlog.may_start(entry, self._now))
                and (not left_alone or entry.layer.id not in left_alone)
            ):
                yield entry

    def of_job(self, job_id: str) -> Iterator[Waiting]:
        with self._backlog._lock:
            entries = self._show.in_order(job_id)
        return filter(self._is_open, entries)

    def under_limit(self, limit_id: str) -> Iterator[Waiting]:
        with self._backlog._lock:
            entries = list(self._show.by_limit.get(limit_id, {}).values())
        return filter(self._is_open, entries)

    def least_of_job(self, job_id: str) -> Iterable[tuple[frozenset[str], Resources]]:
        with self._backlog._lock:
            of_job = self._show.least_of_job(job_id)
        return of_job.items()

    def priorities(self) -> Mapping[str, int]:
        with self._backlog._lock:
            return {job_id: next(iter(of.values())).job.priority for job_id, of in self._show.by_job.items()}

    def tags(self) -> Iterable[frozenset[str]]:
        with self._backlog._lock:
            return [tags for tags in self._show.tags if not tags.isdisjoint(self._tags)]

    def waits(self, cluster: Cluster) -> bool:
        """Whether a layer with a tag of the cluster waits for anything else than a time to come."""
        with self._backlog._lock:
            if all(tags.isdisjoint(cluster.tags) for tags in self._show.tags):
                return False
        return any(
            entry.frames > 0 and not entry.place.tags.isdisjoint(cluster.tags) and not self._lies_ahead(entry)
            for entry in self._order
        )

    def _lies_ahead(self, entry: _Entry) -> bool:
        """Whether a quarantine or a start that lies ahead keeps a layer waiting."""
        times = entry.job.quarantined_until, entry.layer.starts_at
        return entry.aside and any(at is not None and at > self._now for at in times)

    def first_jobs(self, most: int) -> list[Job]:
        """The first ``most`` jobs in the order of rank that have frames to plan; fewer where there are no more."""
        jobs: dict[str, Job] = {}
        for waiting in self if most > 0 else ():
            jobs[waiting.job.id] = waiting.job
            if len(jobs) >= most:
                break
        return list(jobs.values())

    def starts_in(self, cluster: Cluster) -> float | None:
        """Seconds until the first of the cluster's layers that are set aside for a time may start; None without one."""
        clock = self._backlog._clock()
        with self._backlog._lock:
            aside = list(self._show.aside.values())
        mine = (entry for entry in aside if entry.frames > 0 and not entry.place.tags.isdisjoint(cluster.tags))
        return min((wait for entry in mine if (wait := self._starts_in(entry, clock)) > 0), default=None)

    def _starts_in(self, entry: _Entry, clock: float) -> float:
        """Seconds until the times that keep a layer from being planned are over; 0 or less where they are."""
        times = entry.job.quarantined_until, entry.layer.starts_at
        return max([entry.back_at - clock, *(at - self._now for at in times if at is not None)])

    def least_need(self, tags: Iterable[str]) -> Resources:
        wanted = frozenset(tags)
        with self._backlog._lock:
            needs = [need for of, need in self._show.least.items() if not of.isdisjoint(wanted)]
        if not needs:  # another thread may have forgotten the last of these layers since the plan came to it
            return _LEAST
        # Asked for each set of tags that a plan comes to, so it makes one object and not one for each of the needs.
        return Resources.least(needs)

    def portion(self, layer: Layer) -> Sequence[Frame] | None:
        with self._backlog._lock:
            entry = self._backlog._entries.get(layer.id)
            if entry is None:
                return ()
            if not self._is_read(entry):
                return None
            frames = [frame for frame in entry.portion or () if frame.id not in entry.in_flight]
            came_at, portion_at = entry.came_at, entry.portion_at
        if len(self._own) == len(ALL_BUCKETS):
            return frames
        mine, left, others = list[Frame](), list[Frame](), list[Frame]()
        for frame in frames:
            if bucket_of(frame.id) in self._own:
                mine.append(frame)
            else:
                (left if came_at[frame.id] < portion_at else others).append(frame)
        # The owners of all other frames begin with the first, so this process takes them from the last on. But frames
        # that their owners have left since an earlier portion come from the first on: or frames read later would be
        # started before them for ever.
        return mine + left + others[::-1]

    def has_portion(self, layer: Layer) -> bool:
        with self._backlog._lock:
            entry = self._backlog._entries.get(layer.id)
            return entry is None or self._is_read(entry)

    def _is_read(self, entry: _Entry) -> bool:
        """Whether the portion may be used: it is not too old, and not used up where more frames wait."""
        if entry.portion is None or self._backlog._clock() - entry.portion_at > self._backlog._portion_seconds:
            return False
        if entry.portion_at >= entry.used_at or entry.unplanned <= 0:
            return True
        return not all(frame.id in entry.in_flight for frame in entry.portion)

    def to_judge(self) -> Iterable[Waiting]:
        backlog = self._backlog
        with backlog._lock:
            oldest = backlog._clock() - JUDGED_SECONDS
            found = []
            for layer_id in islice(self._show.judged, JUDGED_PER_PLAN):
                entry = self._show.entries[layer_id]
                if entry.judged_at > oldest:
                    break
                found.append(entry)
        return list(filter(self._is_open, found))

    def _is_open(self, entry: _Entry) -> bool:
        """Whether a plan may take frames of the layer; ``_open`` asks the same of many."""
        return (
            entry.unplanned > 0
            and not entry.stale
            and not entry.place.tags.isdisjoint(self._tags)
            and (not entry.aside or self._backlog.may_start(entry, self._now))
            and entry.layer.id not in self._left_alone
        )
