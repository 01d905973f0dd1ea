"""Jobs by command: lists, caps, pause, kill, retry, eat and dependencies, on simulated RQDs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from opencue_proto import rqd_pb2
from sqlalchemy import Engine

from opencue_sched.domain.invariants import Invariant
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostIds, JobIds, LayerSpec
from opencue_sched.embedded.rqds.simulated_host import Behaviour
from opencue_sched.embedded.rqds.simulated_host import HostSpec as SimulatedSpec
from opencue_sched.embedded.rqds.simulated_rqd import SimulatedFarm
from opencue_sched.rqd.channels import RqdChannels
from opencue_sched.rqd.launch import LaunchRequest, launch_all
from opencue_sched.settings import Rqd
from opencue_sched.store.audit import judge
from tests.kit.command import Cli
from tests.kit.wording import lacks

Build = Callable[[Callable[[Farm], Any]], Any]
Rows = Callable[..., list[Any]]

NAME = "show-sh010-artist_comp"
COUNTERS_ARE_EMPTY = {"announce_failed"}
"""The only line of a log that a command here may show: no worker has filled the counters."""


@dataclass(frozen=True)
class Running:
    """A job of a layer of six frames and one that depends on it; two frames of the first run."""

    job: JobIds
    host: HostIds
    procs: list[str]


@pytest.fixture
def running(build: Build) -> Running:
    def make(farm: Farm) -> Running:
        host = farm.host(name="render01", cores=8, memory_gb=16)
        layers = [LayerSpec(name="render", frames=6, cores=1), LayerSpec(name="comp", frames=1)]
        job = farm.job(layers, name=NAME, max_cores=10, priority=50)
        farm.layer_on_layer((job, 1), (job, 0))
        return Running(job, host, farm.run(job.frames[:2], host))

    made: Running = build(make)
    return made


@pytest.fixture
def rqd(environment: pytest.MonkeyPatch) -> Iterator[SimulatedFarm]:
    """An RQD on render01 that runs frames until they are killed."""
    with SimulatedFarm([SimulatedSpec("render01")], behaviour=Behaviour(run_seconds=(600.0, 600.0))) as farm:
        environment.setenv("OPENCUE_SCHED_RQD__ADDRESSES", json.dumps(farm.addresses))
        yield farm


@pytest.fixture
def rendering(rqd: SimulatedFarm, running: Running) -> Running:
    """The two frames run on the RQD as well."""
    channels = RqdChannels(Rqd(addresses=rqd.addresses))
    requests = [
        LaunchRequest(
            "render01",
            rqd_pb2.RunFrame(
                resource_id=proc,
                frame_id=frame,
                job_id=running.job.id,
                frame_name=frame,
                command="sleep",
                num_cores=100,
            ),
        )
        for proc, frame in zip(running.procs, running.job.frames, strict=False)
    ]
    try:
        assert [it.error for it in launch_all(channels, requests)] == [None] * 2
    finally:
        channels.close()
    return running


@pytest.fixture
def nobody(environment: pytest.MonkeyPatch) -> None:
    """Nobody listens where render01's RQD should be."""
    environment.setenv("OPENCUE_SCHED_RQD__ADDRESSES", json.dumps({"render01": "127.0.0.1:1"}))
    environment.setenv("OPENCUE_SCHED_RQD__TIMEOUT", "1s")


@pytest.fixture
def states(rows: Rows) -> Callable[[], dict[str, str]]:
    return lambda: {row.str_name: row.str_state for row in rows("SELECT str_name, str_state FROM frame")}


def assert_sound(engine: Engine) -> None:
    with engine.connect() as connection:
        assert judge(connection, Invariant.LAYER_COUNTERS_MATCH_FRAMES).wrong == 0
        assert judge(connection, Invariant.HOST_IDLE_MATCHES_PROCS).wrong == 0


def set_state(engine: Engine, job: JobIds, frames: tuple[int, ...], state: str) -> None:
    with engine.begin() as connection:
        for index in frames:
            connection.exec_driver_sql(
                "UPDATE frame SET str_state = %s, int_version = int_version + 1 WHERE pk_frame = %s",
                (state, job.frames[index]),
            )


