"""`opencue-sched submit`: what goes in, what is refused, and that it takes a constant number of statements."""

from __future__ import annotations

import json
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, event

from opencue_sched.domain.invariants import Invariant
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.jobs.job_file import JobSpec
from opencue_sched.jobs.submission import submit_job
from opencue_sched.settings import Settings
from opencue_sched.store.audit import judge
from opencue_sched.text_file import InvalidFile
from tests.kit.command import Cli
from tests.kit.wording import lacks

Build = Callable[[Callable[[Farm], Any]], Any]
Rows = Callable[..., list[Any]]

SIMPLE = """
show: demo
shot: sh010
user: alice
name: render_v1
layers:
  - {name: render, command: "render #FRAME#", range: 1-4}
"""


@pytest.fixture
def demo(build: Build) -> Any:
    """A managed show ``demo`` subscribed to local.general."""

    def make(farm: Farm) -> Any:
        show = farm.show("demo")
        farm.subscription(show, farm.alloc("general"), size=100)
        farm.host(cores=64, memory_gb=256, gpus=4, gpu_memory_gb=48)
        return show

    return build(make)


@contextmanager
def counted_statements(engine: Engine) -> Iterator[list[str]]:
    statements: list[str] = []

    def note(conn: object, cursor: object, statement: str, *_: object) -> None:
        statements.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    try:
        yield statements
    finally:
        event.remove(engine, "before_cursor_execute", note)


def spec(**changes: Any) -> JobSpec:
    data: dict[str, Any] = {"show": "demo", "shot": "sh010", "user": "alice", "name": "job"}
    data["layers"] = [{"name": "render", "command": "render #FRAME#", "range": "1-4"}]
    return JobSpec.parse(data | changes)


def test_a_submitted_job_is_bookable_as_one_of_cuebots(cli: Cli, demo: Any, rows: Rows, engine: Engine) -> None:
    # given a file that uses every kind of field
    file = """
show: demo
shot: sh010
user: alice
name: Comp_v001
uid: 1234
priority: 50
os: linux
max_retries: 1
min_cores: 2
max_cores: 20
max_gpus: 3
env: {OCIO: /config.ocio}
layers:
  - name: render
    command: 'render #FRAMESPEC#'
    range: 1-10,20
    chunk: 2
    cores: 2.5
    max_cores: 4
    memory: 2GiB
    gpus: 1
    gpu_memory: 1GiB
    tags: general | gpu
    services: [maya, arnold]
    timeout: 90
    timeout_llu: 15
    env: {THREADS: "4"}
  - {name: comp, command: comp, range: 1, type: util, threadable: false, depends: [render]}
"""
    # when it is submitted
    ran = cli("submit", "-", "--json", given=file)

    # then the job, its layers and frames are there as Cuebot would have made them
    assert (ran.status, ran.err) == (0, "")
    assert ran.json["name"] == "demo-sh010-alice_comp_v001"
    assert ran.json["frames"] == 7
    (job,) = rows("SELECT job.*, int_priority, r.int_min_cores AS min_cores, r.int_max_cores AS max_cores,"
                  " r.int_max_gpus AS max_gpus FROM job JOIN job_resource r USING (pk_job)")  # fmt: skip
    assert (job.pk_job, job.str_name, job.str_visible_name) == (ran.json["job_id"], ran.json["job"], ran.json["name"])
    assert (job.str_state, job.b_paused, job.pk_show, job.pk_folder) == ("PENDING", False, demo.id, demo.folder_id)
    assert (job.str_show, job.str_shot, job.str_user, job.int_uid, job.str_os) == (
        *("demo", "sh010", "alice", 1234, "linux"),
    )
    assert (job.int_frame_count, job.int_layer_count, job.int_max_retries) == (7, 2, 1)
    assert (job.int_priority, job.min_cores, job.max_cores, job.max_gpus) == (50, 200, 2000, 3)
    assert job.str_log_dir == f"/shots/demo/sh010/logs/{job.str_name}--{job.pk_job}"
    render, comp = rows("SELECT * FROM layer ORDER BY int_dispatch_order")
    assert (render.str_range, render.int_chunk_size, render.str_tags) == ("1-10,20", 2, "general | gpu")
    assert (render.int_cores_min, render.int_cores_max, render.int_mem_min) == (250, 400, 2 * 1024**2)
    assert (render.int_gpus_min, render.int_gpu_mem_min, render.str_services) == (1, 1024**2, "maya,arnold")
    assert (render.int_timeout, render.int_timeout_llu, render.str_type) == (90, 15, "RENDER")
    assert render.str_cmd == "render #FRAMESPEC#"
    assert (comp.str_type, comp.b_threadable, comp.str_cmd) == ("UTIL", False, "comp")
    frames = rows("SELECT * FROM frame ORDER BY int_layer_order, int_dispatch_order")
    assert [(f.str_name, f.int_number, f.int_dispatch_order, f.str_state, f.int_depend_count) for f in frames] == [
        ("0001-render", 1, 0, "WAITING", 0),
        ("0003-render", 3, 1, "WAITING", 0),
        ("0005-render", 5, 2, "WAITING", 0),
        ("0007-render", 7, 3, "WAITING", 0),
        ("0009-render", 9, 4, "WAITING", 0),
        ("0020-render", 20, 5, "WAITING", 0),
        ("0001-comp", 1, 0, "DEPEND", 1),
    ]
    assert all(f.ts_eligible is not None for f in frames if f.str_state == "WAITING")
    assert rows("SELECT str_key, str_value FROM job_env") == [("OCIO", "/config.ocio")]
    assert rows("SELECT pk_layer, str_key, str_value FROM layer_env") == [(render.pk_layer, "THREADS", "4")]
    (stat,) = rows("SELECT int_waiting_count, int_depend_count FROM job_stat")
    assert tuple(stat) == (6, 1)
    counted = "SELECT int_job_insert_count, int_frame_insert_count FROM show_stats WHERE pk_show = :show"
    assert rows(counted, show=demo.id) == [(1, 7)]
    with engine.connect() as connection:
        assert judge(connection, Invariant.LAYER_COUNTERS_MATCH_FRAMES).wrong == 0


