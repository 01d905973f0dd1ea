"""`opencue-sched folder`: folders, their caps, and jobs that move."""

from __future__ import annotations

import json
import select
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine

from opencue_sched.domain.invariants import Invariant
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobIds, LayerSpec, ShowIds
from opencue_sched.store.audit import judge
from tests.kit.command import Cli
from tests.kit.wording import lacks

Build = Callable[[Callable[[Farm], Any]], Any]
Rows = Callable[..., list[Any]]


@pytest.fixture
def demo(build: Build) -> ShowIds:
    return build(lambda farm: farm.show("demo"))


@pytest.fixture
def job(build: Build, demo: ShowIds) -> JobIds:
    """A job in the root folder with two frames of four cores running."""

    def make(farm: Farm) -> JobIds:
        farm.subscription(demo, farm.alloc("general"), size=100)
        made = farm.job([LayerSpec(frames=5, cores=4)], show=demo, name="demo-s-u_job", priority=7, max_cores=50)
        farm.run(made.frames[:2], farm.host(cores=16), cores=4)
        return made

    made: JobIds = build(make)
    return made


def test_folders_are_created_capped_and_listed(cli: Cli, demo: ShowIds, rows: Rows) -> None:
    ran = cli("folder", "create", "demo", "lighting", "--max-cores", "200", "--min-cores", "10", "--json")
    assert ran.status == 0, ran.err
    assert (ran.json["folder"], ran.json["parent"], ran.json["max_cores"]) == ("lighting", "demo", 200)
    made = cli("folder", "create", "demo", "hair", "--parent", "lighting")
    assert made.words[1][:3] == ["demo", "hair", "lighting"]
    capped = cli("folder", "caps", "demo", "lighting", "--max-gpus", "4", "--max-cores", "100", "--json").json
    assert (capped["max_cores"], capped["min_cores"], capped["max_gpus"]) == (100, 10, 4)
    stored = (
        "SELECT str_name, int_level, r.int_min_cores, r.int_max_cores, r.int_max_gpus FROM folder"
        " JOIN folder_resource r USING (pk_folder) JOIN folder_level USING (pk_folder) ORDER BY int_level"
    )
    assert [tuple(row) for row in rows(stored)] == [
        ("demo", 0, 0, -1, -1),
        ("lighting", 1, 1000, 10000, 4),
        ("hair", 2, 0, -1, -1),
    ]
    listed = cli("folder", "list", "demo", "--json").json
    assert [(row["folder"], row["parent"]) for row in listed] == [
        ("demo", None),
        ("lighting", "demo"),
        ("hair", "lighting"),
    ]
    assert cli("folder", "caps", "demo", "lighting", "--max-cores", "-1", "--max-gpus", "0").status == 0
    assert rows("SELECT int_max_cores, int_max_gpus FROM folder_resource WHERE int_min_cores > 0") == [(-1, -1)]


def test_a_cap_below_what_is_used_is_taken_and_told_to_the_workers(
    cli: Cli, demo: ShowIds, job: JobIds, engine: Engine
) -> None:
    # given somebody who listens as workers do
    with engine.connect() as connection:
        raw: Any = connection.connection.driver_connection
        raw.set_session(autocommit=True)
        raw.cursor().execute("LISTEN opencue_sched_caps")
        # when the root folder, in which 8 cores are used, is capped
        ran = cli("folder", "caps", "demo", "demo", "--max-cores", "4", "--json")
        # then it is so, and the workers are told
        assert (ran.status, ran.json["folder"], ran.json["max_cores"]) == (0, "demo", 4)
        assert select.select([raw], [], [], 10)[0]
        raw.poll()
        (notice,) = raw.notifies
        assert json.loads(notice.payload)["vertices"] == [f"folder:{demo.folder_id}"]


def test_a_job_moves_with_what_it_uses_and_takes_what_the_folder_says(
    cli: Cli, demo: ShowIds, job: JobIds, build: Build, rows: Rows, engine: Engine
) -> None:
    # given a folder of another department that gives its jobs a priority
    lighting = build(lambda farm: farm.folder(demo, "lighting", parent=demo.folder_id, dept_id=farm.dept("Lighting")))
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE folder SET int_job_priority = 90 WHERE str_name = 'lighting'")
        connection.exec_driver_sql("UPDATE job_resource SET int_cores = 800")
        connection.exec_driver_sql("UPDATE folder_resource SET int_cores = 800 WHERE pk_folder = %s", (demo.folder_id,))
    # when a job moves there
    ran = cli("folder", "move", job.name, "lighting", "--json")
    assert (ran.status, ran.json) == (0, {"show": "demo", "folder": "lighting", "jobs": [job.name]})
    # then folder, department, priority and what is used are the new one's
    (row,) = rows("SELECT pk_folder, dept.str_name AS dept FROM job JOIN dept ON dept.pk_dept = job.pk_dept")
    assert tuple(row) == (lighting, "Lighting")
    assert rows("SELECT int_priority, int_max_cores FROM job_resource") == [(90, 5000)]
    assert rows("SELECT int_cores FROM folder_resource WHERE pk_folder = :id", id=lighting) == [(800,)]
    assert rows("SELECT int_cores FROM folder_resource WHERE pk_folder = :id", id=demo.folder_id) == [(0,)]
    assert rows("SELECT count(*) FROM point JOIN dept USING (pk_dept) WHERE str_name = 'Lighting'") == [(1,)]
    assert [row["used_cores"] for row in cli("folder", "list", "--json").json] == [0, 8]
    with engine.connect() as connection:
        assert judge(connection, Invariant.LAYER_COUNTERS_MATCH_FRAMES).wrong == 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("create", "demo", "demo x"), ["'demo x'"]),
        (("create", "demmo", "x"), ["'demmo'", "'demo'"]),
        (
            ("create", "demo", "x", "--parent", "lightning"),
            ["'lightning'", "'lighting'"],
        ),
        (("create", "demo", "lighting"), ["'lighting'", "`folder caps`"]),
        (("caps", "demo", "lighting"), ["--max-cores"]),
        (("caps", "demo", "lighting", "--max-cores", "0.5"), ["core"]),
        (("caps", "demo", "twin", "--max-cores", "5"), ["'twin'"]),
        (("move", "demo-s-u_job", "other-s-u_job", "lighting"), ["shows"]),
        (("move", "demo-s-u_job", "theirs"), ["'theirs'", "`folder list demo`"]),
    ],
)
def test_what_is_wrong_is_said(
    cli: Cli, demo: ShowIds, job: JobIds, build: Build, words: tuple[str, ...], problem: list[str]
) -> None:
    def make(farm: Farm) -> None:
        lighting = farm.folder(demo, "lighting", parent=demo.folder_id)
        for parent in (lighting, demo.folder_id):
            farm.folder(demo, "twin", parent=parent)
        other = farm.show("other")
        farm.folder(other, "theirs", parent=other.folder_id)
        farm.job(show=other, name="other-s-u_job")

    build(make)
    ran = cli("folder", *words)
    assert ran.status in (1, 2)
    assert not lacks(ran.err, *problem)
