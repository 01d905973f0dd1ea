"""``opencue-sched board list --permits``: who has which layer."""

from __future__ import annotations

import redis

from opencue_sched.coordination.board import LayerPermits
from opencue_sched.coordination.names import permit_board

from .conftest import Cli

KEYS = permit_board("cue")


def test_the_permits_of_layers_are_listed_with_the_cluster_whose_pass_has_them(
    cli: Cli, redis_client: redis.Redis
) -> None:
    permits = LayerPermits(redis_client, "cue", claim_ttl=60)
    permits.take({"alloc-1|pass": {"layer-a": 100, "layer-b": 100}})
    permits.take({"alloc-2|died": {"layer-c": 100}})
    redis_client.zadd(KEYS.of("claimed"), {"layer-c": 1})
    listed = cli("board", "list", "--permits", "--json").json
    found = [(row["layer"], row["state"], row["cluster"]) for row in listed]
    assert found == [
        ("layer-a", "claimed", "alloc-1"),
        ("layer-b", "claimed", "alloc-1"),
        ("layer-c", "ready", None),
    ]
    (heading, *rows) = cli("board", "list", "--permits", "--state", "claimed").words
    assert heading == ["Layer", "State", "Cluster", "Fence", "Taken"]
    assert [row[:3] for row in rows] == [["layer-a", "claimed", "alloc-1"], ["layer-b", "claimed", "alloc-1"]]
    assert cli("board", "list", "--json").json == []
