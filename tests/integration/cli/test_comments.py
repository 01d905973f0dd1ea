"""Comments: what people write on jobs and hosts, and what they did to them and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, text

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.embedded.rqds.simulated_host import HostSpec as SimulatedSpec
from opencue_sched.embedded.rqds.simulated_rqd import SimulatedFarm
from tests.kit.command import Cli
from tests.kit.polling import MOST_SECONDS, eventually
from tests.kit.wording import lacks

Build = Callable[[Callable[[Farm], Any]], Any]
Rows = Callable[..., list[Any]]

JOB, HOST = "show-sh010-alice_comp", "render01"


@pytest.fixture
def farm(build: Build) -> None:
    """A job of two dead frames and one that waits, and a host."""

    def make(farm: Farm) -> None:
        farm.host(name=HOST)
        job = farm.job([LayerSpec(name="render", frames=3)], name=JOB)
        dead = text("UPDATE frame SET str_state = 'DEAD', int_version = int_version + 1 WHERE pk_frame = ANY(:frames)")
        farm.connection.execute(dead, {"frames": list(job.frames[:2])})

    build(make)


@pytest.fixture
def somebody(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("LOGNAME", "wrangler")


@pytest.mark.parametrize(
    ("words", "subject"),
    [
        (("pause", JOB), ["paused"]),
        (("unpause", JOB), ["unpaused"]),
        (("priority", JOB, "80"), ["priority", " 80"]),
        (("priority", JOB, "12345678"), ["priority", " 12345678"]),
        (("max-cores", JOB, "12.5"), ["max-cores", " 12.5"]),
        (("set", JOB, "--max-retries", "2", "--autoeat"), ["retries", " 2", "eat", " on"]),
        (("retry", JOB), ["2 ", "retried"]),
        (("eat", JOB), ["2 ", "eaten"]),
        (("kill", JOB, "--yes"), ["killed"]),
    ],
)
def test_what_a_person_does_to_a_job_is_a_comment_of_it(
    cli: Cli, farm: None, somebody: None, rows: Rows, words: tuple[str, ...], subject: list[str]
) -> None:
    assert cli("job", *words, "--reason", "the client called").status == 0
    ((user, written, message, marked),) = rows(
        "SELECT comments.str_user, str_subject, str_message, b_comment FROM comments JOIN job USING (pk_job)"
    )
    assert (user, lacks(written, *subject), marked) == ("wrangler", [], True)
    assert not lacks(message, written, "wrangler", "the client called")


def test_what_is_set_on_layers_is_a_comment_of_their_job(cli: Cli, farm: None, rows: Rows) -> None:
    assert cli("layer", "set", JOB, "render", "--cores", "2", "--memory", "3GiB").status == 0
    ((subject,),) = rows("SELECT str_subject FROM comments")
    assert not lacks(subject, "render", "cores 2.0", "memory 3GiB")


@pytest.mark.parametrize("words", [("set", JOB, "render", "--cores", "2"), ("start-after", JOB, "render", "clear")])
def test_what_changes_layers_locks_their_job_first_as_a_completion_does(
    cli: Cli, farm: None, rows: Rows, engine: Engine, words: tuple[str, ...]
) -> None:
    waiters = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with ThreadPoolExecutor(1) as threads, engine.begin() as connection:
        connection.execute(text("SELECT FROM job FOR UPDATE"))
        setting = threads.submit(cli, "layer", *words)
        eventually(lambda: rows(waiters), 20, "the command to wait for the job")
        connection.execute(text("SELECT FROM layer FOR NO KEY UPDATE NOWAIT"))
        connection.commit()
        assert setting.result(MOST_SECONDS).status == 0


def test_a_refused_change_leaves_no_comment(cli: Cli, farm: None, rows: Rows) -> None:
    assert cli("layer", "set", JOB, "render", "--cores", "0.5", "--threadable").status == 1
    assert cli("job", "retry", JOB, "--frames", "99").status == 1
    assert rows("SELECT count(*) FROM comments") == [(0,)]


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (("job", "retry", JOB), "SELECT count(*) = 2 FROM frame WHERE str_state = 'DEAD'"),
        (("job", "eat", JOB), "SELECT count(*) = 2 FROM frame WHERE str_state = 'DEAD'"),
        (("job", "eat", JOB, "--state", "RUNNING"), "SELECT count(*) = 1 FROM frame WHERE str_state = 'RUNNING'"),
        (("proc", "kill", "--job", JOB, "--yes"), "SELECT count(*) = 1 FROM frame WHERE str_state = 'RUNNING'"),
        (("job", "kill", JOB, "--yes"), "SELECT str_state = 'PENDING' FROM job"),
        (("job", "depends", "drop", JOB, "--all"), "SELECT bool_and(b_active) FROM depend"),
        (("job", "depends", "add", JOB, "--layer", "render", "--on-layer", "sim"), "SELECT count(*) = 1 FROM depend"),
    ],
)
def test_nothing_is_changed_where_who_did_it_cannot_be_written(
    cli: Cli, build: Build, rows: Rows, environment: pytest.MonkeyPatch, words: tuple[str, ...], left: str
) -> None:
    # given a job with dead frames, one that runs, and a dependency, in a database that takes no comments
    def make(farm: Farm) -> None:
        host = farm.host(name=HOST)
        job = farm.job([LayerSpec(name="render", frames=3), LayerSpec(name="sim"), LayerSpec(name="comp")], name=JOB)
        dead = text("UPDATE frame SET str_state = 'DEAD', int_version = int_version + 1 WHERE pk_frame = ANY(:frames)")
        farm.connection.execute(dead, {"frames": list(job.frames[:2])})
        farm.run(job.frames[2:3], host)
        farm.layer_on_layer((job, 2), (job, 1))
        farm.connection.execute(
            text(
                "CREATE FUNCTION fails() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no comments'; END $$;"
                "CREATE TRIGGER fails BEFORE INSERT ON comments FOR EACH ROW EXECUTE FUNCTION fails()"
            )
        )

    build(make)
    # when something is changed there
    with SimulatedFarm([SimulatedSpec(HOST)]) as rendering:
        environment.setenv("OPENCUE_SCHED_RQD__ADDRESSES", json.dumps(rendering.addresses))
        ran = cli(*words)
    # then all is as it was, and the command says why
    assert rows(left) == [(True,)], ran
    assert ran.status == 1
    assert "no comments" in ran.err


def test_frames_changed_in_several_transactions_have_one_comment(
    cli: Cli, build: Build, rows: Rows, environment: pytest.MonkeyPatch
) -> None:
    # given a job of a frame that runs and one that waits
    def make(farm: Farm) -> None:
        farm.run(farm.job([LayerSpec(name="render", frames=2)], name=JOB).frames[:1], farm.host(name=HOST))

    build(make)
    with SimulatedFarm([SimulatedSpec(HOST)]) as rendering:
        environment.setenv("OPENCUE_SCHED_RQD__ADDRESSES", json.dumps(rendering.addresses))
        assert cli("job", "eat", JOB, "--state", "ANY").status == 0
    ((subject,),) = rows("SELECT str_subject FROM comments")
    assert not lacks(subject, "2 ", "eaten")


@pytest.mark.parametrize(
    ("words", "subject"),
    [
        (("proc", "kill", "--job", JOB, "--yes"), ["2 ", "killed"]),
        (("job", "eat", JOB, "--state", "ANY"), ["3 ", "eaten"]),
        (("job", "retry", JOB, "--state", "RUNNING"), ["2 ", "retried"]),
    ],
)
def test_a_comment_counts_no_frame_whose_change_was_rolled_back(
    cli: Cli, build: Build, rows: Rows, environment: pytest.MonkeyPatch, words: tuple[str, ...], subject: list[str]
) -> None:
    # given a job of three frames that run, of which COMMIT refuses to end the second, and one that waits
    def make(farm: Farm) -> None:
        job, host = farm.job([LayerSpec(name="render", frames=4)], name=JOB), farm.host(name=HOST)
        procs = farm.run(job.frames[:3], host)
        farm.connection.execute(
            text(
                "CREATE FUNCTION refuses() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
                " IF OLD.pk_proc = TG_ARGV[0] THEN RAISE 'it stays'; END IF; RETURN NULL; END $$;"
                "CREATE CONSTRAINT TRIGGER refuses AFTER DELETE ON proc DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"
                f" EXECUTE FUNCTION refuses('{procs[1]}')"
            )
        )

    build(make)
    with SimulatedFarm([SimulatedSpec(HOST)]) as rendering:
        environment.setenv("OPENCUE_SCHED_RQD__ADDRESSES", json.dumps(rendering.addresses))
        assert cli(*words).status == 1
    ((told,),) = rows("SELECT str_subject FROM comments")
    assert not lacks(told, *subject)


def test_comments_are_shown_with_the_job(cli: Cli, farm: None, somebody: None) -> None:
    assert cli("job", "comment", JOB, "wait for v002\nthe camera is wrong", "--subject", "camera").status == 0
    assert cli("job", "pause", JOB).status == 0
    first, second = cli("job", "info", JOB, "--json").json["comments"]
    assert (first["user"], first["subject"], first["message"]) == (
        "wrangler",
        "camera",
        "wait for v002\nthe camera is wrong",
    )
    assert second["subject"] == "paused"
    shown = cli("job", "info", JOB).out
    about, change = (line for line in shown.splitlines() if "wrangler" in line)
    assert not lacks(about, "camera", "wait for v002 the camera is wrong")
    assert "paused" in change


def test_a_host_has_comments_and_the_reason_of_its_lock(cli: Cli, farm: None, somebody: None, rows: Rows) -> None:
    assert cli("host", "comment", HOST, "ticket 4711").status == 0
    assert cli("host", "lock", HOST, "--reason", "fan").status == 0
    written, locked = cli("host", "info", HOST, "--json").json["comments"]
    assert (written["subject"], written["message"]) == ("ticket 4711", "ticket 4711")
    assert not lacks(locked["message"], "locked", "wrangler", "fan")
    assert rows("SELECT b_comment FROM host") == [(True,)]


def test_texts_that_are_too_long_are_cut(cli: Cli, farm: None, environment: pytest.MonkeyPatch, rows: Rows) -> None:
    environment.setenv("LOGNAME", "w" * 50)
    assert cli("job", "comment", JOB, "x" * 5000).status == 0
    assert rows("SELECT length(str_user), length(str_subject), length(str_message) FROM comments") == [(36, 128, 4000)]


def test_an_empty_comment_is_refused(cli: Cli, farm: None) -> None:
    assert cli("job", "comment", JOB, " ").status == 1


def test_explain_tells_the_newest_comments(cli: Cli, farm: None, somebody: None) -> None:
    for number in range(5):
        assert cli("job", "comment", JOB, f"take {number}").status == 0
    told = [line for line in cli("explain", JOB).out.splitlines() if line.startswith("comment ")]
    assert [line.partition("wrangler: ")[2] for line in told] == ["take 2", "take 3", "take 4"]
    first, *_ = cli("explain", JOB, "--json").json["comments"]
    assert (first["user"], first["message"]) == ("wrangler", "take 2")
