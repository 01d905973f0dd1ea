"""The backlog: whatever the order of reads, bookings, losses, notices and resyncs, nothing is planned twice, nothing
that waits is forgotten, and the order is that of the policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from opencue_sched.domain.jobs import Frame, Job, Layer
from opencue_sched.domain.plans import PlannedProc
from opencue_sched.domain.shards import ALL_BUCKETS
from opencue_sched.placement.backlog import JUDGED_SECONDS, PORTION_SECONDS, Backlog, BacklogWork
from tests.kit.examples import examples
from tests.kit.frozen_clock import Clock
from tests.unit.placement.known_backlog import CLUSTER, proc, waiting_job, waiting_layer

JOB_OF = {"l1": "a", "l2": "a", "l3": "b"}
"""The job of each layer that there may be."""
FRAMES = range(2)
"""The numbers of the frames of each layer."""
STARTS_LATER_SECONDS, QUARANTINE_SECONDS, DELAY_SECONDS = 20.0, 30.0, 2.0
"""None of these is longer than JUDGED_SECONDS."""


@dataclass
class JobRow:
    """A job as PostgreSQL has it."""

    priority: int = 1
    started_at: float = 0.0
    quarantined_until: float = 0.0
    version: int = 0


@dataclass
class LayerRow:
    """A layer as PostgreSQL has it."""

    dispatch_order: int = 0
    starts_at: float = 0.0
    waiting: dict[int, int] = field(default_factory=dict)
    """How often each frame that waits was started."""
    version: int = 0


class Read(NamedTuple):
    """What a read finds of a layer that waits."""

    job: Job
    layer: Layer
    version: str
    frames: tuple[Frame, ...]


class Interleaved(RuleBasedStateMachine):
    """One process against a database that others change. Reads may end long after they began, those of layers one after
    the other, as by the feed."""

    layer_ids = st.sampled_from(sorted(JOB_OF))

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.backlog = Backlog(self.clock)
        self.jobs = {job_id: JobRow() for job_id in JOB_OF.values()}
        self.layers = {layer_id: LayerRow(waiting=dict.fromkeys(FRAMES, 0)) for layer_id in JOB_OF}
        self.reads_of_layers: list[tuple[float, dict[str, Read]]] = []
        self.reads_of_portions: list[tuple[float, dict[str, Read]]] = []
        self.planned: dict[str, list[PlannedProc]] = {}
        self.started: set[tuple[str, int | None]] = set()
        """Frames that this process booked, with their versions."""
        self.kept_until: dict[str, float] = {}
        """Until when what was found of a layer's frames may keep it waiting."""

    def work(self) -> BacklogWork:
        return self.backlog.work([CLUSTER], own=ALL_BUCKETS, now=self.clock.now)

    def order(self) -> list[str]:
        return [waiting.layer.id for waiting in self.work()]

    def what_waits(self) -> dict[str, Read]:
        """What a read that begins now will find, by layer."""
        found = {}
        for layer_id, row in self.layers.items():
            job = self.jobs[JOB_OF[layer_id]]
            until, starts_at = job.quarantined_until, row.starts_at
            ahead = {
                "quarantined_until": until if until > self.clock.now else None,
                "priority": job.priority,
                "started_at": job.started_at,
            }
            if row.waiting:
                found[layer_id] = Read(
                    waiting_job(JOB_OF[layer_id], **ahead),
                    waiting_layer(
                        layer_id,
                        waiting=len(row.waiting),
                        dispatch_order=row.dispatch_order,
                        starts_at=starts_at if starts_at > self.clock.now else None,
                    ),
                    f"{job.version}:{row.version}",
                    tuple(
                        Frame(f"{layer_id}-f{number}", str(number), number, version)
                        for number, version in sorted(row.waiting.items())
                    ),
                )
        return found

    @initialize()
    def everything_is_read(self) -> None:
        self.layers_are_read()
        self.portions_are_read()

    @rule(
        layer_id=layer_ids,
        priority=st.integers(1, 3),
        started_at=st.sampled_from([1.0, 2.0]),
        dispatch_order=st.integers(1, 2),
        ahead=st.sampled_from([(0.0, 0.0)] * 4 + [(STARTS_LATER_SECONDS, 0.0), (0.0, QUARANTINE_SECONDS)]),
    )
    def changed(
        self, layer_id: str, priority: int, started_at: float, dispatch_order: int, ahead: tuple[float, float]
    ) -> None:
        job, row, (starts_in, quarantine) = self.jobs[JOB_OF[layer_id]], self.layers[layer_id], ahead
        job.priority, job.started_at, job.version = priority, started_at, job.version + 1
        row.dispatch_order, row.version = dispatch_order, row.version + 1
        row.starts_at = self.clock.now + starts_in if starts_in else 0.0
        job.quarantined_until = self.clock.now + quarantine if quarantine else 0.0

    @rule(layer_id=layer_ids, number=st.sampled_from(FRAMES))
    def booked_by_others(self, layer_id: str, number: int) -> None:
        self.layers[layer_id].waiting.pop(number, None)

    @rule(layer_id=layer_ids, number=st.sampled_from(FRAMES))
    def retried(self, layer_id: str, number: int) -> None:
        row = self.layers[layer_id]
        started = [version or 0 for frame_id, version in self.started if frame_id == f"{layer_id}-f{number}"]
        if number not in row.waiting and not self.planned.get(layer_id):
            row.waiting[number] = max(started, default=0) + 1

    @rule(seconds=st.sampled_from([1.0, 1.0, PORTION_SECONDS + 1]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def a_read_of_layers_begins(self) -> None:
        self.reads_of_layers.append((self.backlog.instant(), self.what_waits()))

    @precondition(lambda self: self.reads_of_layers)
    @rule()
    def a_read_of_layers_ends(self) -> None:
        read_at, found = self.reads_of_layers.pop(0)
        self.backlog.apply(
            [read[:3] for read in found.values()], gone=self.layers.keys() - found.keys(), read_at=read_at
        )

    @rule()
    def layers_are_read(self) -> None:
        self.a_read_of_layers_begins()
        while self.reads_of_layers:
            self.a_read_of_layers_ends()

    @rule()
    def a_read_of_portions_begins(self) -> None:
        self.reads_of_portions.append((self.backlog.instant(), self.what_waits()))

    @precondition(lambda self: self.reads_of_portions)
    @rule(which=st.integers(0, 3), most=st.integers(1, len(FRAMES)))
    def a_read_of_portions_ends(self, which: int, most: int = len(FRAMES)) -> None:
        read_at, reads = self.reads_of_portions.pop(which % len(self.reads_of_portions))
        for layer_id, read in reads.items():
            self.backlog.apply_portion(layer_id, len(read.frames), read.frames[:most], None, read_at=read_at)

    @rule()
    def portions_are_read(self) -> None:
        self.a_read_of_portions_begins()
        self.a_read_of_portions_ends(len(self.reads_of_portions) - 1)

    @rule(layer_id=layer_ids, back_in=st.sampled_from([DELAY_SECONDS, None]))
    def a_portion_has_no_frame(self, layer_id: str, back_in: float | None) -> None:
        """All its frames may still get a delay, or the layer's counter is wrong."""
        if waiting := len(self.layers[layer_id].waiting):
            self.backlog.apply_portion(layer_id, waiting, (), back_in, read_at=self.backlog.instant())
            self.kept_until[layer_id] = self.clock.now + JUDGED_SECONDS

    @rule(data=st.data())
    def a_plan_takes_frames(self, data: st.DataObject) -> None:
        for waiting in self.work():
            portion = self.work().portion(waiting.layer)
            if portion:
                frames = data.draw(st.lists(st.sampled_from(list(portion)), min_size=1, unique=True))
                of_layer = self.planned.setdefault(waiting.layer.id, [])
                assert {frame.id for frame in frames}.isdisjoint(planned.frame.id for planned in of_layer), "twice"
                assert self.started.isdisjoint((frame.id, frame.version) for frame in frames), "booked already"
                taken = [proc(waiting.layer, frame, waiting.job) for frame in frames]
                self.backlog.take(taken)
                of_layer += taken

    @rule()
    def plans_are_committed(self) -> None:
        for layer_id in list(self.planned):
            procs, row, booked = self.planned.pop(layer_id), self.layers[layer_id], set()
            for planned in procs:
                frame = planned.frame
                if row.waiting.get(frame.number) == frame.version:
                    booked.add(planned.proc_id)
                    self.started.add((frame.id, frame.version))
                    del row.waiting[frame.number]
            self.backlog.settle(procs, booked=booked, lost={planned.proc_id for planned in procs} - booked)

    @rule(data=st.data(), portions=st.booleans(), early=st.booleans())
    def a_pass_is_made_while_a_read_is_under_way(self, data: st.DataObject, portions: bool, early: bool) -> None:
        """The read begins before the plan or before the commit, and another one of portions may overtake it."""
        begins = self.a_read_of_portions_begins if portions else self.a_read_of_layers_begins
        if early:
            begins()
        self.a_plan_takes_frames(data)
        if not early:
            begins()
        self.plans_are_committed()
        if data.draw(st.booleans()):
            self.portions_are_read()
        if portions:
            self.a_read_of_portions_ends(len(self.reads_of_portions) - 1)
        while self.reads_of_layers:
            self.a_read_of_layers_ends()

    @rule(layer_id=layer_ids)
    def another_process_has_the_permits(self, layer_id: str) -> None:
        procs = self.planned.pop(layer_id, [])
        self.backlog.settle(procs, taken={planned.proc_id for planned in procs})

    @rule()
    def a_round_of_the_resync_finds_all_that_waits(self) -> None:
        # when plans and reads of layers have ended, and what differs by its version or is in doubt is read
        self.plans_are_committed()
        while self.reads_of_layers:
            self.a_read_of_layers_ends()
        read_at, found, known = self.backlog.instant(), self.what_waits(), self.backlog.versions()
        differ = {layer_id for layer_id, read in found.items() if known.get(layer_id) != read.version}
        differ |= known.keys() - found.keys()
        counts = {layer_id: len(read.frames) for layer_id, read in found.items() if layer_id not in differ}
        self.backlog.apply_counts(counts, read_at=read_at)
        named = differ | self.backlog.stale()
        self.backlog.apply(
            [read[:3] for layer_id, read in found.items() if layer_id in named],
            gone=named - found.keys(),
            read_at=self.backlog.instant(),
        )

        # then all that waits is there and nothing else, and what is not planned has something in its way
        assert self.backlog.versions().keys() == found.keys()
        wanted = sorted(found, key=self.rank)
        assert self.order() == [layer_id for layer_id in wanted if layer_id in self.order()]
        for layer_id in found:
            job, row = self.jobs[JOB_OF[layer_id]], self.layers[layer_id]
            ahead = max(job.quarantined_until, row.starts_at)
            if layer_id in self.order():
                assert ahead <= self.clock.now
            else:
                assert max(ahead, self.kept_until.get(layer_id, 0.0)) > self.clock.now

        # and when that has gone, which nobody tells, each waits in its place with all its frames
        self.clock.now += JUDGED_SECONDS
        assert self.order() == wanted
        for layer_id, read in found.items():
            self.backlog.apply_portion(layer_id, len(read.frames), read.frames, None, read_at=self.backlog.instant())
            assert self.work().portion(read.layer) == list(read.frames)

    def rank(self, layer_id: str) -> tuple[int, float, str, int, str]:
        """The place of a layer by the policy: the priority and the age of its job, then its dispatch order."""
        job, row = self.jobs[JOB_OF[layer_id]], self.layers[layer_id]
        return -job.priority, job.started_at, JOB_OF[layer_id], row.dispatch_order, layer_id

    @invariant()
    def a_walk_that_passes_by_a_job_meets_the_layers_of_all_others(self) -> None:
        work = self.work()
        everything = list(work)
        for left_out in {waiting.job.id for waiting in everything}:
            others = [waiting for waiting in everything if waiting.job.id != left_out]
            assert list(work.in_order(lambda job_id, but=left_out: job_id != but)) == others

    @invariant()
    def the_least_of_a_job_is_no_more_than_any_of_its_layers_needs(self) -> None:
        work = self.work()
        for waiting in work:
            least = dict(work.least_of_job(waiting.job.id))[waiting.layer.tags]
            assert waiting.need.covers(least)

    @invariant()
    def no_count_is_below_nothing_for_a_layer_that_is_planned(self) -> None:
        assert all(waiting.frames > 0 for waiting in self.work())


TestInterleaved = Interleaved.TestCase
TestInterleaved.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
