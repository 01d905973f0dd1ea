"""Dependencies that are added to jobs that are in, and the tree of what waits for what."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import Engine, text

from opencue_sched.domain.invariants import Invariant
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobIds, JobSpec, LayerSpec
from opencue_sched.errors import InvalidInput
from opencue_sched.jobs.control import JobControl, add_depend
from opencue_sched.jobs.job_file import Depend
from opencue_sched.reports.completion import Releaser
from opencue_sched.reports.run_ends import CompletedFrame
from opencue_sched.settings import Release
from opencue_sched.store.audit import judge
from opencue_sched.store.named_rows import NamedRow
from opencue_sched.store.release import Counters, lock_counters
from tests.kit.command import Cli
from tests.kit.polling import MOST_SECONDS, eventually
from tests.kit.runs import ScriptedKiller, complete_frame
from tests.kit.wording import lacks

Build = Callable[[Callable[[Farm], Any]], Any]
Rows = Callable[..., list[Any]]

SIM, COMP = "show-sh010-alice_sim", "show-sh010-alice_comp"


@pytest.fixture
def jobs(build: Build) -> dict[str, JobIds]:
    """A simulation of two layers, and a comp of two layers, of three frames each."""

    def make(farm: Farm) -> dict[str, JobIds]:
        show = farm.show("show")
        layers = {SIM: ("cache", "mesh"), COMP: ("render", "comp")}
        return {
            name: farm.job([LayerSpec(name=layer, frames=3) for layer in of_job], name=name, show=show)
            for name, of_job in layers.items()
        }

    made: dict[str, JobIds] = build(make)
    return made


@pytest.fixture
def states(rows: Rows) -> Callable[[str], list[str]]:
    """The states of the frames of a layer, by number."""

    def read(layer: str) -> list[str]:
        found = rows(
            "SELECT layer.str_name, frame.str_state FROM frame JOIN layer USING (pk_layer) ORDER BY frame.int_number"
        )
        return [state for name, state in found if name == layer]

    return read


@pytest.fixture
def end(engine: Engine) -> Callable[[JobIds, int, int], None]:
    """Put a frame of a job's layer into SUCCEEDED, whatever waits for it."""

    def to_succeeded(job: JobIds, first: int, count: int) -> None:
        with engine.begin() as connection:
            connection.execute(
                text("UPDATE frame SET str_state = 'SUCCEEDED' WHERE pk_frame = ANY(:frames)"),
                {"frames": list(job.frames[first : first + count])},
            )

    return to_succeeded


def assert_counters_match(engine: Engine) -> None:
    with engine.connect() as connection:
        assert judge(connection, Invariant.LAYER_COUNTERS_MATCH_FRAMES).wrong == 0


@pytest.mark.parametrize(
    ("words", "waiting", "kind"),
    [
        (("--on", SIM), {"render", "comp"}, "JOB_ON_JOB"),
        (("--on", SIM, "--on-layer", "cache"), {"render", "comp"}, "JOB_ON_LAYER"),
        (("--layer", "comp", "--on", SIM), {"comp"}, "LAYER_ON_JOB"),
        (("--layer", "comp", "--on", SIM, "--on-layer", "mesh"), {"comp"}, "LAYER_ON_LAYER"),
        (("--layer", "comp", "--on", SIM, "--on-layer", "mesh", "--on-frame", "2"), {"comp"}, "LAYER_ON_FRAME"),
        (("--layer", "comp", "--on-layer", "render", "--type", "frame_by_frame"), {"comp"}, "FRAME_BY_FRAME"),
    ],
)
def test_frames_wait_for_what_is_added(
    cli: Cli,
    jobs: dict[str, JobIds],
    states: Callable[[str], list[str]],
    engine: Engine,
    words: tuple[str, ...],
    waiting: set[str],
    kind: str,
) -> None:
    ran = cli("job", "depends", "add", COMP, *words, "--reason", "client", "--json")
    assert (ran.status, ran.json["frames"], ran.json["met"]) == (0, 3 * len(waiting), False)
    for layer in ("render", "comp"):
        assert set(states(layer)) == {"DEPEND" if layer in waiting else "WAITING"}
    assert {depend["type"] for depend in cli("job", "depends", "list", COMP, "--json").json} == {kind}
    assert_counters_match(engine)

    # when the dependency is dropped, everything can run
    assert cli("job", "depends", "drop", COMP, "--all").status == 0
    assert set(states("render") + states("comp")) == {"WAITING"}
    assert_counters_match(engine)


