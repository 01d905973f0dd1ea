"""A pass killed after each single thing it does that others can see, and what follows at once and later.

Two clusters share a layer of FRAMES frames. The host of the first has room for FEWER of them, the show's burst is just
enough for all. Who dies leaves the permits of the frames that it planned until the commit's deadline. The pass that
dies is one over the first cluster, in a process of its own (see stepped_pass.py); then the second cluster has its turn,
or the first again, in the hands of another worker. Hosts are real gRPC servers.

In the second test a message comes for one of three clusters, and what dies has claimed them all; what is due after a
while is all that another worker hears of.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from sqlalchemy import text

from opencue_sched.accounting import keys
from opencue_sched.accounting.recompute import recompute
from opencue_sched.clients.lua_scripts import load_script
from opencue_sched.coordination.keys import BoardKeys, frame_permit
from opencue_sched.coordination.postings import (
    ClaimRefused,
    ClaimRenewer,
    ClusterPostings,
    Enqueued,
    encode_cluster,
    with_messages,
)
from opencue_sched.dispatch.dispatcher import Dispatcher
from opencue_sched.dispatch.report import PassReport
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.embedded.rqds.simulated_rqd import SimulatedFarm, host_specs
from opencue_sched.insight.audit import run_audit
from opencue_sched.placement.backlog import PORTION_SECONDS
from opencue_sched.settings import Rqd
from tests.chaos.forker import Forker, forker
from tests.chaos.stepped_pass import CLAIM_SECONDS, COMMIT, LAUNCH, SEND
from tests.chaos.wire import SCRIPTS
from tests.kit.passes import Passes, passes

FRAMES, FEWER = 5, 3
FIRST_VERSION = 0
"""Of a frame that was never started."""
SCENES_AT_MOST = 100
PATIENT = {"commit_deadline": 100.0}
PLACES = ("first", "second", "third")
CLUSTERS = BoardKeys("cue", "clusters")
TAKE, BOOK = "permits_take", "book"
CLAIM, CLAIM_WITH, END = "board_claim", "board_claim_with", "board_end"


@dataclass
class Scene:
    """A show of its own with a layer that two clusters share; ``done`` is what the pass that died had done."""

    first: Cluster
    second: Cluster
    layer: str
    done: list[str] = field(default_factory=list)

    @property
    def committed(self) -> int:
        return FEWER if COMMIT in self.done else 0


@dataclass
class JointScene:
    """A show of its own with a layer and a host in each of three clusters, all posted, and one message for them."""

    message: Enqueued
    postings: list[str]
    clusters: list[Cluster]
    layers: list[str]
    done: list[str] = field(default_factory=list)


@dataclass
class Stage:
    """Where scenes are played: the stores, the hosts, another worker, and who forks the passes that die."""

    worker: Passes
    dispatcher: Dispatcher
    rqds: SimulatedFarm
    passes_that_die: Forker
    launch_last: bool
    passed: float = 0.0
    """Seconds by which the backlog's clock of the other worker is ahead."""
    scenes: list[Scene] = field(default_factory=list)
    joint_scenes: list[JointScene] = field(default_factory=list)

    def scene(self) -> Scene:
        number = len(self.scenes)
        with self.worker.engine.begin() as connection:
            farm = Farm(connection)
            show, alloc, tag = farm.show(f"s{number}"), farm.alloc(f"t{number}"), f"m{number}"
            farm.subscription(show, alloc, size=FRAMES)
            fields = {"alloc": alloc, "hostname_tag": False}
            farm.host(name=f"first{number}", cores=FEWER, tags=[tag], alloc_tag=False, **fields)
            farm.host(name=f"second{number}", cores=2 * FRAMES, **fields)
            layer = LayerSpec(frames=FRAMES, tags=f"{tag} | {alloc.tag}")
            job = farm.job([layer], show=show, name=f"j{number}", os=None)
            facility = farm.facility()
        first = Cluster(facility, show.id, ClusterKind.MANUAL, (tag,))
        second = Cluster(facility, show.id, ClusterKind.ALLOC, (alloc.tag,), alloc.id)
        self.scenes.append(Scene(first, second, job.layers[0].id))
        return self.scenes[-1]

    def joint_scene(self) -> JointScene:
        number = len(self.joint_scenes)
        with self.worker.engine.begin() as connection:
            farm = Farm(connection)
            show, alloc = farm.show(f"s{number}"), farm.alloc(f"t{number}")
            # What who died has booked and not committed stays counted for a while: there is room for all beside it.
            farm.subscription(show, alloc, size=2 * len(PLACES) * FEWER)
            tags = [f"{place}-{number}" for place in PLACES]
            for place, tag in zip(PLACES, tags, strict=True):
                fields = {"alloc": alloc, "hostname_tag": False, "alloc_tag": False}
                farm.host(name=f"{place}{number}", cores=FEWER, tags=[tag], **fields)
            jobs = [farm.job([LayerSpec(frames=FEWER, tags=tag)], show=show, name=f"j{tag}", os=None) for tag in tags]
            facility = farm.facility()
        clusters = [Cluster(facility, show.id, ClusterKind.MANUAL, (tag,)) for tag in tags]
        posted = self.dispatcher.postings.enqueue(clusters)
        (message,) = with_messages(posted)
        scene = JointScene(message, [it.uuid for it in posted], clusters, [job.layers[0].id for job in jobs])
        self.joint_scenes.append(scene)
        self.scenes += [Scene(it, it, layer) for it, layer in zip(clusters, scene.layers, strict=True)]
        return scene

    def dies(self, scene: Scene, after: int) -> None:
        """Let a pass over the scene's first cluster do so many things; all if 0."""
        scene.done = self._dies(after, cluster=encode_cluster(scene.first))

    def dies_together(self, scene: JointScene, after: int, most_frames: int) -> None:
        """Let who got the scene's message do so many things, with a plan of so many frames at most."""
        scene.done = self._dies(after, posting=scene.message.uuid, ticket=scene.message.ticket, most_frames=most_frames)

    def _dies(self, after: int, **what: Any) -> list[str]:
        answer = self.passes_that_die.forks(die_after=after, launch_last=self.launch_last, **what)
        assert answer["status"] == (-9 if after else 0), answer
        return list(answer["done"])

    def deaths(self, whole: list[str], last: int, *, differs: str | None = None) -> range:
        """After how many things a pass is to die, of those that a whole one does. Before the commit, those that launch
        last do what those do that launch first, and these do what others do before the first thing that ``differs``:
        they begin to die at the last thing before it."""
        first = COMMIT if self.launch_last else differs
        return range(whole.index(first) if first else 1, last + 1)

    def goes_on(self, scene: JointScene) -> Counter[Cluster]:
        """Another worker sends what is due, round by round, until the scene is over, once the permits of who died are
        over. How many passes each cluster had."""
        for part in self.scenes[-len(PLACES) :]:
            self.permits_run_out(part)
        had: Counter[Cluster] = Counter()
        while messages := self.messages_due(scene):
            for message in messages:
                answer = self.dispatcher.dispatch(message.uuid, message.ticket)
                assert not isinstance(answer, ClaimRefused), answer
                assert not any(report.losses for report in answer)
                had.update(report.cluster for report in answer)
        self.dispatcher.postings.withdraw(scene.postings)
        return had

    def messages_due(self, scene: JointScene) -> list[Enqueued]:
        """When claims of those who died have run out, and what they sent or did not send was not taken for a while."""
        client, now_ms = self.worker.client, 1000 * self.worker.client.time()[0]
        for uuid in scene.postings:
            for index in (CLUSTERS.of("claimed"), CLUSTERS.of("awaited")):
                due_ms = client.zscore(index, uuid)
                assert due_ms is None or due_ms <= now_ms + 1000 * (CLAIM_SECONDS + 1), "not for ever"
                client.zadd(index, {uuid: 1}, xx=True)
        return with_messages(self.dispatcher.postings.take_due()[0])

    def passes_over(self, cluster: Cluster) -> PassReport:
        """One pass of another worker, which loses nothing that it plans."""
        report = self.worker.runner.run([cluster], alive=lambda: True)[0]
        assert not report.losses
        return report

    def procs(self, scene: Scene) -> list[str]:
        """The frames that have a proc."""
        with self.worker.engine.connect() as connection:
            query = text("SELECT pk_frame FROM proc JOIN frame USING (pk_frame) WHERE frame.pk_layer = :layer")
            return list(connection.execute(query, {"layer": scene.layer}).scalars())

    def booked(self, scene: Scene) -> int:
        """Cores of the show on the counters: what is committed, and what somebody may still commit."""
        subscription = keys.subscription(scene.second.show_id, str(scene.second.alloc_id))
        return int(self.worker.client.hget(subscription, "int_cores") or 0)

    def permits(self, scene: Scene) -> list[str]:
        """The permits that somebody has of frames of the scene, as they were before they were started."""
        with self.worker.engine.connect() as connection:
            query = text("SELECT pk_frame FROM frame WHERE pk_layer = :layer")
            frames = connection.execute(query, {"layer": scene.layer}).scalars().all()
        keys_of_frames = [frame_permit("cue", frame, FIRST_VERSION) for frame in frames]
        return [key for key in keys_of_frames if self.worker.client.exists(key)]

    def permits_run_out(self, scene: Scene) -> None:
        """As if it had had them for as long as they live, and the others had left them to it."""
        self.passed += PORTION_SECONDS + 1
        for key in self.permits(scene):
            self.worker.client.delete(key)


