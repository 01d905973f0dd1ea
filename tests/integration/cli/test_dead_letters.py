"""``opencue-sched dead-letters``."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
import redis

from opencue_sched.coordination.dead_letters import bury
from opencue_sched.coordination.names import dead_letters

from .conftest import Cli

QUEUE = "cue:q:work:type:dispatch:prio:1"


@pytest.fixture
def buried(redis_client: redis.Redis) -> redis.Redis:
    for number, body in enumerate(("no json", "a\x1b[31m red\nline", "x" * 200)):
        bury(redis_client, "cue", queue=QUEUE, reason="not JSON", body=body, clock=lambda at=number: 1000.0 + at)
    return redis_client


def test_each_dead_letter_is_listed_with_time_queue_reason_and_body(cli: Cli, buried: redis.Redis) -> None:
    rows = cli("dead-letters", "list", "--json").json
    assert [row["body"] for row in rows] == ["x" * 200, "a\x1b[31m red\nline", "no json"]
    assert {(row["queue"], row["reason"]) for row in rows} == {(QUEUE, "not JSON")}
    assert [datetime.fromisoformat(row["at"]) for row in rows] == [
        datetime.fromtimestamp(at, UTC) for at in (1002, 1001, 1000)
    ]


def test_the_table_has_a_line_for_each_and_lets_no_message_write_to_the_terminal(cli: Cli, buried: redis.Redis) -> None:
    heading, *lines = cli("dead-letters", "list").out.splitlines()
    assert heading.split() == ["At", "Queue", "Why", "Message"]
    assert len(lines) == 3
    assert lines[0].endswith("x" * 60 + "...")
    assert r"a\x1b[31m red\nline" in lines[1]
    assert all(QUEUE in line and "not JSON" in line for line in lines)


def test_the_list_is_as_long_as_asked_for(cli: Cli, buried: redis.Redis) -> None:
    assert [row["body"] for row in cli("dead-letters", "list", "--count", "1", "--json").json] == ["x" * 200]
    assert cli("dead-letters", "list", "--count", "1001").status == 2


def test_what_was_looked_at_is_deleted(cli: Cli, buried: redis.Redis) -> None:
    assert cli("dead-letters", "purge").out == "3 dead letters deleted\n"
    assert cli("dead-letters", "list", "--json").json == []
    assert cli("dead-letters", "purge", "--json").json == {"deleted": 0}


@pytest.mark.parametrize("odd", ["no json", "[]", '{"at": "yesterday"}'])
def test_what_is_no_dead_letter_is_shown_as_it_is(cli: Cli, redis_client: redis.Redis, odd: str) -> None:
    redis_client.lpush(dead_letters("cue"), odd)
    (row,) = cli("dead-letters", "list", "--json").json
    assert row["body"] == odd
    assert row["reason"].startswith("not a dead letter of ours: ")