def test_limits_are_those_that_the_layers_name(
    engine: Engine, settings: Settings, demo: Any, build: Build, rows: Rows
) -> None:
    build(lambda farm: [farm.limit(name, 5) for name in ("arnold", "maya", "nuke")])
    base = {"command": "render", "range": "1"}
    layers = [{**base, "name": "a", "limits": ["maya", "arnold"]}, {**base, "name": "b"}]
    submit_job(engine, spec(layers=layers), settings)
    assert rows(
        "SELECT layer.str_name, limit_record.str_name FROM layer_limit JOIN layer USING (pk_layer)"
        " JOIN limit_record USING (pk_limit_record) ORDER BY 2"
    ) == [("a", "arnold"), ("a", "maya")]


def test_the_answer_for_people_says_what_went_in(cli: Cli, demo: Any) -> None:
    ran = cli("submit", "-", given=SIMPLE + "  - {name: comp, command: comp, range: 1, depends: [render]}")
    assert ran.status == 0
    assert not lacks(ran.out, "demo-sh010-alice_render_v1", "5 frames", "render: 4 frames")
    (comp,) = (line for line in ran.out.splitlines() if " comp: " in line)
    assert not lacks(comp, "1 frame", "waiting")


@pytest.mark.parametrize("paused", [["--paused"], []])
def test_a_job_can_be_submitted_paused_by_option_or_file(cli: Cli, demo: Any, rows: Rows, paused: list[str]) -> None:
    file = SIMPLE if paused else SIMPLE.replace("name: render_v1", "name: render_v1\npaused: true")
    assert cli("submit", "-", *paused, given=file).status == 0
    assert rows("SELECT b_paused FROM job") == [(True,)]


def test_json_files_and_files_by_name_are_taken(cli: Cli, demo: Any, tmp_path: Any) -> None:
    layers = [{"name": "render", "command": "render", "range": "1-2"}]
    job = {"show": "demo", "shot": "sh010", "user": "alice", "name": "from_json", "layers": layers}
    (tmp_path / "job.json").write_text(json.dumps(job), encoding="utf-8")
    ran = cli("submit", str(tmp_path / "job.json"), "--json")
    assert (ran.status, ran.json["frames"]) == (0, 2)
    assert cli("submit", str(tmp_path / "none.yaml")).status == 2