def test_what_has_rendered_stays_so_and_what_runs_goes_on(
    cli: Cli, jobs: dict[str, JobIds], states: Callable[[str], list[str]], build: Build, engine: Engine, end: Any
) -> None:
    comp = jobs[COMP]
    end(comp, 0, 1)
    build(lambda farm: farm.run([comp.frames[1]], farm.host(name="render01", cores=8, memory_gb=16)))
    assert cli("job", "depends", "add", COMP, "--layer", "render", "--on", SIM).status == 0
    assert states("render") == ["SUCCEEDED", "RUNNING", "DEPEND"]
    assert_counters_match(engine)


def test_a_frame_that_ran_and_waits_again_waits_for_all_that_is_open(
    cli: Cli, jobs: dict[str, JobIds], states: Callable[[str], list[str]], engine: Engine
) -> None:
    # given a frame that ran when the first dependency came, then failed, and was given another one
    def set_state(state: str) -> None:
        with engine.begin() as connection:
            changed = text("UPDATE frame SET str_state = :state, int_version = int_version + 1 WHERE pk_frame = :frame")
            connection.execute(changed, {"state": state, "frame": jobs[COMP].frames[0]})

    set_state("RUNNING")
    for layer in ("cache", "mesh"):
        added = ("add", COMP, "--layer", "render", "--on", SIM, "--on-layer", layer)
        assert cli("job", "depends", *added).status == 0
        if layer == "cache":
            set_state("WAITING")
            assert states("render")[0] == "WAITING"
    assert states("render") == ["DEPEND"] * 3
    # when the first is met, then it waits for the other as the others do
    first, second = cli("job", "depends", "list", COMP, "--json").json
    for depend, expected in ((first, "DEPEND"), (second, "WAITING")):
        assert cli("job", "depends", "drop", COMP, depend["id"]).status == 0
        assert states("render") == [expected] * 3
    assert_counters_match(engine)


def test_a_frame_that_ran_when_a_dependency_came_and_fails_waits_for_it(
    cli: Cli, jobs: dict[str, JobIds], states: Callable[[str], list[str]], build: Build, engine: Engine
) -> None:
    # given frames that run, one of which waits for something of its own as well
    comp, sim = jobs[COMP], jobs[SIM]

    def run(farm: Farm) -> list[str]:
        return list(farm.run(comp.frames[:2], farm.host(name="render01", cores=8, memory_gb=16), cores=1, memory_gb=1))

    procs: list[str] = build(run)
    assert cli("job", "depends", "add", COMP, "--layer", "render", "--on", SIM, "--on-layer", "cache").status == 0
    assert cli("job", "depends", "add", COMP, "--on", SIM, "--on-layer", "mesh").status == 0
    # when one fails and the other succeeds, then the one waits for both, and the other is over
    for proc, frame, exit_status in zip(procs, comp.frames, (1, 0), strict=False):
        complete_frame(engine, CompletedFrame(proc, frame, "render01", exit_status))
    assert states("render") == ["DEPEND", "SUCCEEDED", "DEPEND"]
    assert_counters_match(engine)
    # when the other is retried, then it waits as well
    assert cli("job", "retry", COMP, "--state", "SUCCEEDED").status == 0
    assert states("render") == ["DEPEND"] * 3
    # and all can run when everything has been met, one after the other
    control = JobControl(Releaser(engine, Release(satisfy_only_on_frame_success=False)), ScriptedKiller())  # type: ignore[arg-type]
    control.eat_frames(list(sim.layers[0].frames), reason="a test")
    assert states("render") == ["DEPEND"] * 3
    control.eat_frames(list(sim.layers[1].frames), reason="a test")
    assert states("render") == ["WAITING"] * 3
    assert_counters_match(engine)


def test_a_frame_that_fails_while_its_dependency_is_met_does_not_wait_for_what_is_over(
    cli: Cli, jobs: dict[str, JobIds], states: Callable[[str], list[str]], build: Build, engine: Engine, rows: Rows
) -> None:
    # given a frame that ran when the dependency came, and somebody who meets the dependency just now
    comp = jobs[COMP]
    (proc,) = build(lambda farm: farm.run([comp.frames[0]], farm.host(name="render01", cores=8, memory_gb=16)))
    assert cli("job", "depends", "add", COMP, "--layer", "render", "--on", SIM).status == 0
    waiters = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with ThreadPoolExecutor(1) as threads, engine.begin() as connection:
        connection.execute(text("UPDATE depend SET b_active = false"))
        failing = threads.submit(complete_frame, engine, CompletedFrame(proc, comp.frames[0], "render01", 1))
        # when it fails before that is committed
        eventually(lambda: rows(waiters), 20, "the completion to wait for what becomes of the dependency")
        connection.commit()
        failing.result(MOST_SECONDS)
    # then it can run
    assert states("render")[0] == "WAITING"


