"""Many jobs at once: commands that take jobs by name, or all pending ones that a filter finds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, text

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobIds, LayerSpec
from opencue_sched.embedded.rqds.simulated_host import HostSpec as SimulatedSpec
from opencue_sched.embedded.rqds.simulated_rqd import SimulatedFarm
from tests.kit.command import Cli
from tests.kit.wording import lacks

Build = Callable[[Callable[[Farm], Any]], Any]
Rows = Callable[..., list[Any]]

COMP, LIGHT, OTHER = "show-sh010-alice_comp", "show-sh010-alice_light", "show-sh020-bob_comp"
COMMANDS = {"pause": (), "unpause": (), "kill": (), "retry": (), "eat": (), "priority": ("80",)}


@pytest.fixture
def jobs(build: Build, engine: Engine) -> dict[str, JobIds]:
    """Two jobs of Alice and one of Bob, of two dead frames each."""

    def make(farm: Farm) -> dict[str, JobIds]:
        show = farm.show("show")
        made = {}
        for name in (COMP, LIGHT, OTHER):
            made[name] = farm.job([LayerSpec(name="render", frames=2)], name=name, show=show)
            user = "bob" if name == OTHER else "alice"
            farm.connection.execute(
                text("UPDATE job SET str_user = :user WHERE pk_job = :job"), {"user": user, "job": made[name].id}
            )
        farm.connection.execute(text("UPDATE frame SET str_state = 'DEAD', int_version = int_version + 1"))
        return made

    made: dict[str, JobIds] = build(make)
    return made


@pytest.fixture
def paused(rows: Rows) -> Callable[[], set[str]]:
    return lambda: {name for (name,) in rows("SELECT str_name FROM job WHERE b_paused")}


def test_jobs_of_a_user_are_paused_together_when_a_person_agrees(
    cli: Cli, jobs: dict[str, JobIds], paused: Callable[[], set[str]]
) -> None:
    refused = cli("job", "pause", "--user", "alice", given="n\n")
    assert (refused.status, paused()) == (1, set())
    assert "2 jobs" in refused.out
    listed = {words[0] for words in map(str.split, refused.err.splitlines()) if words}
    assert {COMP, LIGHT} <= listed
    assert OTHER not in listed

    agreed = cli("job", "pause", "--user", "alice", given="y\n")
    assert (agreed.status, paused()) == (0, {COMP, LIGHT})


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (("--show", "show"), {COMP, LIGHT, OTHER}),
        (("--name", "COMP"), {COMP, OTHER}),
        (("--name", "comp", "--user", "bob"), {OTHER}),
    ],
)
def test_yes_does_not_ask(
    cli: Cli, jobs: dict[str, JobIds], paused: Callable[[], set[str]], choice: tuple[str, ...], expected: set[str]
) -> None:
    ran = cli("job", "pause", *choice, "--yes", "--json")
    assert ran.status == 0
    assert {job["job"] for job in ran.json} == expected == paused()


def test_priority_is_set_by_a_filter(cli: Cli, jobs: dict[str, JobIds], rows: Rows) -> None:
    assert cli("job", "priority", "--user", "bob", "77", "--yes").status == 0
    assert rows("SELECT pk_job FROM job_resource WHERE int_priority = 77") == [(jobs[OTHER].id,)]


@pytest.mark.parametrize(("verb", "state"), [("retry", "WAITING"), ("eat", "EATEN")])
def test_dead_frames_of_many_jobs_are_changed(
    cli: Cli, jobs: dict[str, JobIds], rows: Rows, verb: str, state: str
) -> None:
    ran = cli("job", verb, "--user", "alice", "--yes", "--json")
    assert ran.status == 0
    assert {job["job"]: len(job["frames"]) for job in ran.json} == {COMP: 2, LIGHT: 2}
    states = rows("SELECT DISTINCT str_user, frame.str_state FROM frame JOIN job USING (pk_job) ORDER BY str_user")
    assert states == [("alice", state), ("bob", "DEAD")]


def test_jobs_without_such_frames_are_left_out(cli: Cli, jobs: dict[str, JobIds]) -> None:
    assert cli("job", "retry", LIGHT).status == 0
    ran = cli("job", "retry", COMP, LIGHT)
    assert (ran.status, lacks(ran.out, COMP, "2 frames"), LIGHT in ran.out) == (0, [], False)
    none = cli("job", "retry", COMP, LIGHT)
    assert none.status == 1
    assert not lacks(none.err, "2 jobs", "DEAD")


def test_of_several_jobs_each_has_the_layers_that_it_has(cli: Cli, jobs: dict[str, JobIds], build: Build) -> None:
    build(lambda farm: farm.job([LayerSpec(name="encode")], name="show-sh030-bob_encode", show=jobs[COMP].show))
    ran = cli("job", "retry", "--show", "show", "--layer", "render", "--layer", "encode", "--state", "ANY", "--yes")
    assert (ran.status, ran.out.count("2 frames")) == (0, 3)
    assert cli("job", "retry", COMP, "--layer", "encode").status == 1, "one job has to have it"


def test_a_job_that_cannot_be_pending_again_stops_no_other(
    cli: Cli, jobs: dict[str, JobIds], build: Build, rows: Rows
) -> None:
    # given: Bob's job is over, and another of its name is pending
    def finish(farm: Farm) -> None:
        farm.connection.execute(
            text("UPDATE job SET str_state = 'FINISHED', str_visible_name = NULL WHERE pk_job = :job"),
            {"job": jobs[OTHER].id},
        )
        farm.job(name=OTHER, show=jobs[OTHER].show)

    build(finish)
    ran = cli("job", "retry", jobs[OTHER].id, COMP)
    assert ran.status == 1
    assert not lacks(ran.out, COMP, "2 frames")
    assert not lacks(ran.err, "error: ", jobs[OTHER].id)


def refuse(engine: Engine, what: str, job: JobIds) -> None:
    """Have PostgreSQL refuse to do ``what`` (AFTER ... ON a table) to rows of a job."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "CREATE FUNCTION refuses() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
                " IF coalesce(to_jsonb(NEW), to_jsonb(OLD)) ->> 'pk_job' = TG_ARGV[0] THEN RAISE 'it stays'; END IF;"
                f" RETURN NULL; END $$; CREATE TRIGGER refuses {what}"
                f" FOR EACH ROW EXECUTE FUNCTION refuses('{job.id}')"
            )
        )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("job", "kill", COMP, LIGHT, "--yes"), [LIGHT]),
        (("job", "retry", COMP, LIGHT, "--state", "RUNNING"), [LIGHT, "1 frame "]),
        (("job", "eat", COMP, LIGHT, "--state", "RUNNING"), [LIGHT, "1 frame "]),
        (("proc", "kill", "--show", "show", "--yes"), ["1 frame "]),
    ],
)
def test_a_job_whose_run_the_database_refuses_to_end_stops_no_other(
    cli: Cli,
    build: Build,
    engine: Engine,
    rows: Rows,
    environment: pytest.MonkeyPatch,
    words: tuple[str, ...],
    said: list[str],
) -> None:
    # given two jobs of which a frame runs, and a database that keeps the proc of the first
    def make(farm: Farm) -> JobIds:
        show, host = farm.show("show"), farm.host(name="render01")
        first, second = (farm.job([LayerSpec(name="render", frames=1)], name=name, show=show) for name in (COMP, LIGHT))
        (proc,) = farm.run(first.frames, host)
        farm.run(second.frames, host)
        farm.connection.execute(
            text("UPDATE proc SET ts_booked = ts_booked - interval '1 minute' WHERE pk_proc = :proc"), {"proc": proc}
        )
        return first

    refuse(engine, "AFTER DELETE ON proc", build(make))
    # when all that runs is ended
    with SimulatedFarm([SimulatedSpec("render01")]) as rendering:
        environment.setenv("OPENCUE_SCHED_RQD__ADDRESSES", json.dumps(rendering.addresses))
        ran = cli(*words)
    # then that of the second is, and the command says what became of both
    assert rows("SELECT str_name FROM proc JOIN job USING (pk_job)") == [(COMP,)]
    assert ran.status == 1
    assert not lacks(ran.out, *said)
    assert not lacks(ran.err, COMP, "it stays")


