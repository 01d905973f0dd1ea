"""Shows, allocations, subscriptions and limits by command: a farm from nothing, its lists, and what is refused."""

from __future__ import annotations

import json
import re
import select
import signal
from collections.abc import Callable
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, text

from opencue_sched.accounting.bootstrap import ensure_bootstrapped
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.show_handover import ImportedShows, hand_back, hand_over
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.settings import Accounting, Settings
from tests.kit.command import Cli
from tests.kit.import_notes import pass_quarantines
from tests.kit.polling import MOST_SECONDS, eventually
from tests.kit.terminal import on_terminal
from tests.kit.wording import lacks

Build = Callable[[Callable[[Farm], Any]], Any]
Rows = Callable[..., list[Any]]

JOB = """
show: demo
shot: sh010
user: alice
name: render_v1
layers:
  - {name: render, command: "render #FRAME#", range: 1-4, tags: gpu, limits: arnold}
"""


def listed(rows: list[dict[str, Any]], key: str, name: str) -> dict[str, Any]:
    (row,) = [row for row in rows if row[key] == name]
    return row


def test_a_farm_is_made_from_nothing_by_commands(cli: Cli, rows: Rows) -> None:
    for words in (
        ("show", "create", "demo", "--managed"),
        ("show", "default-max-cores", "demo", "200"),
        ("alloc", "create", "cloud.gpu", "--tag", "gpu", "--new-facility"),
        ("subscription", "create", "demo", "cloud.gpu", "100", "150%"),
        ("limit", "create", "arnold", "5"),
    ):
        ran = cli(*words)
        assert (ran.status, ran.err) == (0, "")
    ran = cli("submit", "-", "--json", given=JOB.replace("name: render_v1", "name: render_v1\nfacility: cloud"))
    assert (ran.status, ran.json["frames"], ran.json["facility"]) == (0, 4, "cloud")
    assert rows("SELECT int_max_cores FROM job_resource") == [(20_000,)]
    show_id = cli("show", "info", "demo", "--json").json["id"]
    folders = "SELECT pk_parent_folder, str_name FROM folder JOIN folder_resource USING (pk_folder) WHERE pk_show = :s"
    assert rows(folders, s=show_id) == [(None, "demo")]
    assert rows("SELECT count(*) FROM point WHERE pk_show = :s", s=show_id) == [(1,)]


def test_a_show_on_a_database_without_departments_is_refused_by_what_is_missing(cli: Cli, engine: Engine) -> None:
    # given Cuebot's migrations alone, without its seed data
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM dept"))
    ran = cli("show", "create", "demo")
    assert ran.status == 1
    assert re.search(r"\bdept\b", ran.err), "the table"
    assert "OPENCUE_SCHED_DATABASE_URL" not in ran.err


def test_shows_are_listed_with_what_they_do(cli: Cli, build: Build) -> None:
    def make(farm: Farm) -> None:
        show = farm.show("demo")
        farm.subscription(show, farm.alloc("general"), size=10, burst=20)
        job = farm.job([LayerSpec(frames=5, cores=2)], show=show)
        farm.run(job.frames[:2], farm.host(cores=8), cores=2)
        farm.show("idle", managed=False, active=False)

    build(make)
    ran = cli("show", "list", "--json")
    demo, idle = listed(ran.json, "show", "demo"), listed(ran.json, "show", "idle")
    assert (demo["reserved_cores"], demo["pending_jobs"]) == (4, 1)
    assert (demo["running_frames"], demo["waiting_frames"]) == (2, 3)
    assert (demo["managed"], idle["managed"], idle["active"]) == (True, False, False)
    table = cli("show", "list")
    assert table.words[0][:3] == ["Show", "Active", "Managed"]
    assert ["demo", "yes", "yes", "yes", "4", "2", "3", "1"] in [words[:8] for words in table.words]
    info = cli("show", "info", "demo")
    assert ["demo", "local.general", "10", "20", "4"] in [words[:5] for words in info.words]
    assert cli("show", "info", "demo", "--json").json["subscriptions"][0]["used"] == 4