@pytest.fixture(params=[False, True], ids=["launches-first", "launches-last"])
def stage(request, engine, settings, database_url, redis_server, redis_client) -> Iterator[Stage]:
    stages: list[Stage] = []
    for name in SCRIPTS.values():
        redis_client.script_load(load_script(name).text)
    with SimulatedFarm(host_specs(len(PLACES), cores=1000)) as rqds:
        rqds.behave(nameless=True)  # each stands for the hosts of all scenes
        served = dict(zip(PLACES, rqds.addresses.values(), strict=True))
        addresses = {f"{name}{number}": at for number in range(SCENES_AT_MOST) for name, at in served.items()}
        environment = {
            "OPENCUE_SCHED_DATABASE_URL": database_url,
            "OPENCUE_SCHED_REDIS_URL": redis_server.url,
            "OPENCUE_SCHED_RQD__ADDRESSES": json.dumps(addresses),
            **{f"OPENCUE_SCHED_ACCOUNTING__{name.upper()}": str(seconds) for name, seconds in PATIENT.items()},
        }
        patient = settings.accounting.model_copy(update=PATIENT)
        ours = settings.model_copy(update={"rqd": Rqd(addresses=addresses), "accounting": patient})
        with (
            forker("stepped_pass", environment) as passes_that_die,
            passes(engine, ours, clock=lambda: time.monotonic() + sum(stage.passed for stage in stages)) as worker,
        ):
            postings = ClusterPostings(worker.client, CLUSTERS)
            renewer = ClaimRenewer(postings, ttl_seconds=CLAIM_SECONDS)
            dispatcher = Dispatcher(ours, postings, renewer, worker.runner, "another", lambda _: None, lambda _: None)
            stages.append(Stage(worker, dispatcher, rqds, passes_that_die, request.param))
            yield stages[0]
            renewer.stop()


