"""Whether other hosts of a farm that is divided may take frames that failed on some, and what it costs to know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, text

from opencue_sched.coordination.change_log import BacklogChanges
from opencue_sched.dispatch.backlog_feed import BacklogFeed
from opencue_sched.dispatch.other_hosts import KINDS_SECONDS
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.domain.jobs import Frame
from opencue_sched.domain.shards import ALL_BUCKETS
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, JobIds, JobSpec, LayerSpec
from opencue_sched.settings import Settings
from opencue_sched.store.backlog import fetch_portions
from opencue_sched.store.reservations import fetch_host_kinds
from opencue_sched.store.schema import check_schema
from tests.kit.frozen_clock import Clock
from tests.kit.gathering import counted_statements
from tests.kit.statements import counted_rows


class OneOfTwo:
    """The backlog of a worker that shares the hosts of a farm with another one."""

    def __init__(self, engine: Engine, settings: Settings, client: redis.Redis) -> None:
        self.engine, self.clock = engine, Clock()
        with engine.begin() as connection:
            facts = check_schema(connection)
            (row,) = connection.execute(text("SELECT DISTINCT pk_facility, pk_show FROM job"))
        self.cluster = Cluster(row.pk_facility, row.pk_show, ClusterKind.MANUAL, ("general",))
        changes = BacklogChanges(client, "cue")
        self.feed = BacklogFeed(engine, settings, lambda: facts, changes, divided=lambda: True, clock=self.clock)
        self.feed.follow()

    def read(self) -> list[Frame]:
        """The first frames of all layers, read now."""
        work = self.feed.backlog.work([self.cluster], own=ALL_BUCKETS, now=self.feed.now())
        layers = list(work)
        self.feed.read_portions(layers)
        return [frame for waiting in layers for frame in work.portion(waiting.layer) or ()]

    def statements(self) -> int:
        """How many statements are sent for that."""
        with counted_statements(self.engine) as sent:
            self.read()
        return len(sent)


def fail(engine: Engine, jobs: Sequence[JobIds], host: str) -> None:
    """All frames of these jobs failed on the host."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO opencue_sched_failed_run (pk_frame, str_host, pk_layer, pk_job, int_exit_status)"
                " SELECT pk_frame, :host, pk_layer, pk_job, 1 FROM frame WHERE pk_job = ANY(:jobs)"
            ),
            {"host": host, "jobs": [job.id for job in jobs]},
        )


@pytest.mark.parametrize(
    ("other", "layer", "others"),
    [
        ({}, {}, True),
        ({"cores": 1}, {}, False),
        ({"memory_gb": 1}, {}, False),
        ({"lock": "LOCKED"}, {}, False),
        ({"state": "DOWN"}, {}, False),
        ({"ping_age": 100_000}, {}, False),
        ({"alloc_tag": False, "tags": ("far",)}, {}, False),
        ({"thread_mode": 1}, {"threadable": False}, False),
        ({"thread_mode": 1}, {"threadable": True}, True),
        ({"os": "windows"}, {}, False),
        ({"gpus": 0}, {"gpus": 1, "gpu_memory_gb": 1}, False),
    ],
    ids=str,
)
def test_another_host_counts_where_a_plan_could_give_it_the_frame(
    engine: Engine,
    settings: Settings,
    redis_client: redis.Redis,
    other: dict[str, Any],
    layer: dict[str, Any],
    others: bool,
) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        job = farm.job([LayerSpec(frames=1, **{"cores": 2, "memory_gb": 2} | layer)], os="rhel9")
        farm.host(name="broken", gpus=1, gpu_memory_gb=8, os="rhel9")
        farm.host(**{"os": "rhel9", "gpus": 1, "gpu_memory_gb": 8} | other)
    fail(engine, [job], "broken")
    found = OneOfTwo(engine, settings, redis_client).read()
    assert [(frame.failed_on, frame.others) for frame in found] == [(("broken",), others)]