def test_switches_and_defaults_of_a_show_are_set(cli: Cli, build: Build, rows: Rows) -> None:
    build(lambda farm: farm.show("demo"))
    assert cli("show", "active", "demo", "off").status == 0
    assert cli("show", "booking", "demo", "off").words[1] == ["demo", "no", "yes", "no", "0", "0", "0", "0", "1", "100"]
    assert cli("show", "booking", "demo", "off", "--json").json["booking"] is False
    assert cli("show", "default-min-cores", "demo", "2.5").status == 0
    assert cli("show", "default-max-cores", "demo", "-1").status == 0
    columns = "SELECT b_active, b_booking_enabled, int_default_min_cores, int_default_max_cores FROM show"
    assert rows(f"{columns} WHERE str_name = 'demo'") == [(False, False, 250, -1)]


def test_allocations_are_listed_and_retagged_with_their_hosts(cli: Cli, build: Build, rows: Rows) -> None:
    def make(farm: Farm) -> Any:
        alloc = farm.alloc("desk")
        farm.host(cores=8, idle_cores=6, alloc=alloc)
        farm.host(cores=4, lock="LOCKED", alloc=alloc)
        return farm.host(cores=2, state="DOWN", alloc=alloc, tags=["old"])

    down = build(make)
    desk = listed(cli("alloc", "list", "--json").json, "allocation", "local.desk")
    assert (desk["cores"], desk["running_cores"], desk["idle_cores"]) == (14, 2, 6)
    assert (desk["hosts"], desk["locked"], desk["down"], desk["tag"]) == (3, 1, 1, "desk")

    ran = cli("alloc", "tag", "local.desk", "workstation")

    assert not lacks(ran.out, "local.desk", "3 hosts", "workstation")
    assert rows("SELECT DISTINCT str_tag FROM host_tag WHERE str_tag_type = 'ALLOC'") == [("workstation",)]
    (host,) = rows("SELECT str_tags FROM host WHERE pk_host = :host", host=down.id)
    assert host.str_tags.split() == ["workstation", down.name, "old"]


def test_subscriptions_are_listed_with_size_burst_and_use(cli: Cli, build: Build) -> None:
    def make(farm: Farm) -> None:
        show, alloc = farm.show("demo"), farm.alloc("general")
        farm.subscription(show, alloc, size=10, burst=12)
        job = farm.job([LayerSpec(frames=5, cores=2)], show=show)
        farm.run(job.frames[:3], farm.host(cores=8), cores=2)
        farm.host(cores=16, lock="LOCKED")

    build(make)
    (row,) = cli("subscription", "list", "demo", "--json").json
    assert (row["size"], row["burst"], row["used"], row["percent"], row["left"]) == (10, 12, 6, 60.0, 6)
    table = cli("subscription", "list")
    assert table.words[0] == ["Show", "Allocation", "Size", "Burst", "Used", "Used", "%", "Left"]
    assert table.words[1] == ["demo", "local.general", "10", "12", "6", "60%", "6"]


def test_a_changed_burst_reaches_the_scheduler_at_once(cli: Cli, build: Build, engine: Engine) -> None:
    def make(farm: Farm) -> tuple[str, str]:
        show, alloc = farm.show("demo"), farm.alloc("general")
        farm.subscription(show, alloc, size=10)
        return show.id, alloc.id

    show_id, alloc_id = build(make)
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        connection.exec_driver_sql("LISTEN opencue_sched_caps")
        connection.commit()
        assert cli("subscription", "burst", "demo", "local.general", "150%", "--json").json["burst"] == 15
        assert select.select([driver], [], [], 10.0)[0]
        driver.poll()
        assert json.loads(driver.notifies[0].payload) == {"vertices": [f"sub:{show_id}:{alloc_id}"]}


def test_size_and_burst_are_set_apart(cli: Cli, build: Build, rows: Rows) -> None:
    made = build(lambda farm: farm.subscription(farm.show("demo"), farm.alloc("general"), size=10))
    caps = "SELECT int_size, int_burst FROM subscription WHERE pk_subscription = :made"
    resized = cli("subscription", "size", "demo", "local.general", "20.5")
    assert (resized.status, resized.err) == (0, "")
    assert rows(caps, made=made) == [(2050, 1000)]
    assert cli("subscription", "burst", "demo", "local.general", "1", "--json").json["burst"] == 1
    stopped = cli("subscription", "burst", "demo", "local.general", "0")
    assert (stopped.status, stopped.err) == (0, "")
    assert rows(caps, made=made) == [(2050, 0)]