def test_a_dry_run_checks_everything_and_leaves_nothing(cli: Cli, demo: Any, rows: Rows) -> None:
    ran = cli("submit", "-", "--dry-run", given=SIMPLE)
    assert ran.status == 0
    assert not lacks(ran.out, "demo-sh010-alice_render_v1", "4 frames")
    assert rows("SELECT count(*) FROM job") == rows("SELECT count(*) FROM frame") == [(0,)]
    assert cli("submit", "-", "--dry-run", given=SIMPLE.replace("demo", "demmo")).status == 1


def test_a_live_job_keeps_its_name_and_a_finished_one_gives_it_up(cli: Cli, demo: Any, engine: Engine) -> None:
    assert cli("submit", "-", given=SIMPLE).status == 0
    again = cli("submit", "-", given=SIMPLE)
    assert again.status == 1
    assert not lacks(again.err, "name: ", "'demo-sh010-alice_render_v1'")
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE job SET str_state = 'FINISHED', str_visible_name = NULL")
    assert cli("submit", "-", given=SIMPLE).status == 0


def test_what_the_file_leaves_open_is_what_the_folder_says_then_the_show(
    engine: Engine, settings: Settings, demo: Any, build: Build, rows: Rows
) -> None:
    def folder(farm: Farm) -> str:
        return farm.folder(demo, "lighting", parent=demo.folder_id, dept_id=farm.dept("lighting"))

    folder_id = build(folder)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE show SET int_default_max_cores = 700, int_default_min_cores = 300")
        connection.exec_driver_sql("UPDATE folder SET int_job_max_cores = 500 WHERE str_name = 'lighting'")
    submit_job(engine, spec(name="a"), settings)
    submit_job(engine, spec(name="b", folder="lighting"), settings)
    submit_job(engine, spec(name="c", folder="lighting", max_cores=-1, min_cores=4), settings)
    caps = rows("SELECT r.int_min_cores, r.int_max_cores FROM job_resource r JOIN job USING (pk_job) ORDER BY str_name")
    assert [tuple(row) for row in caps] == [(300, 700), (300, 500), (400, -1)]
    folders = rows("SELECT pk_folder, pk_dept FROM job ORDER BY str_name")
    assert [row.pk_folder for row in folders] == [demo.folder_id, folder_id, folder_id]
    (point,) = rows("SELECT 1 FROM point WHERE pk_dept = :dept", dept=folders[1].pk_dept)
    assert point


def test_the_log_root_depends_on_the_os(engine: Engine, settings: Settings, demo: Any) -> None:
    changed = settings.model_copy(update={"log_root": {"default_os": "/logs/", "Win": "//srv/logs"}})
    on_linux = submit_job(engine, spec(name="a", os="linux"), changed, dry_run=True)
    on_windows = submit_job(engine, spec(name="a", os="win"), changed, dry_run=True)
    own = submit_job(engine, spec(log_dir="/mine"), changed, dry_run=True)
    assert on_linux.log_dir == f"/logs/demo/sh010/logs/demo-sh010-alice_a--{on_linux.job_id}"
    assert on_windows.log_dir.startswith("//srv/logs/demo/sh010/logs/")
    as_told = submit_job(engine, spec(name="b", os="WIN"), changed, dry_run=True)
    assert as_told.log_dir.startswith("//srv/logs/demo/sh010/logs/"), "upper case means nothing"
    assert own.log_dir == "/mine"


