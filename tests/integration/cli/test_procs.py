"""`opencue-sched proc`: what runs is listed, and killed by proc or by place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from opencue_proto import rqd_pb2
from sqlalchemy import Engine

from opencue_sched.domain.invariants import Invariant
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobIds, LayerSpec
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

HOSTS = ("render01", "render02")


@dataclass(frozen=True)
class Rendering:
    """Two frames of job ``a`` on render01 and one of job ``b`` on render02, all of which run there."""

    jobs: tuple[JobIds, JobIds]
    procs: list[str]
    rqd: SimulatedFarm


@pytest.fixture
def rendering(build: Build, environment: pytest.MonkeyPatch) -> Iterator[Rendering]:
    def make(farm: Farm) -> tuple[tuple[JobIds, JobIds], list[str]]:
        here, there = (farm.host(name=name, cores=8) for name in HOSTS)
        a, b = (farm.job([LayerSpec(name="render", frames=3)], name=name) for name in ("show-s-u_a", "show-s-u_b"))
        return (a, b), [*farm.run(a.frames[:2], here), *farm.run(b.frames[:1], there)]

    (a, b), procs = build(make)
    with SimulatedFarm([SimulatedSpec(name) for name in HOSTS], behaviour=Behaviour(run_seconds=(600.0, 600.0))) as rqd:
        environment.setenv("OPENCUE_SCHED_RQD__ADDRESSES", json.dumps(rqd.addresses))
        placed = zip(procs, [*a.frames[:2], b.frames[0]], [a, a, b], ["render01", "render01", "render02"], strict=True)
        requests = [
            LaunchRequest(
                host,
                rqd_pb2.RunFrame(
                    resource_id=proc, frame_id=frame, job_id=job.id, frame_name=frame, command="sleep", num_cores=100
                ),
            )
            for proc, frame, job, host in placed
        ]
        with RqdChannels(Rqd(addresses=rqd.addresses)) as channels:
            assert {launched.error for launched in launch_all(channels, requests)} == {None}
        yield Rendering((a, b), procs, rqd)


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ((), 3),
        (("--host", "render01"), 2),
        (("--job", "show-s-u_b"), 1),
        (("--host", "render01", "--job", "show-s-u_b"), 0),
        (("--show", "show"), 3),
        (("--alloc", "local.general"), 3),
        (("--most", "1"), 1),
    ],
)
def test_procs_are_listed_by_where_they_are(cli: Cli, rendering: Rendering, words: tuple[str, ...], count: int) -> None:
    found = cli("proc", "list", *words, "--json").json
    assert len(found) == count
    assert len(cli("proc", "list", *words).out.splitlines()) == (count + 1 if count else 0)
    assert {proc["id"] for proc in found} <= set(rendering.procs)
    frames = {(proc["host"], proc["job"], proc["frame"], proc["layer"]) for proc in found}
    assert frames <= {
        ("render01", "show-s-u_a", "0001-render", "render"),
        ("render01", "show-s-u_a", "0002-render", "render"),
        ("render02", "show-s-u_b", "0001-render", "render"),
    }


def test_a_proc_is_killed_and_its_frame_waits_again(cli: Cli, rendering: Rendering, rows: Rows, engine: Engine) -> None:
    # when a person refuses, and then does not
    assert cli("proc", "kill", rendering.procs[0], given="n\n").status == 1
    ran = cli("proc", "kill", rendering.procs[0], "--yes", "--json")
    # then that frame alone is gone from its host, and waits
    frame = rendering.jobs[0].frames[0]
    assert (ran.status, ran.json) == (0, {"killed": [frame], "deferred": [], "silent_hosts": []})
    assert rendering.rqd.host("render01").frame_ids == {rendering.jobs[0].frames[1]}
    assert rows("SELECT str_state FROM frame WHERE pk_frame = :f", f=frame) == [("WAITING",)]
    assert rows("SELECT count(*) FROM proc") == [(2,)]
    with engine.connect() as connection:
        assert [
            judge(connection, rule).wrong
            for rule in (Invariant.LAYER_COUNTERS_MATCH_FRAMES, Invariant.HOST_IDLE_MATCHES_PROCS)
        ] == [0, 0]


def test_everything_of_a_show_is_killed_whatever_its_jobs(cli: Cli, rendering: Rendering, rows: Rows) -> None:
    ran = cli("proc", "kill", "--show", "show", given="y\n")
    assert (ran.status, lacks(ran.out, "3 frames", "2 jobs", "[y/N]")) == (0, [])
    assert rendering.rqd.running() == {}
    assert rows("SELECT count(*) FROM proc") == [(0,)]


def test_what_cannot_be_confirmed_dead_stays(
    cli: Cli, rendering: Rendering, rows: Rows, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("OPENCUE_SCHED_RQD__TIMEOUT", "1s")
    rendering.rqd.crash("render01")
    ran = cli("proc", "kill", *rendering.procs, "--yes", "--json")
    assert ran.status == 1
    assert sorted(ran.json["deferred"]) == sorted(rendering.jobs[0].frames[:2])
    assert ran.json["killed"] == [rendering.jobs[1].frames[0]]
    assert not lacks(ran.err, "2 frames")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), ["--host"]),
        (("no-such-proc",), ["no-such-proc"]),
        (("--job", "show-s-u_c"), ["'show-s-u_c'"]),
    ],
)
def test_what_is_wrong_is_said(cli: Cli, rendering: Rendering, words: tuple[str, ...], problem: list[str]) -> None:
    ran = cli("proc", "kill", *words, "--yes")
    assert ran.status in (1, 2)
    assert not lacks(ran.err, *problem)
    assert len(rendering.rqd.running()) == 3