def test_a_burst_below_the_size_is_taken(cli: Cli, build: Build) -> None:
    build(lambda farm: (farm.show("demo"), farm.alloc("general")))
    created = cli("subscription", "create", "demo", "local.general", "10", "5")
    assert (created.status, created.words[1][:4]) == (0, ["demo", "local.general", "10", "5"])
    assert created.err == ""


def test_a_subscription_in_use_is_deleted_by_force_only(cli: Cli, build: Build, rows: Rows) -> None:
    def make(farm: Farm) -> str:
        show = farm.show("demo")
        farm.subscription(show, farm.alloc("general"), size=10)
        farm.run(farm.job(show=show).frames, farm.host())
        return show.id

    show_id = build(make)
    refused = cli("subscription", "delete", "demo", "local.general")
    assert refused.status == 1
    assert not lacks(refused.err, "demo", "local.general: 1")
    assert cli("subscription", "delete", "demo", "local.general", "--force").status == 0
    assert rows("SELECT count(*) FROM subscription WHERE pk_show = :s", s=show_id) == [(0,)]


def test_limits_are_listed_set_and_deleted_with_their_layers(cli: Cli, build: Build, rows: Rows) -> None:
    def make(farm: Farm) -> None:
        arnold, maya = farm.limit("arnold", 3), farm.limit("maya", 10)
        job = farm.job([LayerSpec(frames=4, limits=[arnold])])
        farm.run(job.frames[:2], farm.host())
        farm.job([LayerSpec(limits=[maya])], activate=False)

    build(make)
    arnold = listed(cli("limit", "list", "--json").json, "limit", "arnold")
    assert (arnold["running"], arnold["max"], arnold["left"]) == (2, 3, 1)
    assert ["arnold", "2", "3", "1", "frames"] in cli("limit", "list").words
    assert cli("limit", "set", "arnold", "1").words[1] == ["arnold", "2", "1", "0", "frames"]
    assert listed(cli("limit", "list", "--json").json, "limit", "arnold")["left"] == 0
    refused = cli("limit", "delete", "arnold")
    assert (refused.status, "arnold" in refused.err) == (1, True)
    assert cli("limit", "delete", "arnold", "--force").status == 0
    assert cli("limit", "delete", "maya").status == 0
    assert rows("SELECT count(*) FROM limit_record") == rows("SELECT count(*) FROM layer_limit") == [(0,)]


def test_a_limit_counts_frames_or_machines(cli: Cli, build: Build) -> None:
    # given a limit of which three frames run on one machine
    def make(farm: Farm) -> None:
        job = farm.job([LayerSpec(frames=4, limits=[farm.limit("houdini", 3)])])
        farm.run(job.frames[:3], farm.host())

    build(make)
    assert ["houdini", "3", "3", "0", "frames"] in cli("limit", "list").words
    # when it is to count machines, then one holds it, and so many more may
    assert cli("limit", "set", "houdini", "--type", "host").words[1] == ["houdini", "1", "3", "2", "machines"]
    assert cli("limit", "set", "houdini", "6", "--type", "HOST").words[1] == ["houdini", "1", "6", "5", "machines"]
    assert cli("limit", "create", "nuke", "30", "--type", "HOST").words[1] == ["nuke", "0", "30", "30", "machines"]
    assert listed(cli("limit", "list", "--json").json, "limit", "nuke")["counts"] == "machines"
    assert cli("limit", "set", "houdini", "--type", "FRAME").words[1] == ["houdini", "3", "6", "3", "frames"]
    refused = cli("limit", "set", "houdini")
    assert (refused.status, lacks(refused.err, "MAX", "--type")) == (2, [])


