"""Whom ``opencue-sched ctl`` speaks to."""

from __future__ import annotations

import pytest
import redis

from opencue_sched.coordination.presence import Presence

from .conftest import Cli


@pytest.mark.parametrize(
    ("facility", "words", "queue"),
    [
        (None, [], "cue:q:ctl:type:dispatch"),
        (None, ["--instance", "w1"], "cue:q:ctl:type:dispatch:group:farm:inst:w1"),
        (None, ["--group", "big"], "cue:q:ctl:type:dispatch:group:big"),
        ("Alpha", [], "cue:q:ctl:type:dispatch:group:alpha"),
        ("Alpha", ["--instance", "w1"], "cue:q:ctl:type:dispatch:group:alpha:inst:w1"),
        ("Alpha", ["--type", "sweep"], "cue:q:ctl:type:sweep:group:alpha"),
        ("Alpha", ["--group", "beta", "--instance", "w1"], "cue:q:ctl:type:dispatch:group:beta:inst:w1"),
    ],
)
@pytest.mark.parametrize("command", [("stop",), ("sleep", "--cluster", "alloc-1", "--for", "1m")])
def test_a_command_is_for_ones_own_fleet_unless_it_says_another(
    cli: Cli,
    environment: pytest.MonkeyPatch,
    redis_client: redis.Redis,
    facility: str | None,
    words: list[str],
    queue: str,
    command: tuple[str, ...],
) -> None:
    environment.setenv("OPENCUE_SCHED_COORDINATION__GROUP", "farm")
    if facility is not None:
        environment.setenv("OPENCUE_SCHED_SCHEDULER__FACILITY", facility)
    assert cli("ctl", *command, *words, "--queued").status == 0
    assert redis_client.keys("cue:q:ctl:*") == [queue]
    assert redis_client.llen(queue) == 1


@pytest.mark.parametrize(
    ("words", "queue"),
    [
        (["--instance", "w7"], "cue:q:ctl:type:sweep:group:nights:inst:w7"),
        (["--instance", "w7", "--group", "farm"], "cue:q:ctl:type:dispatch:group:farm:inst:w7"),
        (["--instance", "w8"], "cue:q:ctl:type:dispatch:group:nights:inst:w8"),
    ],
)
def test_a_live_instance_is_found_by_its_name(
    cli: Cli, environment: pytest.MonkeyPatch, redis_client: redis.Redis, words: list[str], queue: str
) -> None:
    environment.setenv("OPENCUE_SCHED_COORDINATION__GROUP", "farm")
    for instance, types in (("w7", ["sweep"]), ("w8", ["dispatch", "sweep"])):
        Presence(redis_client, "cue", types=types, group="nights", instance=instance).announce()
    assert cli("ctl", "drain", *words, "--queued").status == 0
    assert redis_client.keys("cue:q:ctl:*") == [queue]


def test_a_name_that_two_groups_have_needs_the_group(cli: Cli, redis_client: redis.Redis) -> None:
    for group in ("nights", "days"):
        Presence(redis_client, "cue", types=["dispatch"], group=group, instance="w7").announce()
    ran = cli("ctl", "drain", "--instance", "w7", "--queued")
    assert ran.status != 0
    assert "days, nights" in ran.err
    assert redis_client.keys("cue:q:ctl:*") == []