def test_jobs_are_listed_with_what_they_do(cli: Cli, running: Running) -> None:
    (job,) = cli("job", "list", "--json").json
    assert (job["job"], job["state"], job["user"]) == (NAME, "PENDING", "artist")
    assert (job["running"], job["waiting"], job["depend"], job["frames"]) == (2, 4, 1, 7)
    assert (job["cores"], job["max_cores"], job["priority"]) == (2, 10, 50)
    table = cli("job", "list")
    assert table.words[0][:9] == ["Job", "Folder", "User", "State", "Booked", "Cores", "Wait", "Depend", "Dead"]
    assert table.words[1][:9] == [NAME, "show", "artist", "PENDING", "2", "2", "4", "1", "0"]


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ((), 1),
        (("--show", "show"), 1),
        (("--user", "nobody"), 0),
        (("--state", "finished"), 1),
        (("--state", "all"), 2),
        (("--name", "COMP"), 1),
        (("--name", "light", "--state", "all"), 0),
    ],
)
def test_jobs_are_chosen(cli: Cli, running: Running, build: Build, words: tuple[str, ...], count: int) -> None:
    def finish(farm: Farm) -> None:
        old = farm.job(name="old", show=running.job.show)
        farm.connection.exec_driver_sql(
            "UPDATE job SET str_state = 'FINISHED', str_visible_name = NULL WHERE pk_job = %s", (old.id,)
        )

    build(finish)
    assert len(cli("job", "list", "--json", *words).json) == count


def test_a_job_is_shown_with_its_layers(cli: Cli, running: Running) -> None:
    ran = cli("job", "info", NAME)
    assert (ran.status, ran.err) == (0, "")
    caps = {("Min", "Cores", "1"), ("Max", "Cores", "10")}
    counts = {("Frames", "7"), ("Done", "0"), ("Booked", "2"), ("Wait", "4"), ("Depend", "1"), ("Dead", "0")}
    assert caps | counts <= {tuple(words) for words in ran.words}
    assert "Eligible Time" in ran.out
    assert "Gpu" not in ran.out, "GPUs, as the tables have it"
    info = cli("job", "info", running.job.id, "--json").json
    render, comp = info["layers"]
    assert (render["layer"], render["frames"], render["running"], render["waiting"]) == ("render", 6, 2, 4)
    assert render["eligible"] is not None
    assert (comp["depend"], comp["eligible"]) == (1, None)


def test_frames_are_listed_by_layer_number_and_state(cli: Cli, running: Running) -> None:
    everything = cli("job", "frames", NAME, "--json").json
    assert [frame["frame"] for frame in everything][-2:] == ["0006-render", "0001-comp"]
    some = cli("job", "frames", NAME, "--layer", "render", "--frames", "2-4", "--state", "waiting", "--json").json
    assert [frame["number"] for frame in some] == [3, 4]
    table = cli("job", "frames", NAME, "--state", "RUNNING")
    assert table.words[1][:4] == ["0001-render", "RUNNING", "render01", "1"]
    cut = cli("job", "frames", NAME, "--most", "2")
    assert "--most" in cut.err


def test_jobs_are_paused_and_unpaused(cli: Cli, running: Running, rows: Rows) -> None:
    (paused,) = cli("job", "pause", NAME, "--json").json
    assert (paused["job"], paused["paused"], paused["state"]) == (NAME, True, "PAUSED")
    assert rows("SELECT b_paused FROM job") == [(True,)]
    assert cli("job", "list", "--json").json[0]["state"] == "PAUSED"
    assert [words[:4] for words in cli("job", "pause", NAME).words][1] == [NAME, "show", "artist", "PAUSED"]
    assert cli("job", "unpause", NAME, "--json").json[0]["paused"] is False


