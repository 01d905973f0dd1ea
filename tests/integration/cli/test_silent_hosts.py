"""Frames on hosts that stopped reporting: what the commands say becomes of them, and what --force does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine, text

from opencue_sched.celery import app
from opencue_sched.cli import deferred
from opencue_sched.domain.invariants import Invariant
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobIds, LayerSpec
from opencue_sched.reports.completion import Releaser
from opencue_sched.reports.reaper import reap
from opencue_sched.rqd.channels import RqdChannels
from opencue_sched.rqd.kill import RqdKiller
from opencue_sched.settings import Release, Rqd
from opencue_sched.store.audit import judge
from tests.kit.command import Cli
from tests.kit.frozen_clock import Clock
from tests.kit.wording import lacks

Build = Callable[[Callable[[Farm], Any]], Any]
Rows = Callable[..., list[Any]]

NAME = "show-sh010-artist_comp"
NOWHERE = {f"render0{number}": "127.0.0.1:1" for number in (1, 2, 3, 4)}


@dataclass(frozen=True)
class Rendering:
    """A job with two frames on render01, where nobody answers; three more hosts report."""

    job: JobIds

    @property
    def running(self) -> list[str]:
        return list(self.job.frames[:2])


@pytest.fixture
def rendering(build: Build, environment: pytest.MonkeyPatch) -> Rendering:
    environment.setenv("OPENCUE_SCHED_RQD__ADDRESSES", json.dumps(NOWHERE))
    environment.setenv("OPENCUE_SCHED_RQD__TIMEOUT", "1s")

    def make(farm: Farm) -> JobIds:
        hosts = [farm.host(name=name, cores=8) for name in NOWHERE]
        job = farm.job([LayerSpec(name="render", frames=3)], name=NAME)
        farm.run(job.frames[:2], hosts[0])
        return job

    return Rendering(build(make))


@pytest.fixture
def silence(engine: Engine) -> Callable[..., None]:
    """Has hosts be silent for so many seconds, in a state."""

    def run(seconds: float, state: str = "UP", hosts: tuple[str, ...] = ("render01",)) -> None:
        with engine.begin() as connection:
            connection.execute(
                text(
                    "UPDATE host_stat SET ts_ping = now() - :s * interval '1 s', str_state = :state"
                    " WHERE pk_host IN (SELECT pk_host FROM host WHERE str_name = ANY(:hosts))"
                ),
                {"s": seconds, "state": state, "hosts": list(hosts)},
            )

    return run


@pytest.fixture
def worker(engine: Engine, environment: pytest.MonkeyPatch) -> list[str]:
    """A worker that runs what it is sent at once; the tasks it was sent."""
    sent: list[str] = []

    def send_task(name: str, **_: Any) -> None:
        sent.append(name)
        with RqdChannels(Rqd(addresses=NOWHERE, timeout=1.0)) as channels:
            reap(Releaser(engine, Release()), RqdKiller(channels))

    environment.setattr(app, "send_task", send_task)
    return sent


def states(rows: Rows) -> list[str]:
    return [row.str_state for row in rows("SELECT str_state FROM frame ORDER BY int_number")]


@pytest.mark.parametrize(
    ("seconds", "state", "words"),
    [
        (200, "UP", ["reaper", "30 s", "DOWN", "5m", "15m"]),
        (150, "DOWN", ["(DOWN)", "2 frames", " 2m"]),
        (600, "REBOOTING", ["(REBOOTING)", "boots", "RQD"]),
    ],
)
def test_explain_names_silent_hosts_and_when_their_frames_are_given_up(
    cli: Cli, rendering: Rendering, silence: Callable[..., None], seconds: int, state: str, words: list[str]
) -> None:
    assert cli("explain", NAME, "--json").json["silent_hosts"] == []
    silence(seconds, state)
    (line,) = [line for line in cli("explain", NAME).out.splitlines() if "render01" in line]
    assert not lacks(line, *words)
    (host,) = cli("explain", NAME, "--json").json["silent_hosts"]
    assert (host["host"], host["state"], host["frames"]) == ("render01", state, ["0001-render", "0002-render"])


@pytest.mark.parametrize(("origin", "reaps"), [("cuebot", False), ("opencue-sched", True)])
def test_of_an_unmanaged_show_beside_a_cuebot_the_cuebot_decides(
    cli: Cli, rendering: Rendering, silence: Callable[..., None], engine: Engine, origin: str, reaps: bool
) -> None:
    # given a silent host with frames of a show that is not managed
    silence(400)
    with engine.begin() as connection:
        connection.execute(text("UPDATE opencue_sched_origin SET origin = :origin"), {"origin": origin})
        connection.execute(text("UPDATE show SET b_scheduler_managed = false"))
    # when somebody asks, then our reaper is named only where it looks after all shows
    told = cli("explain", NAME).out
    assert "render01" in told
    assert ("reaper" in told) == reaps


@pytest.mark.parametrize(
    "command", [("kill", "--yes"), ("eat", "--state", "RUNNING"), ("retry", "--state", "RUNNING")], ids=lambda it: it[0]
)
def test_a_frame_of_a_silent_host_stays_and_it_is_said_until_when(
    cli: Cli, rendering: Rendering, silence: Callable[..., None], worker: list[str], rows: Rows, command: Any
) -> None:
    silence(200)
    ran = cli("job", command[0], NAME, *command[1:], "--force")
    assert ran.status == 1
    assert not lacks(ran.err, "render01 (UP)", "2 frames", " 3m")
    assert not lacks(ran.err, "--force", "reaper")
    assert (worker, states(rows)[:2]) == ([], ["RUNNING", "RUNNING"])


@pytest.mark.parametrize(
    ("command", "after"),
    [
        (("kill", "--yes"), ["WAITING", "WAITING", "WAITING"]),
        (("eat", "--state", "RUNNING"), ["EATEN", "EATEN", "WAITING"]),
        (("retry", "--state", "RUNNING"), ["WAITING", "WAITING", "WAITING"]),
    ],
    ids=lambda it: it[0],
)
def test_force_has_a_worker_reap_what_is_on_a_host_that_is_down(
    cli: Cli,
    rendering: Rendering,
    silence: Callable[..., None],
    worker: list[str],
    rows: Rows,
    engine: Engine,
    command: Any,
    after: list[str],
) -> None:
    # given a host that is DOWN
    silence(400, "DOWN")
    # when it is forced
    ran = cli("job", command[0], NAME, *command[1:], "--force", "--json")
    # then the worker reaped, nothing is left, and the frames are what was asked for
    assert worker == ["opencue_sched.maintenance.reap"]
    found = ran.json[0] if command[0] == "kill" else ran.json
    assert (ran.status, found["deferred"]) == (0, [])
    assert sorted(found["stopped" if command[0] == "kill" else "changed"]) == sorted(rendering.running)
    assert found["silent_hosts"][0]["host"] == "render01"
    assert states(rows) == after
    assert rows("SELECT count(*) FROM proc") == [(0,)]
    with engine.connect() as connection:
        assert [
            judge(connection, rule).wrong
            for rule in (Invariant.LAYER_COUNTERS_MATCH_FRAMES, Invariant.HOST_IDLE_MATCHES_PROCS)
        ] == [0, 0]


def test_without_a_worker_force_says_so(
    cli: Cli, rendering: Rendering, silence: Callable[..., None], environment: pytest.MonkeyPatch, rows: Rows
) -> None:
    silence(400, "DOWN")
    clock = Clock()
    environment.setattr(deferred, "time", SimpleNamespace(monotonic=clock, sleep=clock.advance))
    environment.setattr(app, "send_task", lambda *_, **__: None)
    ran = cli("job", "eat", NAME, "--state", "RUNNING", "--force")
    assert (ran.status, states(rows)[0]) == (1, "RUNNING")
    assert "worker" in ran.err