@pytest.mark.parametrize("verb", ["kill", "retry", "eat"])
def test_a_job_on_which_nobody_can_comment_stops_no_other(
    cli: Cli, jobs: dict[str, JobIds], engine: Engine, rows: Rows, verb: str
) -> None:
    # given a database that takes no comment on the first of two jobs
    refuse(engine, "AFTER INSERT ON comments", jobs[COMP])
    # when both are changed
    ran = cli("job", verb, COMP, LIGHT, *(["--yes"] if verb == "kill" else []))
    # then the second is, and the first is as it was
    assert ran.status == 1
    assert not lacks(ran.err, COMP, "it stays")
    assert f"{LIGHT}" in ran.out
    assert rows("SELECT job.str_name FROM comments JOIN job USING (pk_job)") == [(LIGHT,)]
    kept = rows("SELECT str_name FROM job WHERE str_state = 'PENDING' AND pk_job = :job", job=jobs[COMP].id)
    assert kept == [(COMP,)]
    assert rows("SELECT DISTINCT str_state FROM frame WHERE pk_job = :job", job=jobs[COMP].id) == [("DEAD",)]


def test_a_document_is_all_that_is_on_standard_output_also_after_a_question(
    cli: Cli, jobs: dict[str, JobIds], paused: Callable[[], set[str]]
) -> None:
    agreed = cli("job", "pause", "--user", "alice", "--json", given="y\n")
    assert {job["job"] for job in json.loads(agreed.out)} == {COMP, LIGHT} == paused()
    assert "2 jobs" in agreed.err