def test_priority_and_caps_are_set(cli: Cli, running: Running, rows: Rows) -> None:
    assert cli("job", "priority", NAME, "80", "--json").json[0]["priority"] == 80
    assert cli("job", "max-cores", NAME, "12.5").status == 0
    assert cli("job", "min-cores", NAME, "2").status == 0
    assert cli("job", "max-gpus", NAME, "0").words[1][0] == NAME
    columns = rows("SELECT int_priority, int_max_cores, int_min_cores, int_max_gpus FROM job_resource")
    assert columns == [(80, 1250, 200, -1)]
    assert cli("job", "max-cores", NAME, "-1").status == 0
    assert rows("SELECT int_max_cores FROM job_resource") == [(-1,)]
    assert cli("job", "priority", NAME, "-5").status == 0
    assert rows("SELECT int_priority FROM job_resource") == [(-5,)]


def test_a_job_is_killed_with_what_runs_of_it(
    cli: Cli, rendering: Running, rqd: SimulatedFarm, engine: Engine, rows: Rows
) -> None:
    ran = cli("job", "kill", NAME, "--yes", "--reason", "wrong camera")
    assert ran.status == 0
    assert not lacks(ran.out, "killed", NAME, "2 running frames")
    assert set(re.findall(r"^\[\w+ *\] (\w+)", ran.err, re.M)) <= COUNTERS_ARE_EMPTY
    assert rqd.host("render01").frame_ids == frozenset()
    assert rows("SELECT str_state, str_visible_name FROM job") == [("FINISHED", None)]
    assert rows("SELECT count(*) FROM proc") == [(0,)]
    assert_sound(engine)


def test_killing_asks_first(cli: Cli, running: Running, nobody: None, rows: Rows) -> None:
    for given in ("n\n", "\n", ""):  # no, Enter, and no input at all
        ran = cli("job", "kill", NAME, given=given)
        assert (ran.status, "nothing" in ran.err) == (1, True)
        assert rows("SELECT str_state FROM job") == [("PENDING",)]


def test_what_cannot_be_confirmed_dead_is_said(cli: Cli, running: Running, nobody: None, rows: Rows) -> None:
    ran = cli("job", "kill", NAME, "--yes")
    assert ran.status == 1
    said, *where = ran.err.splitlines()
    assert not lacks(said, NAME, "2 frames")
    told = [line.partition(" (UNAVAILABLE: ")[0] for line in where]
    assert [lacks(line, f"000{n}-render", "render01 (127.0.0.1:1)") for n, line in enumerate(told, 1)] == [[], []]
    assert rows("SELECT count(*) FROM proc") == [(2,)]


def test_dead_frames_are_retried_unless_a_state_is_named(
    cli: Cli, running: Running, nobody: None, engine: Engine, states: Callable[[], dict[str, str]]
) -> None:
    set_state(engine, running.job, (3, 4), "DEAD")
    assert not lacks(cli("job", "retry", NAME).out, NAME, "2 frames")
    assert set(states().values()) == {"RUNNING", "WAITING", "DEPEND"}
    refused = cli("job", "retry", NAME)
    assert refused.status == 1
    assert not lacks(refused.err, NAME, "DEAD", "--state")
    assert_sound(engine)


def test_running_frames_are_killed_before_they_are_retried(
    cli: Cli, rendering: Running, rqd: SimulatedFarm, states: Callable[[], dict[str, str]]
) -> None:
    ran = cli("job", "retry", NAME, "--layer", "render", "--frames", "1", "--state", "RUNNING", "--json")
    assert (ran.status, ran.json["changed"]) == (0, [rendering.job.frames[0]])
    assert ran.json["frames"] == ["0001-render"]
    assert set(re.findall(r"^\[\w+ *\] (\w+)", ran.err, re.M)) <= COUNTERS_ARE_EMPTY
    assert rqd.host("render01").frame_ids == {rendering.job.frames[1]}
    assert (states()["0001-render"], states()["0002-render"]) == ("WAITING", "RUNNING")


def test_a_retried_frame_of_a_finished_job_makes_it_pending_again(
    cli: Cli, running: Running, rqd: SimulatedFarm, rows: Rows
) -> None:
    assert cli("job", "kill", NAME, "--yes").status == 0
    assert cli("job", "retry", NAME, "--state", "any").status in (0, 1)
    assert cli("job", "eat", running.job.id, "--frames", "1", "--layer", "render", "--state", "ANY").status == 0
    assert cli("job", "retry", running.job.id, "--state", "EATEN").status == 0
    assert rows("SELECT str_state, str_visible_name FROM job") == [("PENDING", NAME)]


