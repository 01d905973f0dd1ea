"""A leader is killed after each single thing it does, from its lease to its release: what follows.

The leaders are real processes with the scheduler class, the configuration and the broker of a beat; only their tasks'
intervals are short. See stepped_beat.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from opencue_sched.coordination.keys import LeaderKeys, QueueName, priority_lists
from opencue_sched.coordination.leader import tick_series
from tests.chaos.stepped_beat import INTERVAL_SECONDS, NAMED, TASKS, namespace, taken

ROOT = Path(__file__).resolve().parents[2]
STEPS = 30
PARALLEL = 4
TTL_MS = 900
SERIES = {tick_series(name, INTERVAL_SECONDS) for name in TASKS}
QUICK = {
    "OPENCUE_SCHED_COORDINATION__LEASE_TTL": f"{TTL_MS}ms",
    "OPENCUE_SCHED_QUEUE__METRICS_PORT": "0",
}


@pytest.fixture
def steps(database_url, redis_server, redis_client) -> list[dict]:
    """What became of the leader that died after its n-th change, and of its successor, for every n."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("OPENCUE_SCHED_")}
    urls = {"OPENCUE_SCHED_DATABASE_URL": database_url, "OPENCUE_SCHED_REDIS_URL": redis_server.url}
    ran = subprocess.run(
        [sys.executable, ROOT / "tests" / "chaos" / "stepped_beat.py", str(STEPS), str(PARALLEL)],
        env={**inherited, **urls, **QUICK, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return sorted((json.loads(line) for line in ran.stdout.splitlines()), key=lambda step: step["step"])


def messages(client, ns: str) -> list[dict]:
    """Headers of every message sent, oldest first."""
    lists = (taken(ns), *priority_lists(QueueName(ns, "sweep")))
    return [json.loads(text)["headers"] for name in lists for text in reversed(client.lrange(name, 0, -1))]


def claims(step: dict) -> set[tuple[str, int]]:
    """Every (task, tick) that was recorded as fired, each once."""
    found = [(task, int(tick)) for task, _, tick in (claim.rpartition(":") for claim in step["claimed"])]
    assert len(found) == len(set(found)), found
    return set(found)


def check_a_step(client, step: dict) -> None:
    ns = namespace(step["step"])
    keys = LeaderKeys(ns, "beat")
    assert -1 != step["lease"] <= TTL_MS, "a lease without an end"
    assert client.pttl(keys.lease) == -2, "the successor released it"

    sent = messages(client, ns)
    each = Counter((message["tick_of"], message["tick"]) for message in sent)
    assert set(each.values()) == {1}, f"fired twice: {each}"
    fences = [message["fence"] for message in sent]
    assert fences == sorted(fences)
    successors = [message for message in sent if message["fence"] > step["fence"]]
    assert {message["tick_of"] for message in successors} == SERIES, "the successor fires everything"

    # One tick is lost when the leader dies between its claim and its message, and no other.
    done = [change for change in step["changes"] if change in ("claim_tick", "queue_put")]
    claimed = claims(step)
    lost = claimed - each.keys()
    assert len(lost) <= (done[-1:] == ["claim_tick"]), f"lost {lost}"
    assert each.keys() <= claimed

    for message in sent:
        assert message["tick"] == int(message["sent_at"] // INTERVAL_SECONDS), "an old tick, or one of the future"


def test_killed_after_whatever_it_did_a_leader_leaves_no_tick_twice_and_its_successor_goes_on(redis_client, steps):
    assert [step["step"] for step in steps] == list(range(min(NAMED), STEPS + 1))
    died_after = set()
    for step in steps:
        killed = step["status"] == -signal.SIGKILL
        assert killed or step["status"] == 0
        assert step["step"] < 0 or killed == (len(step["changes"]) == step["step"]), step
        assert step["end"] == 0, "the successor ended well"
        died_after |= set(step["changes"][-1:]) if killed else set()
        check_a_step(redis_client, step)
        if step["step"] in NAMED:
            name, times = NAMED[step["step"]]
            assert (step["changes"][-1], Counter(step["changes"])[name]) == (name, times)
    assert {"lease_acquire", "claim_tick", "queue_put"} <= died_after
