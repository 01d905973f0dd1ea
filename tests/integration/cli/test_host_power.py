"""`opencue-sched host reboot` and `host down`: RQD is told, and nothing is booked on the host meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import text

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from tests.kit.command import Cli
from tests.kit.noting_rqd import NotingRqd, noting_rqd
from tests.kit.wording import lacks

Build = Callable[[Callable[[Farm], Any]], Any]
Rows = Callable[..., list[Any]]


@pytest.fixture
def rqd(build: Build, environment: pytest.MonkeyPatch) -> Iterator[NotingRqd]:
    """The RQD of render01, on which a frame runs; nobody answers on render02."""

    def make(farm: Farm) -> None:
        host = farm.host(name="render01", cores=8)
        farm.host(name="render02", cores=8)
        farm.run(farm.job([LayerSpec()]).frames, host)

    build(make)
    with noting_rqd() as (rqd, address):
        addresses = {"render01": address, "render02": "127.0.0.1:1"}
        environment.setenv("OPENCUE_SCHED_RQD__ADDRESSES", json.dumps(addresses))
        environment.setenv("OPENCUE_SCHED_RQD__TIMEOUT", "2s")
        yield rqd


def host(rows: Rows, name: str = "render01") -> tuple[str, str]:
    found = "SELECT str_lock_state, str_state FROM host JOIN host_stat USING (pk_host) WHERE str_name = :name"
    (row,) = rows(found, name=name)
    return row.str_lock_state, row.str_state


@pytest.mark.parametrize(
    ("words", "call", "after"),
    [
        (("reboot",), "RebootIdle", ("OPEN", "REBOOT_WHEN_IDLE")),
        (("reboot", "--now"), "RebootNow", ("OPEN", "REBOOTING")),
        (("down",), "ShutdownRqdIdle", ("LOCKED", "UP")),
        (("down", "--now"), "ShutdownRqdNow", ("LOCKED", "UP")),
    ],
)
def test_an_rqd_is_told_and_its_host_is_not_booked(
    cli: Cli, rqd: NotingRqd, rows: Rows, words: tuple[str, ...], call: str, after: tuple[str, str]
) -> None:
    ran = cli("host", words[0], "render01", *words[1:], "--yes", "--json")
    assert (ran.status, rqd.told, host(rows)) == (0, [call], after)
    assert ran.json == {words[0]: ["render01"], "when": "now" if "--now" in words else "when idle", "failed": {}}


def test_what_runs_is_not_killed_without_a_question(cli: Cli, rqd: NotingRqd, rows: Rows) -> None:
    ran = cli("host", "reboot", "render01", "--now", given="n\n")
    assert (ran.status, rqd.told, host(rows)) == (1, [], ("OPEN", "UP"))
    assert "nothing" in ran.err
    assert not lacks(ran.out, "1 running frame", "render01")


@pytest.mark.parametrize("verb", ["reboot", "down"])
def test_a_host_that_refuses_or_cannot_be_asked_stays_as_it_is(cli: Cli, rqd: NotingRqd, rows: Rows, verb: str) -> None:
    rqd.user_logged_in = True
    ran = cli("host", verb, "render01", "render02")
    assert ran.status == 1
    assert not lacks(ran.err, "render01: ", "refused", "not supported when a user is logged in")
    assert not lacks(ran.err, "render02: ", "(127.0.0.1:1)")
    assert [host(rows, name) for name in ("render01", "render02")] == [("OPEN", "UP")] * 2


@pytest.mark.parametrize("verb", ["reboot", "down"])
def test_another_machine_that_a_name_leads_to_is_left_alone(cli: Cli, rqd: NotingRqd, rows: Rows, verb: str) -> None:
    rqd.name = "render03.studio.example"
    ran = cli("host", verb, "render01", "--now", "--yes")
    assert (ran.status, rqd.told, host(rows)) == (1, [], ("OPEN", "UP"))
    assert not lacks(ran.err, "render03.studio.example")


def test_locks_are_told_to_the_rqd_or_the_next_report_would_undo_them(cli: Cli, rqd: NotingRqd, rows: Rows) -> None:
    # given a host whose RQD has all cores locked, and one whose RQD does not answer
    source = "SELECT str_lock_state, str_lock_source FROM host ORDER BY str_name"
    cli("host", "unlock", "render01")
    for verb, call, lock in (("lock", "LockAll", "LOCKED"), ("unlock", "UnlockAll", "OPEN")):
        rqd.told.clear()
        ran = cli("host", verb, "render01", "render02", "--json")
        # then the one is told, the other named, and both are as they were asked to be
        assert (ran.status, rqd.told, [row["lock"] for row in ran.json]) == (0, [call], [lock] * 2)
        assert not lacks(ran.err, "note: ", "render02", "(127.0.0.1:1)")
        assert [row.str_lock_state for row in rows(source)] == [lock] * 2


def test_a_person_who_locks_what_the_rqd_had_locked_is_the_one_who_locked_it(
    cli: Cli, rqd: NotingRqd, rows: Rows, build: Build
) -> None:
    locked = text("UPDATE host SET str_lock_state = 'LOCKED', str_lock_source = 'RQD'")
    build(lambda farm: farm.connection.execute(locked))
    cli("host", "lock", "render01")
    found = rows("SELECT str_lock_source <> 'RQD' AS of_a_person FROM host ORDER BY str_name")
    assert [row.of_a_person for row in found] == [True, False]


def test_a_dry_run_tells_no_rqd_of_locks(cli: Cli, rqd: NotingRqd, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("OPENCUE_SCHED_RQD__DRY_RUN_MODE", "true")
    assert (cli("host", "lock", "render01").status, rqd.told) == (0, [])
