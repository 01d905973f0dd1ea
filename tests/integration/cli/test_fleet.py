"""What ``opencue-sched fleet`` says of a fleet."""

from __future__ import annotations

import json
import socket
import time

import redis

from opencue_sched.coordination.keys import QueueName, beat_keys
from opencue_sched.coordination.presence import BEAT_TYPE, Presence
from tests.kit.command import Cli
from tests.kit.wording import lacks


def test_fleet_says_who_is_alive_who_leads_what_each_works_on_and_how_long_what_waits(
    cli: Cli, redis_client: redis.Redis
) -> None:
    keys, queue = beat_keys("cue", None), QueueName("cue", "dispatch", "default", "w1")
    redis_client.set(keys.lease, "token|7", px=60_000)
    for instance, fence in (("b1", 0), ("b2", 7)):
        beat = Presence(
            redis_client, "cue", types=[BEAT_TYPE], group="default", instance=instance, capabilities=[keys.role]
        )
        beat.announce()
        beat.refresh(fence=fence)
    worker = Presence(redis_client, "cue", types=["dispatch", "sweep"], group="default", instance="w1", capacity=4)
    worker.announce()
    worker.refresh(in_flight=3, state="paused", work=["tags-1", "alloc-1"])
    redis_client.lpush(str(queue), json.dumps({"headers": {"sent_at": time.time() - 100}}))

    view = cli("fleet", "--json").json
    assert (view["leader"]["instance"], view["leader"]["fence"]) == ("b2", 7)
    assert [(beat["instance"], beat["fence"]) for beat in view["beats"]] == [("b1", None), ("b2", 7)]
    (shown,) = view["workers"]
    assert (shown["types"], shown["state"]) == (["dispatch", "sweep"], "paused")
    assert (shown["in_flight"], shown["capacity"], shown["work"]) == (3, 4, ["alloc-1", "tags-1"])
    waiting = view["queues"]["dispatch"]
    assert (waiting["depth"], waiting["queues"]) == (1, {str(queue): 1})
    assert 100 <= waiting["oldest_seconds"] < 160

    lines = cli("fleet").out.splitlines()
    here = socket.gethostname()
    assert not lacks(lines[0], "b2", "fence 7")
    assert not lacks(lines[1], f"b1 on {here}", f"b2 on {here}")
    assert [lines[3].split()[i] for i in (0, 4, 5)] == ["w1", "paused", "3/4"]
    assert lines[3].rstrip().endswith("alloc-1, tags-1")
    name, depth, oldest, *where = next(line.split() for line in lines if line.startswith("dispatch"))
    assert (name, depth, where) == ("dispatch", "1", [str(queue), "1"])
    assert 100 <= float(oldest.removesuffix("s")) < 160