def test_whoever_ends_what_is_waited_for_gets_the_frames_that_wait(
    cli: Cli, jobs: dict[str, JobIds], rows: Rows, engine: Engine
) -> None:
    # given a completion that has the counters of frames in DEPEND, and one more dependency that waits for these
    assert cli("job", "depends", "add", COMP, "--on", SIM, "--on-layer", "cache").status == 0
    job = NamedRow(jobs[COMP].id, COMP)
    waiters = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with ThreadPoolExecutor(1) as threads, engine.begin() as connection:
        lock_counters(connection, Counters([("layer", layer.id) for layer in jobs[COMP].layers]))
        adding = threads.submit(add_depend, engine, job, None, Depend(job=SIM, layer="mesh"), Release())
        eventually(lambda: rows(waiters), 20, "the dependency to wait for the counters")
        # then the completion has the frames at once: had the other locked them, each would wait for the other
        frames = text("SELECT pk_frame FROM frame WHERE pk_job = :job FOR NO KEY UPDATE NOWAIT")
        assert len(connection.execute(frames, {"job": job.id}).all()) == 6
        connection.commit()
        assert adding.result(MOST_SECONDS).frames == 6
    assert rows("SELECT DISTINCT int_depend_count FROM frame WHERE str_state = 'DEPEND'") == [(2,)]
    assert_counters_match(engine)


def test_what_is_over_already_makes_nothing_wait(
    cli: Cli, jobs: dict[str, JobIds], states: Callable[[str], list[str]], end: Any
) -> None:
    end(jobs[SIM], 0, 3)
    ran = cli("job", "depends", "add", COMP, "--on", SIM, "--on-layer", "cache", "--json")
    assert (ran.status, ran.json["job"], ran.json["met"], ran.json["frames"]) == (0, COMP, True, 0)
    assert set(states("render")) == {"WAITING"}
    assert cli("job", "depends", "list", COMP, "--json").json == []


@pytest.mark.parametrize(
    ("before", "words"),
    [
        (None, (COMP, "--on", COMP)),
        (None, (COMP, "--layer", "comp", "--on-layer", "comp")),
        (("--on", SIM), (SIM, "--on", COMP)),
        (("--layer", "comp", "--on", SIM), (SIM, "--layer", "cache", "--on", COMP)),
        (("--on", SIM, "--on-layer", "mesh"), (SIM, "--layer", "mesh", "--on", COMP, "--on-layer", "comp")),
    ],
)
def test_what_would_wait_for_itself_is_refused(
    cli: Cli, jobs: dict[str, JobIds], rows: Rows, before: tuple[str, ...] | None, words: tuple[str, ...]
) -> None:
    if before:
        assert cli("job", "depends", "add", COMP, *before).status == 0
    refused = cli("job", "depends", "add", *words)
    assert refused.status == 1
    assert words[0] in refused.err
    assert rows("SELECT count(*) FROM depend") == [(1 if before else 0,)]


def test_layers_may_wait_for_each_others_jobs_in_turns(cli: Cli, jobs: dict[str, JobIds]) -> None:
    assert cli("job", "depends", "add", COMP, "--layer", "render", "--on", SIM, "--on-layer", "cache").status == 0
    assert cli("job", "depends", "add", SIM, "--layer", "mesh", "--on", COMP, "--on-layer", "render").status == 0
    assert cli("job", "depends", "add", COMP, "--layer", "comp", "--on", SIM).status == 0


@pytest.mark.parametrize(
    ("words", "status", "problem"),
    [
        ((COMP,), 2, ["--on"]),
        ((COMP, "--layer", "cmop", "--on", SIM), 1, ["'cmop'", "'comp'"]),
        ((COMP, "--on", SIM, "--on-layer", "cahce"), 1, ["'cahce'", "'cache'"]),
        ((COMP, "--on", SIM, "--on-layer", "cache", "--on-frame", "99"), 1, ["99", "cache"]),
        ((COMP, "--on", SIM, "--on-frame", "1"), 1, ["layer"]),
        ((COMP, "--on", SIM, "--on-layer", "cache", "--type", "layer"), 1, ["type"]),
    ],
)
def test_what_cannot_be_waited_for_is_refused(
    cli: Cli, jobs: dict[str, JobIds], rows: Rows, words: tuple[str, ...], status: int, problem: list[str]
) -> None:
    ran = cli("job", "depends", "add", *words)
    assert ran.status == status
    assert not lacks(ran.err, *problem)
    assert rows("SELECT count(*) FROM depend") == [(0,)]


def test_a_finished_job_waits_for_nothing_more(cli: Cli, jobs: dict[str, JobIds]) -> None:
    assert cli("job", "kill", COMP, "--yes").status == 0
    refused = cli("job", "depends", "add", COMP, "--on", SIM)
    assert refused.status == 1
    assert not lacks(refused.err, COMP, "finished")