@pytest.mark.parametrize(
    ("words", "status", "problem"),
    [
        (("show", "info", "demmo"), 1, ["'demmo'", "'demo'"]),
        (("show", "info", ""), 1, ["''"]),
        (("show", "create", "demo"), 1, ["'demo'"]),
        (("show", "create", "de mo"), 1, ["'de mo'"]),
        (("show", "active", "demo", "yes"), 2, ["'yes'"]),
        (("show", "default-min-cores", "demo", "many"), 2, ["'many'"]),
        (("show", "default-max-cores", "demo", "0.5"), 2, ["core"]),
        (("alloc", "create", "local.general"), 1, ["'local.general'"]),
        (("alloc", "create", "clod.gpu"), 1, ["'clod'", "--new-facility"]),
        (("alloc", "create", "gpu", "--tag", "big mem"), 1, ["'big mem'"]),
        (
            ("alloc", "tag", "local.genral", "x"),
            1,
            ["'local.genral'", "'local.general'"],
        ),
        (
            ("subscription", "create", "demo", "local.general", "10"),
            1,
            ["demo", "local.general", "`subscription size`"],
        ),
        (("subscription", "create", "demo", "local.general", "-5"), 2, []),
        (("subscription", "burst", "demo", "local.general", "x%"), 2, ["'x'"]),
        (
            ("subscription", "size", "other", "local.general", "5"),
            1,
            ["other", "local.general"],
        ),
        (("limit", "set", "arnodl", "5"), 1, ["'arnodl'", "'arnold'"]),
        (("limit", "create", "arnold", "5"), 1, ["'arnold'", "`opencue-sched limit set`"]),
        (("limit", "create", "x", "-5"), 2, []),
    ],
)
def test_what_is_wrong_is_said(cli: Cli, build: Build, words: tuple[str, ...], status: int, problem: list[str]) -> None:
    def make(farm: Farm) -> None:
        farm.subscription(farm.show("demo"), farm.alloc("general"), size=10)
        farm.show("other")
        farm.limit("arnold", 5)

    build(make)
    ran = cli(*words)
    assert ran.status == status
    assert not lacks(ran.err, *problem)
    assert ran.out == ""


# Handing a show over and back


def test_a_show_is_handed_over_with_what_runs_counted_before_it_books(
    cli: Cli,
    build: Build,
    engine: Engine,
    redis_client: redis.Redis,
    rows: Rows,
    environment: pytest.MonkeyPatch,
) -> None:
    # given a show of Cuebot's with running frames, and an open store
    def make(farm: Farm) -> Any:
        show = farm.show("demo", managed=False)
        farm.subscription(show, farm.alloc("general"), size=10)
        job = farm.job([LayerSpec(frames=5, cores=2)], show=show)
        farm.run(job.frames[:3], farm.host(), cores=2)
        return show

    show = build(make)
    ledger = make_ledger(engine, redis_client, owner="test", accounting=Accounting())
    ensure_bootstrapped(engine, ledger, wait_age=0.1)

    # when it is handed over
    ran = cli("show", "managed", "demo", "on", "--json")

    # then its procs and caps are in the ledger, and it books
    assert ran.status == 0
    assert (ran.json["changed"], ran.json["store_ready"]) == (True, True)
    assert rows("SELECT b_scheduler_managed, b_booking_enabled FROM show WHERE pk_show = :s", s=show.id) == [
        (True, True)
    ]
    (alloc,) = rows("SELECT pk_alloc FROM subscription WHERE pk_show = :s", s=show.id)
    key = f"acct:sub:{show.id}:{alloc.pk_alloc}"
    assert redis_client.hmget(key, ["burst", "int_cores"]) == ["10", "6"]
    again = cli("show", "managed", "demo", "on", "--json").json
    assert (again["show"], again["managed"], again["changed"]) == ("demo", True, False)

    # and when it is handed back, the tables say what runs and the ledger forgets it
    environment.setenv("OPENCUE_SCHED_ACCOUNTING__COMMIT_DEADLINE", "1s")
    back = cli("show", "managed", "demo", "off")
    assert (back.status, back.words[1][:4]) == (0, ["demo", "yes", "no", "yes"])
    assert rows("SELECT b_scheduler_managed, b_booking_enabled FROM show WHERE pk_show = :s", s=show.id) == [
        (False, True)
    ]
    assert rows("SELECT int_cores FROM subscription WHERE pk_show = :s", s=show.id) == [(600,)]
    assert rows("SELECT int_cores FROM job_resource") == [(600,)]
    assert redis_client.hget(key, "int_cores") == "0"


