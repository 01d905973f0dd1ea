"""What the benchmarks say of a script's call: its processor time, told apart from the time Redis was kept waiting."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import redis

from benchmarks.figures import Spread
from benchmarks.recompute_cost import LONGEST_SCRIPT_MS, RecomputeCost
from benchmarks.script_clock import calls_noted, scripts_timed, timed
from opencue_sched.clients.lua_scripts import LuaScript, call_script
from opencue_sched.embedded.servers.services import EmbeddedRedis

RUNS_SECONDS, STANDS_SECONDS = 0.01, 0.02
# A tenth of a second or more. In the newest servers TIME stands still meanwhile.
WORKS = LuaScript(
    """
local began, sum = redis.call('TIME')[2], 0
for i = 1, 5000000 do sum = sum + i % 7 end
return redis.call('TIME')[2] ~= began
""",
    "",
)


@pytest.fixture
def own_redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


def test_a_timed_script_answers_as_ever_and_leaves_a_note_of_each_call(redis_client: redis.Redis) -> None:
    def dropped() -> list[object]:
        redis_client.set("lease", "mine")
        return [call_script(redis_client, "lease_drop", ["lease"], [token]) for token in ("other", "mine")]

    plain = dropped()
    assert calls_noted(redis_client) == []
    with scripts_timed():
        assert dropped() == plain
    assert dropped() == plain
    noted = calls_noted(redis_client)
    assert [call.name for call in noted] == ["lease_drop"] * 2
    assert all(call.processor_ms > 0 and call.wall_ms > 0 for call in noted)
    assert calls_noted(redis_client) == []


def test_a_script_is_not_charged_for_what_the_machine_keeps_redis_from(own_redis: EmbeddedRedis) -> None:
    with redis.Redis.from_url(own_redis.url, decode_responses=True) as client, ThreadPoolExecutor(1) as pool:
        began, stood = time.monotonic(), 0.0
        answer = pool.submit(client.eval, timed("works", WORKS).text, 0)
        while not answer.done():
            time.sleep(RUNS_SECONDS)
            os.kill(own_redis.pid, signal.SIGSTOP)
            stopped = time.monotonic()
            time.sleep(STANDS_SECONDS)
            stood += time.monotonic() - stopped
            os.kill(own_redis.pid, signal.SIGCONT)
        whole = time.monotonic() - began
        (call,) = calls_noted(client)
    assert 1000 * RUNS_SECONDS < call.processor_ms < 1000 * (whole - 0.8 * stood)
    assert (call.waited_ms > 1000 * STANDS_SECONDS) == bool(answer.result())


def test_a_call_that_takes_too_long_of_redis_in_most_rounds_fails_the_benchmark() -> None:
    over = LONGEST_SCRIPT_MS + 0.1
    short, once, mostly = (Spread.of([0.4, *of_two]) for of_two in ([0.5, 0.6], [0.5, over], [over, over]))
    cost = RecomputeCost("busy", 9, 3, short, 0, once, "release 10.1", once, once, once, short, short, short, 1.0)
    assert cost.passed
    assert not replace(cost, longest_script_ms=mostly).passed
    assert not replace(cost, skipped=1).passed