def test_a_frame_that_asks_for_more_than_its_layer_needs_a_host_that_has_it(
    engine: Engine, settings: Settings, redis_client: redis.Redis
) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        job = farm.job([LayerSpec(frames=2, memory_gb=2)])
        farm.host(name="broken", memory_gb=64)
        farm.host(memory_gb=8)
        connection.execute(
            text("INSERT INTO opencue_sched_frame_memory (pk_frame, pk_layer, memory_kb) VALUES (:f, :l, 16777216)"),
            {"f": job.frames[0], "l": job.layers[0].id},
        )
    fail(engine, [job], "broken")
    found = {frame.id: frame.others for frame in OneOfTwo(engine, settings, redis_client).read()}
    assert found == {job.frames[0]: False, job.frames[1]: True}


def test_a_host_counts_without_the_cores_that_are_locked_on_it(
    engine: Engine, settings: Settings, redis_client: redis.Redis
) -> None:
    # Given two hosts that are alike but for what is locked on one
    with engine.begin() as connection:
        farm = Farm(connection)
        job = farm.job([LayerSpec(frames=1, cores=4)])
        broken, other = sorted(farm.hosts([HostSpec(cores=8) for _ in range(2)]), key=lambda host: host.id)
        connection.execute(
            text("INSERT INTO opencue_sched_locked_cores (pk_host, centicores) VALUES (:host, 600)"), {"host": other.id}
        )
    # When the frame failed on the other one
    fail(engine, [job], broken.name)
    # Then it has nowhere else to go
    assert [frame.others for frame in OneOfTwo(engine, settings, redis_client).read()] == [False]


def test_a_host_counts_by_no_tag_that_is_ignored(engine: Engine, settings: Settings, redis_client: redis.Redis) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        job = farm.job([LayerSpec(frames=1, tags="general | Far")])
        farm.host(name="broken")
        farm.host(alloc_tag=False, tags=("far",))
    fail(engine, [job], "broken")
    found = []
    for ignored in ((), ("far",)):
        scheduler = settings.scheduler.model_copy(update={"ignore_tags": ignored})
        worker = OneOfTwo(engine, settings.model_copy(update={"scheduler": scheduler}), redis_client)
        found += [frame.others for frame in worker.read()]
    assert found == [True, False]


@pytest.fixture
def jobs(engine: Engine) -> list[JobIds]:
    """Ten jobs with twenty frames that only one host is large enough for, and 300 hosts that are not."""
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(name="broken", cores=64, hostname_tag=False)
        farm.hosts([HostSpec(cores=2, hostname_tag=False) for _ in range(300)])
        jobs = farm.jobs([JobSpec([LayerSpec(frames=20, cores=32)]) for _ in range(10)])
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE"))
    return jobs


def test_hosts_are_read_once_however_many_frames_and_layers_failed(
    engine: Engine, settings: Settings, redis_client: redis.Redis, jobs: list[JobIds]
) -> None:
    # Given a worker that has read the frames before any failed
    worker = OneOfTwo(engine, settings, redis_client)
    worker.read()
    sound = worker.statements()
    # When all have failed on the only host that is large enough
    fail(engine, jobs, "broken")
    first, again = worker.statements(), worker.statements()
    worker.clock.advance(KINDS_SECONDS)
    later = worker.statements()
    # Then the kinds of hosts are read, and one host of each, and not again while they are believed
    assert [first, again, later] == [sound + 2, sound, sound + 2]
    assert {(frame.failed_on, frame.others) for frame in worker.read()} == {(("broken",), False)}


def test_what_failed_frames_cost_does_not_grow_with_frames_times_hosts(engine: Engine, jobs: list[JobIds]) -> None:
    wanted = {layer.id: 20 for job in jobs for layer in job.layers}
    read = []
    # Given frames that did not fail, and the same when all have failed
    for failed in (False, True):
        if failed:
            fail(engine, jobs, "broken")
        with engine.begin() as connection:
            before = counted_rows(connection)
            fetch_portions(connection, check_schema(connection), wanted)
            read.append(counted_rows(connection) - before)
    with engine.begin() as connection:
        before = counted_rows(connection)
        kinds = fetch_host_kinds(connection, None, ["general"], 3600)
        looked_at = counted_rows(connection) - before
    # Then a failure costs its own row, and the kinds of hosts a few rows of each host
    assert read[1] - read[0] <= 3 * 200
    assert sorted(kinds.values()) == [1, 300]
    assert looked_at <= 10 * 301