def test_the_tree_shows_both_ways_over_jobs(cli: Cli, jobs: dict[str, JobIds], build: Build) -> None:
    final = "show-sh010-alice_final"
    build(lambda farm: farm.job([LayerSpec(name="encode")], name=final, show=jobs[SIM].show))
    assert cli("job", "depends", "add", COMP, "--layer", "render", "--on", SIM, "--on-layer", "cache").status == 0
    assert cli("job", "depends", "add", final, "--on", COMP).status == 0

    top, first, second, last = cli("job", "depends", "tree", final).out.splitlines()
    assert (final in top, first.startswith("└── "), second.startswith("    └── "), final in last) == (True,) * 4
    assert COMP in first
    assert not lacks(second, "render", "cache", SIM)
    above = cli("job", "depends", "tree", SIM, "--json").json
    assert above["waits_for"] == []
    (waiting,) = above["waited_for_by"]
    assert (waiting["job"], waiting["waits"], waiting["on"]) == (COMP, "layer render", f"layer cache of job {SIM}")
    assert [branch["job"] for branch in waiting["depends"]] == [final]


def test_two_dependencies_that_are_added_at_once_close_no_circle(
    engine: Engine, build: Build, rows: Rows, cli: Cli
) -> None:
    # given that b waits for c, and d for a
    def make(farm: Farm) -> dict[str, JobIds]:
        show = farm.show("show")
        return {name: farm.job([LayerSpec(frames=1)], name=name, show=show) for name in ("a", "b", "c", "d")}

    made: dict[str, JobIds] = build(make)
    for name, on in (("b", "c"), ("d", "a")):
        assert cli("job", "depends", "add", name, "--on", on).status == 0

    def add(name: str, on: str) -> bool:
        try:
            add_depend(engine, NamedRow(made[name].id, name), None, Depend(job=on), Release())
        except InvalidInput:
            return False
        return True

    # when a is to wait for b and c for d, of which neither sees the other's before both are written
    waiters = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with ThreadPoolExecutor(2) as threads:
        with engine.begin() as connection:
            connection.execute(text("LOCK TABLE depend IN SHARE MODE"))
            adding = [threads.submit(add, *names) for names in (("a", "b"), ("c", "d"))]
            eventually(lambda: len(rows(waiters)) == 2, 20, "both dependencies to be written")
        added = [one.result(MOST_SECONDS) for one in adding]
    # then one of them is refused
    assert sorted(added) == [False, True]


def test_whoever_eats_a_frame_that_waits_leaves_it_to_whoever_ends_what_it_waits_for(
    engine: Engine, cli: Cli, jobs: dict[str, JobIds], rows: Rows, states: Callable[[str], list[str]]
) -> None:
    # given frames in DEPEND, and somebody who has their counters, as the end of what they wait for does
    assert cli("job", "depends", "add", COMP, "--on", SIM, "--on-layer", "cache").status == 0
    waiters = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    control = JobControl(Releaser(engine, Release()), ScriptedKiller())  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as threads, engine.begin() as connection:
        lock_counters(connection, Counters([("layer", layer.id) for layer in jobs[COMP].layers]))
        eating = threads.submit(control.eat_frames, list(jobs[COMP].frames), reason="a test")
        eventually(lambda: rows(waiters), 20, "the eating to wait for the counters")
        # then the frames are free: had the other locked them, each would wait for the other
        frames = text("SELECT pk_frame FROM frame WHERE pk_job = :job FOR NO KEY UPDATE NOWAIT")
        assert len(connection.execute(frames, {"job": jobs[COMP].id}).all()) == 6
        connection.commit()
        assert len(eating.result(MOST_SECONDS).changed) == 6
    assert set(states("render") + states("comp")) == {"EATEN"}
    assert_counters_match(engine)


def test_a_tree_of_many_jobs_in_a_row_is_cut_where_nobody_can_read_it(cli: Cli, build: Build) -> None:
    # given three hundred jobs, each of which waits for the one before it
    def make(farm: Farm) -> list[str]:
        show = farm.show("show")
        made = farm.jobs(
            [JobSpec(layers=(LayerSpec(frames=1),), name=f"job{number}", show=show) for number in range(300)]
        )
        for before, job in pairwise(made):
            farm.job_on_job(job, before)
        return [job.name for job in made]

    names = build(make)
    # when the tree of one end is asked for, then it goes so far, and says where to go on
    shown = cli("job", "depends", "tree", names[-1])
    assert shown.status == 0
    lines = shown.out.splitlines()
    assert len(lines) == 102
    assert "`job depends tree" in lines[-2]
    document = cli("job", "depends", "tree", names[0], "--json").json
    depth, branches = 0, document["waited_for_by"]
    while branches:
        depth, last, branches = depth + 1, branches[0], branches[0].get("depends")
    assert (depth, last["more"]) == (100, True)
