"""Layer permits: one batched call, exclusive, expiring."""

from __future__ import annotations

from opencue_sched.coordination.permits import LayerPermits


def test_permits_are_exclusive_and_live_two_seconds_a_frame_but_no_longer_than_a_claim(redis_client):
    permits = LayerPermits(redis_client, "cue", claim_ttl=3)
    assert permits.take("pass-1", {"a": 1000, "b": 0}) == {"a", "b"}
    assert permits.take("pass-2", {"a": 1, "c": 1}) == {"c"}
    assert 2000 < redis_client.pttl("cue:permit:layer:a") <= 3000
    assert 1000 < redis_client.pttl("cue:permit:layer:b") <= 2000
    # and who asks again has it anew, not for what was left of the first time
    redis_client.pexpire("cue:permit:layer:a", 500)
    assert permits.take("pass-1", {"a": 1000}) == {"a"}
    assert redis_client.pttl("cue:permit:layer:a") > 2000
    # where claims live longer, so do permits
    longer = LayerPermits(redis_client, "cue", claim_ttl=10)
    longer.take("pass-1", {"a": 4, "b": 1000})
    assert 3000 < redis_client.pttl("cue:permit:layer:a") <= 8000 < redis_client.pttl("cue:permit:layer:b") <= 10_000


def test_only_the_owner_drops_a_permit(redis_client):
    permits = LayerPermits(redis_client, "cue", claim_ttl=3)
    permits.take("pass-1", {"a": 1})
    assert permits.drop("pass-2", ["a"]) == 0
    assert permits.drop("pass-1", ["a", "never-taken"]) == 1
    assert permits.take("pass-2", {"a": 1}) == {"a"}


def test_a_pass_has_the_permits_that_a_dead_one_of_its_cluster_left(redis_client):
    """Its claim has run out, or this one could not be at work; the permits may live a moment longer."""
    permits = LayerPermits(redis_client, "cue", claim_ttl=3)
    permits.take("cluster-1|died", {"a": 10})
    permits.take("cluster-2|works", {"b": 10})
    assert permits.take("cluster-1|next", {"a": 10, "b": 10}) == {"a"}
    assert permits.drop("cluster-1|died", ["a"]) == 0, "it was frozen, and goes on"
    assert permits.take("cluster-2|works", {"a": 1}) == frozenset()