def test_nothing_is_lost_or_booked_twice_wherever_a_pass_dies(stage):
    whole = stage.scene()
    stage.dies(whole, 0)
    assert_in_order(whole.done, launch_last=stage.launch_last)
    assert (stage.booked(whole), len(stage.procs(whole))) == (FEWER, FEWER)

    last = whole.done.index(LAUNCH) + 1
    deaths = [(after, another_cluster_follows) for after in stage.deaths(whole.done, last)]
    deaths += [(after, the_same_cluster_follows) for after, _ in deaths if whole.done[after - 1] != whole.done[after]]
    for after, follows in deaths:
        scene = stage.scene()
        stage.dies(scene, after)
        assert scene.done == whole.done[:after], "each pass does the same"
        assert_left_behind(stage, scene)
        follows(stage, scene)
        assert len(stage.procs(scene)) <= FRAMES
        assert stage.booked(scene) <= FRAMES

    forget_bookings_of_the_dead(stage)
    for scene in stage.scenes:
        for cluster in (scene.first, scene.second):
            stage.passes_over(cluster)
        assert len(stage.procs(scene)) == len({*stage.procs(scene)}) == FRAMES == stage.booked(scene)
    assert_each_frame_ran_once(stage)
    report = run_audit(stage.worker.engine, stage.worker.client, stage.worker.settings)
    assert not report.failed, "\n".join(report.lines())
    deadline = stage.worker.settings.accounting.commit_deadline
    left = [stage.worker.client.ttl(key) for key in stage.worker.client.scan_iter("cue:permit:*")]
    assert all(0 < seconds <= deadline for seconds in left), "no permit is there for long"


@pytest.mark.long(35)
@pytest.mark.parametrize("full", [False, True], ids=["all-fits", "plan-full"])
def test_every_cluster_of_a_joint_pass_comes_back_by_itself_wherever_it_dies(stage, full):
    # given what one message leads to: the claims, one pass, the ends of the claims, one message if there is more to do
    whole = stage.joint_scene()
    planned = len(PLACES) * FEWER - full
    stage.dies_together(whole, 0, planned)
    of_claims = [what for what in whole.done if what in (CLAIM, CLAIM_WITH, COMMIT, LAUNCH, END, SEND)]
    ended = [*[END] * len(PLACES), *([SEND] if full else [])]
    then = (
        [*ended, COMMIT, LAUNCH] if full else [COMMIT, *([*ended, LAUNCH] if stage.launch_last else [LAUNCH, *ended])]
    )
    assert of_claims == [CLAIM, CLAIM_WITH, *then]
    stage.goes_on(whole)

    # A full plan ends the claims before its commit; until then it does what one does that fits.
    for after in stage.deaths(whole.done, len(whole.done), differs=END if full else None):
        # when it dies after each single thing
        scene = stage.joint_scene()
        stage.dies_together(scene, after, planned)
        assert scene.done == whole.done[:after], "each does the same"
        had = stage.goes_on(scene)
        # then each cluster has a pass again, with nobody to tell of it, but for those that may rest because their pass
        # placed all it could and ended, and all that can be booked is
        rest = 0 if full else scene.done.count(END)
        assert had.keys() <= {*scene.clusters}, scene.done
        assert len(had) == len(scene.clusters) - rest, scene.done
        for part in stage.scenes[-len(PLACES) :]:
            assert len(stage.procs(part)) == FEWER, scene.done

    forget_bookings_of_the_dead(stage)
    for joint, first in zip(stage.joint_scenes, range(0, len(stage.scenes), len(PLACES)), strict=True):
        times = Counter(frame for scene in stage.scenes[first : first + len(PLACES)] for frame in ran(stage, scene))
        # Hosts do not report what was committed and not sent, by which it waits again (release).
        never = planned if COMMIT in joint.done and LAUNCH not in joint.done else 0
        run = len(PLACES) * FEWER - never
        assert (len(times), set(times.values())) == (run, {1} if run else set()), joint.done
    report = run_audit(stage.worker.engine, stage.worker.client, stage.worker.settings)
    assert not report.failed, "\n".join(report.lines())


