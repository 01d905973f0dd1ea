"""Policies that choose hosts, through whole passes on PostgreSQL, each beside the same farm without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, text

from opencue_sched.dispatch.clusters import load_clusters
from opencue_sched.dispatch.report import PassReport
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobIds, LayerSpec
from opencue_sched.settings import Rqd, Settings
from tests.kit.passes import Passes, passes


@contextmanager
def site(engine: Engine, settings: Settings, **queue: Any) -> Iterator[Passes]:
    changed = {"rqd": Rqd(dry_run_mode=True), "queue": settings.queue.model_copy(update=queue)}
    with passes(engine, settings.model_copy(update=changed)) as found:
        yield found


def execute(engine: Engine, sql: str, **values: Any) -> None:
    with engine.begin() as connection:
        connection.execute(text(sql), values)


def running(engine: Engine) -> Counter[tuple[str, str]]:
    """Frames by job and host, by name."""
    with engine.connect() as connection:
        rows = connection.execute(
            text(
                "SELECT job.str_name, host.str_name, count(*) FROM proc JOIN job USING (pk_job) "
                "JOIN host USING (pk_host) GROUP BY 1, 2"
            )
        )
        return Counter({(row[0], row[1]): row[2] for row in rows})


def verdicts(reports: list[PassReport]) -> Counter[Verdict]:
    return Counter(verdict.verdict for report in reports for verdict in report.verdicts)


class TestLayerShare:
    def farm(self, engine: Engine, *jobs: dict[str, Any]) -> None:
        with engine.begin() as connection:
            farm = Farm(connection)
            farm.host(name="h", cores=16, memory_gb=64)
            for job in jobs:
                farm.job([LayerSpec(frames=job.pop("frames"))], **job)

    @pytest.mark.parametrize(("on", "expected"), [(True, {"first": 12, "second": 4}), (False, {"first": 16})])
    def test_a_layer_leaves_room_on_a_host_that_others_want(
        self, engine: Engine, settings: Settings, on: bool, expected: dict[str, int]
    ) -> None:
        self.farm(
            engine, {"name": "first", "priority": 200, "frames": 16}, {"name": "second", "priority": 1, "frames": 4}
        )

        with site(engine, settings, layer_host_share=on) as found:
            found.drain()

        assert running(engine) == {(job, "h"): frames for job, frames in expected.items()}

    def test_a_layer_that_nobody_shares_the_host_with_takes_all_of_it(self, engine: Engine, settings: Settings) -> None:
        self.farm(engine, {"name": "alone", "frames": 16})

        with site(engine, settings) as found:
            found.drain()

        assert running(engine) == {("alone", "h"): 16}


class TestLocality:
    def farm(self, engine: Engine) -> JobIds:
        """A job that runs on a large host, with frames that wait; a small host would fit best."""
        with engine.begin() as connection:
            farm = Farm(connection)
            farm.host(name="fits", cores=4)
            large = farm.host(name="knows", cores=16, memory_gb=64)
            job = farm.job([LayerSpec(frames=4)], name="job")
            farm.run(job.layers[0].frames[:2], large)
        return job

    @pytest.mark.parametrize(("on", "host"), [(True, "knows"), (False, "fits")])
    def test_a_layer_goes_to_the_host_that_runs_it(
        self, engine: Engine, settings: Settings, on: bool, host: str
    ) -> None:
        self.farm(engine)
        before = running(engine)

        with site(engine, settings, locality=on) as found:
            found.drain()

        assert running(engine) - before == {("job", host): 2}

    @pytest.mark.parametrize(("on", "host"), [(True, "knows"), (False, "fits")])
    def test_a_layer_goes_to_the_host_that_ran_it_last(
        self, engine: Engine, settings: Settings, on: bool, host: str
    ) -> None:
        # given a worker that saw the host run it
        self.farm(engine)
        with site(engine, settings, locality=on) as found:
            found.runner.hosts.follow()
            with engine.connect() as connection:
                clusters = load_clusters(connection, settings)
            for cluster in clusters:
                found.runner.hosts.refresh(cluster)

            # when those frames have ended
            execute(engine, "DELETE FROM proc")
            execute(engine, "UPDATE host SET int_cores_idle = int_cores, int_mem_idle = int_mem")
            execute(engine, "UPDATE frame SET str_state = 'SUCCEEDED' WHERE str_state = 'RUNNING'")
            with engine.connect() as connection:
                ids = connection.execute(text("SELECT pk_host FROM host")).scalars().all()
            found.runner.hosts.changed(ids)
            found.drain()

        assert running(engine) == {("job", host): 2}

    def test_a_host_without_room_is_no_better_for_it(self, engine: Engine, settings: Settings) -> None:
        self.farm(engine)
        execute(engine, "UPDATE host SET int_cores_idle = 50 WHERE str_name = 'knows'")

        with site(engine, settings) as found:
            found.drain()

        assert running(engine)["job", "fits"] == 2


class TestScore:
    @pytest.mark.parametrize(("score", "host"), [("convex", "idle"), ("strategy", "half full")])
    def test_the_setting_decides_which_host_a_frame_goes_to(
        self, engine: Engine, settings: Settings, score: str, host: str
    ) -> None:
        with engine.begin() as connection:
            farm = Farm(connection)
            farm.host(name="half full", cores=8, idle_cores=4, memory_gb=32, idle_memory_gb=16)
            farm.host(name="idle", cores=8, memory_gb=32)
            farm.job([LayerSpec(frames=1)], name="job")

        with site(engine, settings, host_score=score) as found:
            found.drain()

        assert running(engine) == {("job", host): 1}


class TestGpuGuard:
    def farm(self, engine: Engine, *, cores: int = 12, gpu_frames: int = 2) -> JobIds:
        """A flood without GPUs before frames that need a GPU and four cores each, and a host with two GPUs."""
        with engine.begin() as connection:
            farm = Farm(connection)
            farm.host(name="gpus", cores=cores, memory_gb=64, gpus=2, gpu_memory_gb=16)
            farm.job([LayerSpec(frames=20, threadable=False)], name="flood", priority=200)
            wanted = LayerSpec(frames=gpu_frames, cores=4, gpus=1, gpu_memory_gb=1)
            return farm.job([wanted], name="wants gpus", priority=1)

    @pytest.mark.parametrize(("on", "expected"), [(True, {"flood": 4, "wants gpus": 2}), (False, {"flood": 12})])
    def test_frames_that_need_gpus_find_cores_beside_them(
        self, engine: Engine, settings: Settings, on: bool, expected: dict[str, int]
    ) -> None:
        self.farm(engine)

        # though a pass looks at one job, and the flood comes first
        with site(engine, settings, gpu_guard=on, max_jobs_per_cluster_pass=1) as found:
            reports = found.drain()

        assert running(engine) == {(job, "gpus"): frames for job, frames in expected.items()}
        assert (verdicts(reports)[Verdict.KEPT_FOR_GPUS] > 0) == on

    def test_nothing_is_kept_for_frames_that_cannot_run(self, engine: Engine, settings: Settings) -> None:
        job = self.farm(engine)
        execute(engine, "UPDATE job SET b_paused = true WHERE pk_job = :job", job=job.id)

        with site(engine, settings) as found:
            found.drain()

        assert running(engine) == {("flood", "gpus"): 12}

    def test_a_farm_without_gpus_keeps_nothing_for_them(self, engine: Engine, settings: Settings) -> None:
        self.farm(engine)
        execute(engine, "UPDATE host SET int_gpus = 0, int_gpus_idle = 0, int_gpu_mem = 0, int_gpu_mem_idle = 0")

        with site(engine, settings) as found:
            found.drain()

        assert running(engine) == {("flood", "gpus"): 12}