def test_who_killed_a_job_is_known_also_when_the_next_one_cannot_be_killed(
    cli: Cli, jobs: dict[str, JobIds], rows: Rows, engine: Engine
) -> None:
    # given that the second job which is killed cannot be
    with engine.begin() as connection:
        connection.execute(
            text(
                "CREATE FUNCTION fails() RETURNS trigger LANGUAGE plpgsql AS"
                " $$ BEGIN IF EXISTS (SELECT FROM job WHERE str_state = 'FINISHED' AND pk_job <> NEW.pk_job)"
                " THEN RAISE 'no'; END IF; RETURN NEW; END $$"
            )
        )
        connection.execute(text("CREATE TRIGGER fails BEFORE UPDATE ON job FOR EACH ROW EXECUTE FUNCTION fails()"))
    # when all are killed
    assert cli("job", "kill", "--show", "show", "--yes", "--reason", "budget").status == 1
    # then the first has its comment
    ((killed,),) = rows("SELECT str_name FROM job WHERE str_state = 'FINISHED'")
    told = rows("SELECT job.str_name, str_subject FROM comments JOIN job USING (pk_job)")
    assert told == [(killed, "killed")]


def test_jobs_of_a_filter_are_killed(cli: Cli, jobs: dict[str, JobIds], rows: Rows) -> None:
    ran = cli("job", "kill", "--user", "alice", "--yes", "--json")
    assert (ran.status, {job["job"] for job in ran.json}) == (0, {COMP, LIGHT})
    assert rows("SELECT str_name FROM job WHERE str_state = 'PENDING'") == [(OTHER,)]


@pytest.mark.parametrize(("verb", "values"), COMMANDS.items())
@pytest.mark.parametrize(
    "choice",
    [(), ("--user", "alice", COMP), ("--name", ""), ("--user", ""), ("--show", "show", "--name", "")],
)
def test_without_a_choice_or_with_two_or_an_empty_one_it_is_refused(
    cli: Cli, jobs: dict[str, JobIds], rows: Rows, verb: str, values: tuple[str, ...], choice: tuple[str, ...]
) -> None:
    ran = cli("job", verb, *choice, *values, "--yes")
    assert ran.status == 2
    assert not lacks(ran.err, "--show", "--user", "--name")
    assert rows("SELECT count(*) FROM comments") == [(0,)]


def test_a_filter_that_finds_nothing_is_refused(cli: Cli, jobs: dict[str, JobIds]) -> None:
    ran = cli("job", "pause", "--user", "nobody", "--yes")
    assert ran.status == 1
    assert (ran.out, len(ran.err.splitlines())) == ("", 1)


def test_jobs_that_are_named_are_changed_without_a_question(
    cli: Cli, jobs: dict[str, JobIds], paused: Callable[[], set[str]]
) -> None:
    assert cli("job", "pause", COMP, OTHER, given="").status == 0
    assert paused() == {COMP, OTHER}