def assert_in_order(done: list[str], *, launch_last: bool) -> None:
    """What a pass does by which others go: have the permits, book, commit, and launch as soon as it has committed."""
    assert [done.count(what) for what in (TAKE, COMMIT, LAUNCH)] == [1, 1, 1]
    after = [done.index(what) for what in (TAKE, BOOK, COMMIT, LAUNCH, "reconcile")]
    assert after == sorted(after)
    assert done.count(BOOK) >= FEWER
    assert launch_last or done.index(LAUNCH) == done.index(COMMIT) + 1


def assert_left_behind(stage: Stage, scene: Scene) -> None:
    """By who died: permits for a while, what it committed, what it launched."""
    left, deadline = stage.permits(scene), stage.worker.settings.accounting.commit_deadline
    assert len(left) == FEWER
    assert all(0 < stage.worker.client.ttl(key) <= deadline for key in left)
    assert len(stage.procs(scene)) == scene.committed
    assert len(ran(stage, scene)) == (FEWER if LAUNCH in scene.done else 0)


def another_cluster_follows(stage: Stage, scene: Scene) -> None:
    """It has the other frames at once, and those of the dead when their permits are over; of what may still be
    committed it takes nothing."""
    room = FRAMES - stage.booked(scene)
    at_once = min(room, FRAMES - FEWER)
    assert stage.passes_over(scene.second).frames_booked == at_once
    stage.permits_run_out(scene)
    assert stage.passes_over(scene.second).frames_booked == room - at_once


def the_same_cluster_follows(stage: Stage, scene: Scene) -> None:
    """It has what fits its host of the other frames, and the other cluster has the rest."""
    room = FRAMES - stage.booked(scene)
    on_its_host = min(FEWER - scene.committed, room, FRAMES - FEWER)
    assert stage.passes_over(scene.first).frames_booked == on_its_host
    stage.permits_run_out(scene)
    assert stage.passes_over(scene.second).frames_booked == room - on_its_host


def forget_bookings_of_the_dead(stage: Stage) -> None:
    """They are too old by both clocks: Redis' and that of who looks."""
    client, now = stage.worker.client, 1000.0
    ledger, age = stage.worker.runner.ledger, stage.worker.settings.accounting.in_flight_age
    recompute(stage.worker.engine, ledger, age_seconds=age, clock=lambda: now)
    for record in ledger.records():
        parts = str(client.hget(keys.LEDGER, record.proc_id)).split("|", 3)
        parts[2] = str(int(parts[2]) - round(age) - 1)
        client.hset(keys.LEDGER, record.proc_id, "|".join(parts))
    now += age + 1
    report = recompute(stage.worker.engine, ledger, age_seconds=age, clock=lambda: now)
    assert report.causes["crashed_booking"] > 0


def ran(stage: Stage, scene: Scene) -> list[str]:
    """The frames that its hosts were sent, as often as they were."""
    with stage.worker.engine.connect() as connection:
        query = text("SELECT pk_frame FROM frame WHERE pk_layer = :layer")
        frames = set(connection.execute(query, {"layer": scene.layer}).scalars())
    return [run.frame_id for run in stage.rqds.runs() if run.frame_id in frames]


def assert_each_frame_ran_once(stage: Stage) -> None:
    """But those that were committed and not sent: hosts do not report them, by which they wait again (release)."""
    for scene in stage.scenes:
        times = Counter(ran(stage, scene))
        never = FEWER if scene.committed and LAUNCH not in scene.done else 0
        assert (len(times), set(times.values())) == (FRAMES - never, {1})