def test_eaten_frames_let_layers_and_the_job_finish(
    cli: Cli, build: Build, nobody: None, engine: Engine, rows: Rows
) -> None:
    job = build(lambda farm: farm.job([LayerSpec(name="a", frames=3)], name=NAME))
    set_state(engine, job, (0, 1), "DEAD")
    assert not lacks(cli("job", "eat", NAME).out, NAME, "2 frames")
    assert rows("SELECT str_state FROM job") == [("PENDING",)]
    assert cli("job", "eat", NAME, "--state", "WAITING").status == 0
    assert rows("SELECT str_state FROM job") == [("FINISHED",)]
    assert_sound(engine)


def test_dependencies_are_listed_and_dropped(
    cli: Cli, build: Build, rows: Rows, engine: Engine, states: Callable[[], dict[str, str]]
) -> None:
    def make(farm: Farm) -> None:
        layers = [LayerSpec(name=name, frames=2) for name in ("sim", "render", "comp")]
        job = farm.job(layers, name=NAME, activate=False)
        other = farm.job([LayerSpec(name="geo")], name="show-sh010-artist_model")
        farm.frame_by_frame((job, 1), (job, 0))
        farm.layer_on_layer((job, 2), (job, 1))
        farm.layer_on_layer((job, 2), (other, 0), any_frame=True)
        farm.job_on_job(job, other)
        farm.activate([job])

    build(make)
    listed = cli("job", "depends", "list", NAME, "--json").json
    assert {(one["waits"], one["on"]) for one in listed} == {
        ("layer render", "layer sim, frame by frame"),
        ("layer comp", "layer render"),
        ("layer comp", "any frame of layer geo of job show-sh010-artist_model"),
        ("the job", "job show-sh010-artist_model"),
    }
    (pairs,) = [one for one in listed if one["on"].endswith("frame by frame")]
    table = cli("job", "depends", "list", NAME)
    assert any(words[0] == pairs["id"] for words in table.words)

    # dropping what groups pairs of frames drops the pairs
    ran = cli("job", "depends", "drop", NAME, pairs["id"], "--json")
    assert (ran.status, ran.json["dropped"]) == (0, 2)
    assert [one["id"] for one in cli("job", "depends", "list", NAME, "--json").json if one["id"] == pairs["id"]] == []
    assert set(states().values()) == {"DEPEND", "WAITING"}

    assert not lacks(cli("job", "depends", "drop", NAME, "--all").out, NAME, "3 ", "6 frames")
    assert set(states().values()) == {"WAITING"}
    assert cli("job", "depends", "list", NAME, "--json").json == []
    assert len(cli("job", "depends", "list", NAME, "--all", "--json").json) == 4
    assert_sound(engine)


@pytest.mark.parametrize(
    ("words", "status", "problem"),
    [
        (("job", "info", "show-sh010-artist_cmop"), 1, [f"'{NAME}'"]),
        (("job", "frames", NAME, "--layer", "rendr"), 1, ["'rendr'", "'render'"]),
        (("job", "frames", NAME, "--frames", "1-x"), 2, ["'1-x'"]),
        (("job", "retry", NAME, "--state", "BROKEN"), 2, ["'BROKEN'"]),
        (("job", "retry", NAME, "--frames", "99"), 1, ["DEAD", "--state"]),
        (("job", "max-cores", NAME, "0.2"), 2, ["core"]),
        (("job", "priority", NAME, "high"), 2, ["'high'"]),
        (("job", "pause", "a", "b"), 1, ["'b'"]),
        (("job", "depends", "drop", NAME), 2, ["--all"]),
        (("job", "depends", "drop", NAME, "x"), 1, ["'x'", f"`opencue-sched job depends list {NAME}`"]),
        (("job", "list", "--show", "shwo"), 1, ["'shwo'", "'show'"]),
    ],
)
def test_what_is_wrong_is_said(
    cli: Cli, running: Running, words: tuple[str, ...], status: int, problem: list[str]
) -> None:
    ran = cli(*words)
    assert ran.status == status
    assert not lacks(ran.err, *problem)
