"""Which workers ``opencue-sched ctl`` speaks to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery.app.control import Control

from opencue_sched.coordination.keys import BoardKeys
from opencue_sched.coordination.postings import ClusterPostings
from opencue_sched.coordination.presence import Presence
from opencue_sched.domain.clusters import Cluster, ClusterKind
from tests.kit.command import Cli
from tests.kit.wording import lacks


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """Group and instance of the workers that the last command was sent to, all of which answer."""
    found: list[tuple[str, str]] = []

    def broadcast(_control: Control, _command: str, *, destination: list[str], **_: Any) -> list[object]:
        found[:] = [tuple(node.split("@")) for node in destination]
        return [{node: {"ok": "heard"}} for node in destination]

    monkeypatch.setattr(Control, "broadcast", broadcast)
    yield found


@pytest.fixture
def fleet(redis_client: redis.Redis) -> None:
    """Two groups of no facility and two facilities; an instance of sweeps alone, and one of two types."""
    for group, instance, types, facility in (
        ("farm", "w1", ["dispatch", "sweep"], None),
        ("farm", "w2", ["dispatch"], None),
        ("big", "w3", ["dispatch"], None),
        ("big", "w4", ["sweep"], None),
        ("alpha", "w1", ["dispatch", "sweep"], "Alpha"),
        ("alpha", "w5", ["dispatch"], "Alpha"),
        ("beta", "w1", ["dispatch"], "beta"),
    ):
        node = f"{group}@{instance}"
        Presence(
            redis_client, "cue", types=types, group=group, instance=instance, facility=facility, node=node
        ).announce()


@pytest.mark.parametrize(
    ("facility", "words", "meant"),
    [
        (None, [], [("big", "w3"), ("farm", "w1"), ("farm", "w2")]),
        (None, ["--instance", "w1"], [("farm", "w1")]),
        (None, ["--instance", "w4"], [("big", "w4")]),
        (None, ["--group", "big"], [("big", "w3")]),
        (None, ["--group", "big", "--type", "sweep"], [("big", "w4")]),
        (None, ["--group", "beta"], [("beta", "w1")]),
        (None, ["--group", "nobody"], []),
        ("Alpha", [], [("alpha", "w1"), ("alpha", "w5")]),
        ("Alpha", ["--instance", "w1"], [("alpha", "w1")]),
        ("Alpha", ["--type", "sweep"], [("alpha", "w1")]),
        ("Alpha", ["--group", "beta", "--instance", "w1"], [("beta", "w1")]),
    ],
)
@pytest.mark.usefixtures("fleet")
def test_a_command_is_for_ones_own_fleet_unless_it_says_another(
    cli: Cli,
    environment: pytest.MonkeyPatch,
    told: list[tuple[str, str]],
    facility: str | None,
    words: list[str],
    meant: list[tuple[str, str]],
) -> None:
    environment.setenv("OPENCUE_SCHED_COORDINATION__GROUP", "farm")
    if facility is not None:
        environment.setenv("OPENCUE_SCHED_SCHEDULER__FACILITY", facility)
    ran = cli("ctl", "stop", *words)
    assert told == meant
    assert ran.status == (0 if meant else 1)


@pytest.mark.usefixtures("told")
def test_a_name_that_two_groups_have_needs_the_group(cli: Cli, redis_client: redis.Redis) -> None:
    for group in ("nights", "days"):
        Presence(redis_client, "cue", types=["dispatch"], group=group, instance="w7").announce()
    ran = cli("ctl", "drain", "--instance", "w7")
    assert ran.status != 0
    assert not lacks(ran.err, "days", "nights")


def test_a_cluster_is_put_to_sleep_and_woken_though_no_worker_lives(cli: Cli, redis_client: redis.Redis) -> None:
    cluster = Cluster("facility", "show", ClusterKind.MANUAL, ("fast",))
    postings = ClusterPostings(redis_client, BoardKeys("cue", "clusters"))
    (posting,) = postings.enqueue([cluster])
    for duration, state in (("10m", "delayed"), ("0", "ready")):
        assert cli("ctl", "sleep", "--cluster", cluster.key, "--for", duration).status == 0
        assert postings.job(posting.uuid).fields["state"] == state
    ran = cli("ctl", "sleep", "--cluster", "nobody", "--for", "10m")
    assert ran.status == 1
    assert "'nobody'" in ran.err
    for no_time in ("abc", "-5", "inf", "nan", "", "9" * 400):
        ran = cli("ctl", "sleep", "--cluster", cluster.key, "--for", no_time)
        assert (ran.status, "duration" in ran.err) == (1, True)