def test_a_paused_show_pauses_its_jobs_and_an_unmanaged_one_is_pointed_out(
    engine: Engine, settings: Settings, demo: Any
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE show SET b_paused = true, b_scheduler_managed = false")
    submitted = submit_job(engine, spec(), settings)
    assert submitted.paused
    assert any("opencue-sched show managed demo on" in note for note in submitted.notes)
    assert any("demo" in note and "paused" in note for note in submitted.notes)


def test_the_scheduler_is_woken(engine: Engine, settings: Settings, demo: Any) -> None:
    # given somebody who listens for work
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        connection.exec_driver_sql("LISTEN opencue_sched_work")
        connection.commit()

        # when a job is submitted
        submit_job(engine, spec(), settings)

        # then the show is named
        assert select.select([driver], [], [], 10.0)[0]
        driver.poll()
        assert [json.loads(notice.payload) for notice in driver.notifies] == [{"shows": [demo.id]}]


def test_the_number_of_statements_does_not_depend_on_the_size_of_the_job(
    engine: Engine, settings: Settings, demo: Any
) -> None:
    def statements(frames: int, layers: int) -> int:
        job = spec(
            name=f"job{frames}",
            env={f"V{number}": "1" for number in range(layers)},
            layers=[
                {
                    "name": f"layer{number}",
                    "command": "render",
                    "range": f"1-{frames // layers}",
                    "env": {"A": "1"},
                    "depends": [{"layer": f"layer{number - 1}", "type": "frame_by_frame"}] if number else [],
                }
                for number in range(layers)
            ],
        )
        with counted_statements(engine) as sent:
            assert submit_job(engine, job, settings).frames == frames
        return len(sent)

    small = statements(frames=4, layers=2)
    large = statements(frames=10_000, layers=50)
    assert small == large
    assert small < 30


def test_a_cap_of_the_show_that_no_frame_fits_is_refused(engine: Engine, settings: Settings, demo: Any) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE show SET int_default_max_cores = 400")
    wide = [{"name": "render", "command": "render", "range": "1", "cores": 8}]
    with pytest.raises(InvalidFile, match=r"layers\[0\].cores: .*\b8\b.*\b4\b"):
        submit_job(engine, spec(layers=wide), settings)
    assert submit_job(engine, spec(layers=wide, max_cores=8), settings).frames == 1


def test_a_layer_that_its_own_jobs_cap_would_starve_is_refused(engine: Engine, settings: Settings, demo: Any) -> None:
    base = {"command": "render", "range": "1"}
    layers = [
        {**base, "name": "a", "cores": 4.5, "gpus": 2},
        {**base, "name": "b", "cores": 8, "threadable": False},
    ]
    with pytest.raises(InvalidFile) as refused:
        submit_job(engine, spec(max_cores=4, max_gpus=1, layers=layers), settings)
    cores, gpus = refused.value.problems
    assert not lacks(cores, "layers[0].cores: ", "5 cores", " 4 ", "max_cores")
    assert not lacks(gpus, "layers[0].gpus: ", "2 ", " 1")


# Bad input: everything at once, by field, and nothing stored


def test_every_problem_of_a_file_is_said_at_once_and_nothing_is_stored(cli: Cli, demo: Any, rows: Rows) -> None:
    file = """
show: demo
shot: sh010
user: alice
name: bad
prioritty: 5
layers:
  - {name: a, command: "render #FRAMES#", range: 1-x}
  - {name: b, command: "%s", range: 1-5, tags: [big mem]}
""" % ("x" * 4001)
    ran = cli("submit", "-", given=file)
    assert ran.status == 1
    for expected in (
        "prioritty: unknown key; did you mean 'priority'?",
        "layers[0].command: uses the unknown token #FRAMES#; did you mean '#FRAME#'?",
        "layers[0].range: frame range '1-x': '1-x' does not parse",
        "layers[1].command: ",
        "layers[1].tags[0]: 'big mem' may contain only letters",
    ):
        assert expected in ran.err
    assert rows("SELECT count(*) FROM job") == [(0,)]
    as_json = cli("submit", "-", "--json", given=file)
    assert (as_json.status, as_json.json["submitted"], as_json.json["problems"]) == (
        *(1, False),
        [line.removeprefix("<stdin>: ") for line in ran.err.splitlines()[:-1]],
    )


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ("show: demo\nshot: s\nuser: u\nname: n\nlayers: []\n", ["layers: "]),
        ("show: demo\nshot: s\nuser: u\nname: n\n", ["layers: "]),
        ("", ["job file: "]),
        ("- a\n- b\n", ["job file: "]),
        ("show: [demo\n", ["YAML"]),
        ('{"show": "demo",}', ["layers: "]),
        ('{"show": "demo"', ["line 1, column 16: "]),
        ("show: demo\nshow: other\n", ["line 2, column 1: ", "'show'"]),
        (
            "show: demo\nshot: #SHOT# is cut off\n",
            ["line 2: ", "#SHOT#"],
        ),
        (
            "show: !!python/name:os.system\n",
            ["line 1, column 7: "],
        ),
    ],
)
def test_a_file_that_is_no_job_is_refused(cli: Cli, demo: Any, file: str, problem: list[str]) -> None:
    ran = cli("submit", "-", given=file)
    assert ran.status == 1
    assert not lacks(ran.err, *problem)


