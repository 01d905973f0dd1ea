"""Hosts by command: what is listed, locks, tags and allocations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import text

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostIds, LayerSpec
from opencue_sched.store.reports import lock_cores
from tests.kit.command import Cli
from tests.kit.wording import lacks

Build = Callable[[Callable[[Farm], Any]], Any]
Rows = Callable[..., list[Any]]


@pytest.fixture
def host(build: Build) -> HostIds:
    """render01, with two of its eight cores in use by a job."""

    def make(farm: Farm) -> HostIds:
        host = farm.host(name="render01", cores=8, memory_gb=16, gpus=2, gpu_memory_gb=8, tags=["old"])
        job = farm.job([LayerSpec(frames=2)], name="show-sh-user_job")
        farm.run(job.frames[:1], host, cores=2, memory_gb=4)
        return host

    made: HostIds = build(make)
    return made


def test_hosts_are_listed_with_what_is_idle(cli: Cli, host: HostIds, build: Build) -> None:
    build(lambda farm: farm.host(name="render02", cores=4, lock="LOCKED", state="DOWN", alloc=farm.alloc("desk")))
    (first, second) = cli("host", "list", "--json").json
    assert (first["host"], first["idle_cores"], first["cores"], first["idle_gpus"]) == ("render01", 6, 8, 2)
    assert (first["idle_memory_kb"], first["memory_kb"]) == (12 * 1024**2, 16 * 1024**2)
    assert (first["frames"], first["lock"], first["state"], first["thread_mode"]) == (1, "OPEN", "UP", "AUTO")
    assert (second["lock"], second["state"], second["allocation"]) == ("LOCKED", "DOWN", "local.desk")
    table = cli("host", "list")
    assert table.words[0][:8] == ["Host", "State", "Lock", "Alloc", "Idle", "Cores", "Cores", "Idle"]
    assert table.words[1][:8] == ["render01", "UP", "OPEN", "local.general", "6", "8", "12.0G", "16.0G"]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ((), ["render01", "render02"]),
        (("--alloc", "local.desk"), ["render02"]),
        (("--lock", "open"), ["render01"]),
        (("--state", "DOWN"), ["render02"]),
        (("--tag", "old"), ["render01"]),
        (("--tag", "OLD"), ["render01"]),
        (("--name", "R02"), ["render02"]),
        (("--most", "1"), ["render01"]),
    ],
)
def test_hosts_are_chosen(cli: Cli, host: HostIds, build: Build, words: tuple[str, ...], names: list[str]) -> None:
    build(lambda farm: farm.host(name="render02", lock="LOCKED", state="DOWN", alloc=farm.alloc("desk")))
    ran = cli("host", "list", "--json", *words)
    assert [row["host"] for row in ran.json] == names
    assert ("--most" in ran.err) == ("--most" in words)


def test_a_host_is_shown_with_what_runs_on_it(cli: Cli, host: HostIds) -> None:
    ran = cli("host", "info", "render01")
    assert {("Idle", "Cores", "6"), ("Cores", "8")} <= {tuple(words) for words in ran.words}
    assert "Free Memory" in ran.out, "a label in words, not the key of JSON"
    assert ["render01", "show-sh-user_job", "0001-layer1", "2"] in [words[:4] for words in ran.words]
    (proc,) = cli("host", "info", host.id, "--json").json["procs"]
    assert (proc["job"], proc["frame"], proc["cores"]) == ("show-sh-user_job", "0001-layer1", 2)


def test_cores_that_are_locked_on_its_rqd_are_shown_with_a_host(cli: Cli, host: HostIds, build: Build) -> None:
    # given hosts of which one has cores locked on its RQD
    build(lambda farm: farm.host(name="render02"))
    build(lambda farm: lock_cores(farm.connection, host.id, 350))
    # then its list tells how many, and nothing of the other's
    assert [row["rqd_locked_cores"] for row in cli("host", "list", "--json").json] == [3.5, 0]
    assert [line.count("3.5") for line in cli("host", "list").out.splitlines()] == [0, 1, 0]
    assert ("RQD", "Locked", "3.5") in map(tuple, cli("host", "info", "render01").words)
    assert "RQD Locked" not in cli("host", "info", "render02").out


def test_what_an_rqd_had_locked_before_a_cuebot_took_its_reports_is_cleared_by_unlocking(
    cli: Cli, host: HostIds, build: Build, environment: pytest.MonkeyPatch
) -> None:
    # given a host that is locked as its RQD last reported, and reports no more
    environment.setenv("OPENCUE_SCHED_RQD__DRY_RUN_MODE", "true")

    def report(farm: Farm) -> None:
        lock_cores(farm.connection, host.id, 800)
        farm.connection.execute(text("UPDATE host SET str_lock_state = 'LOCKED', str_lock_source = 'RQD'"))

    build(report)
    # when a person unlocks it, then nothing is left of that
    (row,) = cli("host", "unlock", "render01", "--json").json
    assert (row["lock"], row["rqd_locked_cores"]) == ("OPEN", 0)


def test_hosts_are_locked_and_unlocked(cli: Cli, host: HostIds, build: Build, rows: Rows) -> None:
    build(lambda farm: farm.host(name="desk01", lock="NIMBY_LOCKED"))
    assert [row["lock"] for row in cli("host", "lock", "render01", "desk01", "--json").json] == ["LOCKED", "LOCKED"]
    locks = rows("SELECT str_lock_state, str_lock_source <> '' FROM host ORDER BY str_name")
    assert locks == [("LOCKED", True), ("LOCKED", True)]
    assert cli("host", "lock", "render01").words[1][:3] == ["render01", "UP", "LOCKED"]
    assert cli("host", "unlock", "render01").words[1][:3] == ["render01", "UP", "OPEN"]


def test_a_host_its_user_took_back_is_not_unlocked(cli: Cli, build: Build) -> None:
    build(lambda farm: farm.host(name="desk01", lock="NIMBY_LOCKED"))
    assert cli("host", "unlock", "desk01", "--json").json[0]["lock"] == "NIMBY_LOCKED"


def test_manual_tags_are_added_and_removed(cli: Cli, host: HostIds, rows: Rows) -> None:
    tags = cli("host", "tags", "add", "render01", "bigmem", "old", "--json").json["tags"]
    assert tags == ["general", "render01", "bigmem", "old"]
    added = rows("SELECT str_tag_type, b_constant FROM host_tag WHERE str_tag = 'bigmem'")
    assert added == [("MANUAL", False)]
    assert rows("SELECT str_tags FROM host")[0].str_tags.split() == ["general", "render01", "bigmem", "old"]
    assert cli("host", "tags", "remove", "render01", "old").words[-1][-3:] == ["general", "render01", "bigmem"]
    assert cli("host", "tags", "remove", "render01", "old").status == 0


def test_a_tag_is_the_same_one_in_any_case_and_keeps_its_spelling(cli: Cli, host: HostIds, rows: Rows) -> None:
    tags = cli("host", "tags", "add", "render01", "BigMem", "OLD", "General", "--json").json["tags"]
    assert tags == ["general", "render01", "BigMem", "old"]
    assert cli("host", "tags", "remove", "render01", "bigmem", "Old", "--json").json["tags"] == ["general", "render01"]
    refused = cli("host", "tags", "remove", "render01", "GENERAL")
    assert not lacks(refused.err, "GENERAL", "render01", "manual")


def test_tags_that_are_not_manual_stay(cli: Cli, host: HostIds, rows: Rows) -> None:
    ran = cli("host", "tags", "remove", "render01", "old", "general")
    assert ran.status == 1
    assert not lacks(ran.err, "general", "render01", "manual", "nothing")
    assert rows("SELECT count(*) FROM host_tag") == [(3,)]


def test_a_host_is_moved_when_nothing_runs_on_it(cli: Cli, host: HostIds, build: Build, rows: Rows) -> None:
    idle = build(lambda farm: farm.host(name="idle01"))
    build(lambda farm: farm.alloc("desk"))
    refused = cli("host", "move", "render01", "idle01", "local.desk")
    assert (refused.status, lacks(refused.err, "running", " 1")) == (1, [])
    assert [row["allocation"] for row in cli("host", "move", "idle01", "local.desk", "--json").json] == ["local.desk"]
    moved = rows("SELECT alloc.str_name, str_tags FROM host JOIN alloc USING (pk_alloc) WHERE pk_host = :h", h=idle.id)
    assert moved == [("local.desk", "desk idle01")]
    assert cli("host", "move", "render01", "local.desk", "--force").status == 0


def test_a_host_is_deleted_when_it_is_down_and_runs_nothing(
    cli: Cli, host: HostIds, build: Build, rows: Rows, engine: Any
) -> None:
    build(lambda farm: farm.host(name="gone01", state="DOWN"))
    assert not lacks(cli("host", "delete", "render01").err, "render01", "UP", "DOWN", "RQD")
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE host_stat SET str_state = 'DOWN'")
    assert not lacks(cli("host", "delete", "render01").err, "render01", "released", " 1")
    assert "gone01" in cli("host", "delete", "gone01").out
    assert rows("SELECT str_name FROM host") == [("render01",)]


@pytest.mark.parametrize(
    ("words", "status", "problem"),
    [
        (("host", "info", "rneder01"), 1, ["'rneder01'", "'render01'"]),
        (("host", "lock", "render01", "x1", "rendr01"), 1, ["'rendr01'", "'render01'"]),
        (("host", "tags", "add", "render01", "big mem"), 1, ["'big mem'"]),
        (("host", "tags", "add", "render01", "x" * 46), 1, ["45"]),
        (("host", "move", "render01", "local.x"), 1, ["'local.x'"]),
        (("host", "list", "--lock", "shut"), 2, ["'shut'"]),
        (("host", "lock"), 2, ["argument"]),
    ],
)
def test_what_is_wrong_is_said(
    cli: Cli, host: HostIds, rows: Rows, words: tuple[str, ...], status: int, problem: list[str]
) -> None:
    ran = cli(*words)
    assert ran.status == status
    assert not lacks(ran.err, *problem)
    assert rows("SELECT str_lock_state FROM host") == [("OPEN",)]


def test_a_change_is_made_although_redis_does_not_answer(
    cli: Cli, host: HostIds, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENCUE_SCHED_REDIS_URL", "redis://127.0.0.1:1/0")
    monkeypatch.setenv("OPENCUE_SCHED_RQD__DRY_RUN_MODE", "true")  # the host has no RQD that could be told
    ran = cli("host", "lock", "render01")
    assert (ran.status, ran.words[1][:3]) == (0, ["render01", "UP", "LOCKED"])
    assert ran.err == ""
    assert rows("SELECT str_lock_state FROM host") == [("LOCKED",)]


def test_a_host_is_found_in_any_case_and_the_exact_one_first(cli: Cli, build: Build) -> None:
    for name in ("RENDER-PC01", "render-pc02", "Render-PC02"):
        build(lambda farm, name=name: farm.host(name=name))
    for asked, found in (
        ("render-pc01", "RENDER-PC01"),
        ("RENDER-PC01", "RENDER-PC01"),
        ("Render-PC02", "Render-PC02"),
        ("render-pc02", "render-pc02"),
    ):
        assert cli("host", "info", asked, "--json").json["host"] == found