def test_the_half_minute_of_a_hand_over_is_seen_to_pass_on_a_terminal(
    build: Build, engine: Engine, redis_client: redis.Redis, environment: pytest.MonkeyPatch
) -> None:
    # given a show of a Cuebot's, whose quarantine takes half a minute, and an open store
    build(lambda farm: farm.show("demo", managed=False))
    with engine.begin() as connection:
        connection.execute(text("UPDATE opencue_sched_origin SET origin = 'cuebot'"))
    ensure_bootstrapped(engine, make_ledger(engine, redis_client, owner="test", accounting=Accounting()), wait_age=0.1)

    with on_terminal(["show", "managed", "demo", "on"]) as (terminal, process):

        def seconds_left() -> int | None:
            shown = re.findall(r"\bdemo\b.* (\d+) s\b", terminal.text())
            return int(shown[-1]) if shown else None

        first = eventually(seconds_left, 20, "seconds on the screen", told=terminal.text)
        assert 0 < first <= 30
        eventually(lambda: (seconds_left() or first) < first, 20, "fewer seconds", told=terminal.text)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=MOST_SECONDS) == 130


def test_a_show_is_handed_over_before_redis_is_open(cli: Cli, build: Build, rows: Rows) -> None:
    build(lambda farm: farm.show("demo", managed=False, booking_enabled=False))
    ran = cli("show", "managed", "demo", "on")
    assert ran.status == 0
    assert "Redis" in ran.err
    assert ran.words[1][:4] == ["demo", "yes", "yes", "no"]
    assert rows("SELECT b_scheduler_managed, b_booking_enabled FROM show WHERE str_name = 'demo'") == [(True, False)]


def test_nothing_is_booked_until_every_cuebot_knows_and_late_bookings_of_theirs_are_counted(
    build: Build, engine: Engine, redis_client: redis.Redis, rows: Rows
) -> None:
    # given a show of Cuebot's, and a Cuebot that books two more frames after the flip because it has not heard of it
    def make(farm: Farm) -> tuple[Any, Any]:
        show = farm.show("demo", managed=False)
        farm.subscription(show, farm.alloc("general"), size=10)
        return show, farm.job([LayerSpec(frames=5)], show=show)

    show, job = build(make)
    ledger = make_ledger(engine, redis_client, owner="test", accounting=Accounting())
    ensure_bootstrapped(engine, ledger, wait_age=0.1)
    shows = ImportedShows(engine, ledger, quarantine_seconds=30, age_seconds=40)

    def quarantine(seconds: float) -> None:
        assert 10 < seconds <= 30
        assert not shows.admits(show.id), "nothing is booked"
        build(lambda farm: farm.run(job.frames[:2], farm.host()))
        pass_quarantines(redis_client)

    # when it is handed over, then the late frames are in the ledger
    flip = hand_over(engine, ledger, show.id, wait_seconds=30, age_seconds=40, sleep=quarantine)
    assert flip.changed
    assert len(list(ledger.records())) == 2
    assert shows.admits(show.id)

    # and on the way back a commit that had read the flag before is in the tables too
    def commits(seconds: float) -> None:
        assert rows("SELECT int_cores FROM subscription WHERE pk_show = :s", s=show.id) == [(200,)]
        build(lambda farm: farm.run(job.frames[2:3], farm.host(name="late")))

    hand_back(engine, ledger, show.id, wait_seconds=10, age_seconds=40, sleep=commits)
    assert list(ledger.records()) == []
    assert rows("SELECT int_cores FROM subscription WHERE pk_show = :s", s=show.id) == [(300,)]


# Every command


def test_the_real_program_runs_and_refuses_by_exit_status(settings: Settings) -> None:
    import os
    import subprocess
    import sys

    variables = {"OPENCUE_SCHED_DATABASE_URL": settings.sqlalchemy_url, "OPENCUE_SCHED_REDIS_URL": settings.redis_dsn}
    program = [sys.executable, "-c", "from opencue_sched.cli import main; main()"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OPENCUE_SCHED_TEST_")}
    environment = {**inherited, **variables}
    create = [*program, "show", "create", "demo", "--managed"]
    made = subprocess.run(create, env=environment, capture_output=True, text=True)
    assert (made.returncode, made.stdout.splitlines()[1].split()[:3], made.stderr) == (0, ["demo", "yes", "yes"], "")
    again = subprocess.run(create, env=environment, capture_output=True, text=True)
    assert (again.returncode, again.stdout) == (1, "")
    assert not lacks(again.stderr, "error: ", "'demo'", "already")
