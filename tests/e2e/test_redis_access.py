"""A whole fleet as a Redis user that may do what the guide to running a fleet lists, and nothing else."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from pydantic import SecretStr

from benchmarks import warm_start
from opencue_sched.clients.lua_scripts import lua_directory
from opencue_sched.coordination.jobboard import JobBoard
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.embedded.servers.services import EmbeddedRedis
from opencue_sched.insight.redis_access import COMMANDS, access_of
from opencue_sched.settings import Settings
from tests.e2e.fleets import FleetOnTest, fleet_on
from tests.e2e.test_farm_page import flower, status
from tests.kit.command import PROGRAM
from tests.kit.polling import eventually

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "run.md"
RARE = {"rpop", "rpush", "select", "hget", "unwatch", "blpop"}
"""Commands that this fleet need not come to: of kombu's, a message that is got or put back, a database other than 0, a
transaction that is given up; of ours, the wait for an answer that is there when it is first looked for."""


def acl_of_the_guide() -> str:
    """What the guide has an administrator type after the user's name and password."""
    (found,) = re.findall(r"^ACL SETUSER farm on >PASSWORD (.*?)^```", GUIDE.read_text(encoding="utf-8"), re.S | re.M)
    return str(found)


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def admin(server: EmbeddedRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        yield client


@pytest.fixture
def as_farm(settings: Settings, server: EmbeddedRedis, admin: redis.Redis) -> Settings:
    """Settings of a fleet whose user may do what the guide says."""
    admin.execute_command("ACL", "SETUSER", "farm", "on", ">secret", *acl_of_the_guide().split())
    url = f"redis://farm:secret@127.0.0.1:{server.port}/0"
    return settings.model_copy(update={"redis_url": SecretStr(url)})


def run(fleet: FleetOnTest, *words: str) -> str:
    """The output of a command that succeeds."""
    ran = warm_start.run([*PROGRAM, *words], env=fleet.fleet.environment)
    assert ran.returncode == 0, (words, ran.stdout, ran.stderr)
    return ran.stdout


def celery(fleet: FleetOnTest, *words: str) -> str:
    command = [sys.executable, "-m", "celery", "-A", "opencue_sched", *words]
    ran = warm_start.run(command, env=fleet.fleet.environment)
    assert ran.returncode == 0, (words, ran.stdout, ran.stderr)
    return ran.stdout


def use_a_jobboard(url: str) -> None:
    with (
        redis.Redis.from_url(url, decode_responses=True) as client,
        JobBoard(client, "cue", name="conversions") as board,
    ):
        heard: list[str] = []
        board.notifier.register("POSTED", lambda kind, **_: heard.append(kind))
        board.post("convert")
        board.consume(board.claim_next("me", 5), "me")
        eventually(lambda: heard == ["POSTED"], what="the event")


def refused(admin: redis.Redis) -> list[tuple[str, str]]:
    """What any user was refused. CLIENT is redis-py's, which does without: it tells its name and version."""
    said = [{str(name): str(value) for name, value in entry.items()} for entry in admin.acl_log(100)]
    entries = [(entry["reason"], entry["object"]) for entry in said]
    return [entry for entry in entries if not entry[1].startswith("client")]


def used(admin: redis.Redis) -> set[str]:
    """The commands that were carried out."""
    stats = admin.info("commandstats")
    return {name.removeprefix("cmdstat_") for name, figures in stats.items() if figures["calls"]}


def in_scripts() -> set[str]:
    """The commands that our scripts call."""
    texts = [path.read_text(encoding="utf-8") for path in lua_directory().rglob("*.lua")]
    return {name.lower() for text in texts for name in re.findall(r"\b(?:p?call|try)\('([A-Z]+)'", text)}


def test_the_guide_has_the_rules_that_are_looked_for_at_a_start():
    assert acl_of_the_guide().split() == ["resetkeys", "resetchannels", "-@all", *access_of(Settings()).rules()]


def test_the_rules_allow_every_command_of_our_scripts():
    assert in_scripts() - set(COMMANDS) == set()


def test_a_fleet_works_with_the_acl_of_the_guide_and_uses_all_of_it(as_farm, engine, admin, tmp_path):
    with engine.begin() as connection:
        Farm(connection).default_show()
    admin.acl_log_reset()
    admin.config_resetstat()
    # given a fleet with all its processes
    with fleet_on(as_farm, engine, admin, tmp_path) as fleet, flower(fleet) as page:
        # when a job is rendered, the fleet is steered and looked at, and somebody uses a jobboard
        with engine.begin() as connection:
            farm = Farm(connection)
            show = farm.show("second")
            farm.subscription(show, farm.default_alloc(), size=100)
            job = farm.job(layers=[LayerSpec(frames=20)], show=show, os=None)
        fleet.wait_for("the job's end", lambda: fleet.finished(job.id))
        assert json.loads(run(fleet, "ctl", "pause", "--json")) == {"worker1@localhost": {"ok": "paused"}}
        run(fleet, "ctl", "resume")
        run(fleet, "doctor")
        eventually(lambda: '"failed": false' in run(fleet, "audit", "--json"), 30, "a clean audit")
        (posting, *_) = json.loads(run(fleet, "board", "list", "--json"))
        run(fleet, "dispatch", "--cluster", posting["cluster"], "--wait")
        run(fleet, "board", "trash", posting["cluster"], "--force")
        run(fleet, "board", "restore", posting["cluster"])
        assert [worker["instance"] for worker in json.loads(run(fleet, "fleet", "--json"))["workers"]] == ["worker1"]
        assert "pong" in celery(fleet, "inspect", "ping")
        for path in ("/farm/data", "/broker", "/worker/worker1@localhost"):
            eventually(lambda path=path: status(f"{page}{path}") == 200, 30, path)
        use_a_jobboard(as_farm.redis_dsn)
        fleet.fleet.stop("worker1")
        fleet.fleet.stop("beat")
        assert fleet.fleet.ended() == []
    # then nothing was refused, and nothing is allowed that nobody uses
    assert refused(admin) == []
    assert set(COMMANDS) - used(admin) - in_scripts() <= RARE
    assert in_scripts() <= set(COMMANDS)