def test_a_file_that_is_not_text_is_refused(cli: Cli, demo: Any) -> None:
    ran = cli("submit", "-", given=b"show: \xff\xfe")
    assert ran.status == 1
    assert all(fact in ran.err for fact in ("utf-8", "0xff", "position 6"))


def test_a_shot_that_looks_like_a_number_or_a_date_stays_what_it_is(cli: Cli, demo: Any, rows: Rows) -> None:
    for shot in ("0010", "2026-01-01", "1:30", "no"):
        assert cli("submit", "-", given=SIMPLE.replace("sh010", shot).replace("1:30", "'1_30'")).status == 0
    assert {row.str_shot for row in rows("SELECT str_shot FROM job")} == {"0010", "2026-01-01", "1_30", "no"}


def test_names_that_are_not_there_are_said_with_what_was_probably_meant(cli: Cli, demo: Any, build: Build) -> None:
    build(lambda farm: farm.limit("arnold", 5))
    build(lambda farm: farm.folder(demo, "lighting", parent=demo.folder_id))
    build(lambda farm: farm.job([LayerSpec(name="geo")], show=demo, name="demo-sh010-alice_model"))
    file = """
show: demo
shot: sh010
user: alice
name: bad
facility: locl
folder: lightning
dept: Unknwn
depends: [demo-sh010-alice_modle, {job: demo-sh010-alice_model, layer: goe}]
layers:
  - {name: a, command: render, range: 1-5, limits: [arnodl, houdini]}
  - {name: b, command: render, range: 1-5, depends: [{job: demo-sh010-alice_model, layer: geo, frame: 9}]}
  - {name: c, command: render, range: 7-9, depends: [{job: demo-sh010-alice_model, layer: geo, type: frame_by_frame}]}
"""
    ran = cli("submit", "-", given=file)
    assert ran.status == 1
    *problems, last = ran.err.splitlines()
    for expected in (
        ["facility: ", "'locl'", "'local'"],
        ["folder: ", "'lightning'", "'lighting'"],
        ["dept: ", "'Unknwn'", "'Unknown'"],
        ["layers[0].limits: ", "'arnodl'", "'arnold'"],
        ["layers[0].limits: ", "'houdini'", "`opencue-sched limit create houdini MAX`"],
        ["depends[0]: ", "'demo-sh010-alice_modle'", "'demo-sh010-alice_model'"],
        ["depends[1]: ", "'demo-sh010-alice_model'", "'goe'", "'geo'"],
        ["layers[1].depends[0]: ", "9", "'geo'", "(1-1)"],
        ["layers[2].depends[0]: ", "'c'", "'geo'", "'demo-sh010-alice_model'"],
    ):
        assert any(not lacks(problem, *expected) for problem in problems), expected
    assert (len(problems), "9 problems" in last) == (9, True)


@pytest.mark.parametrize(
    ("show", "problem"),
    [("demmo", "'demo'"), ("harbour", "`opencue-sched show create harbour`"), ("demo", "active")],
)
def test_a_show_that_is_not_there_or_not_active_is_refused(
    cli: Cli, demo: Any, engine: Engine, show: str, problem: str
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE show SET b_active = false")
    ran = cli("submit", "-", given=SIMPLE.replace("demo", show))
    assert ran.status == 1
    assert not lacks(ran.err, "show: ", f"'{show}'", problem)
