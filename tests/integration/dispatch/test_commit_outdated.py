"""A plan made from what was known a while ago: what it rests on is read again by the commit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from sqlalchemy import Engine, text

from opencue_sched.accounting import keys
from opencue_sched.dispatch.commit import CommitResult
from opencue_sched.domain.plans import PlannedProc
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, LayerSpec
from opencue_sched.insight.audit import run_audit
from opencue_sched.settings import Rqd, Settings
from tests.kit.passes import passes
from tests.kit.plans import KB_PER_GB, assert_consistent, commit, plan
from tests.kit.wording import lacks

RESERVED_KB = 2 * KB_PER_GB


@dataclass
class Planned:
    """Two frames of a layer that changes before the commit, then two of another job's that stays as it is; and the
    names that statements have for what there is."""

    procs: list[PlannedProc]
    ids: dict[str, object]
    engine: Engine
    settings: Settings

    def commit_after(self, change: str) -> CommitResult:
        """What becomes of the plan when this was changed after it was made."""
        with self.engine.begin() as connection:
            connection.execute(text(change), {name: value for name, value in self.ids.items() if f":{name}" in change})
        result = commit(self.engine, self.procs, self.settings)
        assert_consistent(self.engine)
        return result


@pytest.fixture
def planned(engine: Engine, settings: Settings) -> Planned:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.hosts([HostSpec(cores=16, gpus=4, gpu_memory_gb=8) for _ in range(2)])
        licence, other = farm.limit("licence", 10), farm.limit("other", 10)
        wants = {"cores_max": 4, "gpus": 1, "gpu_memory_gb": 1, "tags": "general | fast", "limits": [licence]}
        changing = farm.job([LayerSpec(name="changing", frames=2, memory_gb=2, **wants)], priority=200)
        farm.job([LayerSpec(name="steady", frames=2, memory_gb=2)])
        procs = plan(farm, settings, memory_kb=RESERVED_KB)
        ids: dict[str, object] = {
            "layer": changing.layers[0].id,
            "job": changing.id,
            "frame": procs[0].frame.id,
            "licence": licence,
            "other": other,
            "folder": farm.folder(farm.default_show(), "elsewhere"),
            "dept": farm.dept("Lighting"),
            "reserved_kb": RESERVED_KB,
        }
    assert [proc.layer.name for proc in procs] == ["changing"] * 2 + ["steady"] * 2
    return Planned(procs, ids, engine, settings)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("UPDATE layer SET int_cores_min = 200 WHERE pk_layer = :layer", ["minimum", "cores"]),
        ("UPDATE layer SET int_cores_max = 100 WHERE pk_layer = :layer", ["maximum", "cores"]),
        ("UPDATE layer SET int_gpus_min = 2 WHERE pk_layer = :layer", ["GPUs"]),
        ("UPDATE layer SET int_gpu_mem_min = 9 WHERE pk_layer = :layer", ["GPU", "memory"]),
        ("UPDATE layer SET str_tags = 'general' WHERE pk_layer = :layer", ["tags"]),
        ("UPDATE layer SET b_threadable = false WHERE pk_layer = :layer", ["threads"]),
        ("UPDATE job SET str_os = 'windows' WHERE pk_job = :job", ["OS"]),
        ("UPDATE job SET str_os = NULL WHERE pk_job = :job", ["OS"]),
        ("UPDATE job SET pk_folder = :folder WHERE pk_job = :job", ["folder"]),
        ("UPDATE job SET pk_dept = :dept WHERE pk_job = :job", ["department"]),
        ("INSERT INTO layer_limit VALUES ('new', :layer, :other)", ["limits"]),
        ("DELETE FROM layer_limit WHERE pk_layer = :layer", ["limits"]),
        ("UPDATE layer_limit SET pk_limit_record = :other WHERE pk_layer = :layer", ["limits"]),
        (
            "INSERT INTO opencue_sched_quarantine (pk_job, reason, until)"
            " VALUES (:job, 'bad rows', now() + interval '1 minute')",
            ["quarantined"],
        ),
        (
            "UPDATE layer SET int_mem_min = :reserved_kb + 1 WHERE pk_layer = :layer",
            [f"{RESERVED_KB + 1} KB", str(RESERVED_KB)],
        ),
        (
            "UPDATE layer SET int_cores_min = 200, int_gpus_min = 2 WHERE pk_layer = :layer",
            ["minimum", "cores", "GPUs"],
        ),
    ],
)
def test_frames_of_a_layer_that_changed_since_it_was_planned_are_lost(
    planned: Planned, change: str, words: list[str]
) -> None:
    result = planned.commit_after(change)

    assert [proc.layer.name for proc in result.committed] == ["steady"] * 2
    assert [(proc.layer.name, error.reason, error.retriable) for proc, error in result.lost] == [
        ("changing", "layer_changed", False)
    ] * 2
    assert not any(lacks(str(error), *words) for _, error in result.lost)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE layer SET int_mem_min = :reserved_kb - 1 WHERE pk_layer = :layer",
        "UPDATE layer SET str_tags = 'fast|general' WHERE pk_layer = :layer",
        "UPDATE layer SET str_cmd = 'another', int_chunk_size = 7 WHERE pk_layer = :layer",
        "INSERT INTO layer_limit VALUES ('again', :layer, :licence) ON CONFLICT DO NOTHING",
        "INSERT INTO layer_limit VALUES ('dangling', :layer, 'no-such-limit')",
        "DELETE FROM limit_record WHERE pk_limit_record = :licence",
        "INSERT INTO opencue_sched_quarantine (pk_job, reason, until) VALUES (:job, 'bad rows', now())",
        "INSERT INTO opencue_sched_frame_memory VALUES (:frame, :layer, :reserved_kb)",
        "UPDATE job SET str_user = 'another', int_uid = 7 WHERE pk_job = :job",
    ],
)
def test_what_makes_no_difference_to_the_plan_loses_nothing(planned: Planned, change: str) -> None:
    result = planned.commit_after(change)

    assert result.lost == []
    assert len(result.committed) == 4


def test_a_frame_that_asks_for_more_than_was_planned_for_it_is_lost_alone(planned: Planned) -> None:
    result = planned.commit_after("INSERT INTO opencue_sched_frame_memory VALUES (:frame, :layer, :reserved_kb + 1)")

    assert [(proc.proc_id, error.reason) for proc, error in result.lost] == [
        (planned.procs[0].proc_id, "layer_changed")
    ]
    assert len(result.committed) == 3


def test_an_empty_os_is_none(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        farm.job(os=None)
        procs = plan(farm, settings)
        connection.execute(text("UPDATE job SET str_os = ''"))

    assert commit(engine, procs, settings).lost == []


def test_a_licence_that_a_layer_got_since_it_was_planned_is_not_passed(engine: Engine, settings: Settings) -> None:
    """Nothing is counted of what a pass loses so, nothing runs, and the next pass books it under the licence."""
    dry = settings.model_copy(update={"rqd": Rqd(dry_run_mode=True)})
    with passes(engine, dry) as one:
        with engine.begin() as connection:
            farm = Farm(connection)
            farm.host(cores=16)
            job = farm.job([LayerSpec(frames=6)])
            link = {"layer": job.layers[0].id, "licence": farm.limit("licence", 2)}
        (cluster,) = [cluster for cluster, _ in one.sweeper.sweep().send]

        def counted() -> int:
            return int(one.client.hget(keys.job(job.id), "int_cores") or 0)

        def add_licence_once_booked() -> bool:
            if counted() == 6:
                with engine.begin() as connection:
                    connection.execute(text("INSERT INTO layer_limit VALUES ('link', :layer, :licence)"), link)
            return True

        # given a licence for two frames that its layer gets between the booking and the commit
        (report,) = one.runner.run([cluster], alive=add_licence_once_booked)
        # then the commit loses all six, and nothing is counted
        assert (report.frames_booked, report.losses) == (0, {"layer_changed": 6})
        assert counted() == 0
        assert not run_audit(engine, one.client, dry).failed
        # and the next pass knows of the licence
        (report,) = one.runner.run([cluster], alive=lambda: True)
        assert report.frames_booked == 2
        assert not run_audit(engine, one.client, dry).failed
