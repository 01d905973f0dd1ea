"""Presence: a name belongs to one incarnation, and is gone soon after a kill."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from opencue_sched import __version__
from opencue_sched.coordination import presence as presences
from opencue_sched.coordination.keys import presence_key
from opencue_sched.coordination.presence import TTL_SECONDS, Actor, InstanceTaken, Presence, list_members


def presence(client, instance="w1", **options) -> Presence:
    return Presence(
        client,
        "cue",
        types=options.pop("types", ("dispatch", "sweep")),
        group=options.pop("group", "default"),
        instance=instance,
        capacity=4,
        node=f"{instance}@localhost",
        **options,
    )


def test_an_announced_instance_is_on_the_roll_under_each_type_until_it_withdraws(redis_client):
    mine = presence(redis_client)
    mine.announce()
    mine.refresh(in_flight=2, work=("alloc-1",))
    members = list_members(redis_client, "cue")
    assert [(actor.type, actor.instance, actor.in_flight) for actor in members.alive] == [
        ("dispatch", "w1", 2),
        ("sweep", "w1", 2),
    ]
    assert members.alive[0].work == ("alloc-1",)
    mine.withdraw()
    members = list_members(redis_client, "cue")
    assert members.alive == ()
    assert len(members.gone) == 2


def test_the_record_has_the_fields_of_the_proposal_and_a_life_of_15_seconds(redis_client, monkeypatch):
    moments = iter((100.0, 110.0, 120.0))
    monkeypatch.setattr(presences, "time", SimpleNamespace(time=lambda: next(moments), monotonic=time.monotonic))
    mine = presence(redis_client, capabilities=("dispatch", "sweep"))
    mine.announce()
    mine.refresh(in_flight=2, state="paused", work=("alloc-1",))
    key = presence_key("cue", "dispatch", "default", "w1")
    record = json.loads(redis_client.get(key))
    who = {"pid": os.getpid(), "hostname": socket.gethostname(), "version": __version__, "node": "w1@localhost"}
    when = {"started_at": 100.0, "last_heartbeat": 120.0}
    what = {
        "in_flight": 2,
        "capacity": 4,
        "state": "paused",
        "work": ["alloc-1"],
        "capabilities": ["dispatch", "sweep"],
    }
    assert {**record, **who, **when, **what} == record
    assert 5_000 < redis_client.pttl(key) <= 15_000


def test_a_second_process_of_the_same_name_is_refused_while_the_first_lives(redis_client):
    presence(redis_client).announce()
    for type_ in ("dispatch", "sweep"):
        key = presence_key("cue", type_, "default", "w1")
        record = {**json.loads(redis_client.get(key)), "pid": 1}  # a process of this machine that is alive
        redis_client.set(key, json.dumps(record), px=15_000)
    with pytest.raises(InstanceTaken, match=r"'w1'.*'default'.* 1\b"):
        presence(redis_client).announce(patience_seconds=0.3)
    assert {actor.pid for actor in list_members(redis_client, "cue").alive} == {1}


def test_the_record_of_a_killed_process_of_this_machine_is_replaced_at_once(redis_client):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    presence(redis_client).announce()
    for type_ in ("dispatch", "sweep"):
        key = presence_key("cue", type_, "default", "w1")
        record = {**json.loads(redis_client.get(key)), "pid": ended.pid}
        redis_client.set(key, json.dumps(record), px=15_000)
    presence(redis_client).announce(patience_seconds=0.0)
    assert {actor.pid for actor in list_members(redis_client, "cue").alive} != {ended.pid}


def test_a_name_that_is_held_for_one_type_is_taken_for_none(redis_client):
    """And who may replace a dead process does not replace the one that was faster."""
    dispatch, sweep = (presence_key("cue", type_, "default", "w1") for type_ in ("dispatch", "sweep"))
    holder = Actor("sweep", "default", "w1", pid=7, machine="elsewhere", token="other")
    redis_client.set(sweep, json.dumps(asdict(holder)), px=15_000)
    # when a process comes, where nobody is or one that is dead,
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    newcomer = presence(redis_client)
    dead = json.dumps(asdict(replace(newcomer.actor, pid=ended.pid, token="the dead one's")))
    for record in (None, dead):
        if record is not None:
            redis_client.set(dispatch, record, px=15_000)
        with pytest.raises(InstanceTaken):
            newcomer.announce(patience_seconds=0.0)
        # then it has neither name
        assert redis_client.get(dispatch) == record
        assert json.loads(redis_client.get(sweep))["token"] == "other"
        assert newcomer.actor.token not in {actor.token for actor in list_members(redis_client, "cue").alive}
    # and once the other has gone it has both
    redis_client.delete(sweep)
    newcomer.announce(patience_seconds=0.0)
    assert {actor.token for actor in list_members(redis_client, "cue").alive} == {newcomer.actor.token}


def test_a_name_nobody_refreshes_is_free_after_its_life(redis_client):
    key = presence_key("cue", "dispatch", "default", "w1")
    holder = Actor("dispatch", "default", "w1", pid=7, machine="elsewhere", token="other")
    redis_client.set(key, json.dumps(asdict(holder)), px=300)
    presence(redis_client).announce(patience_seconds=TTL_SECONDS)
    assert len(list_members(redis_client, "cue").alive) == 2


def test_a_paused_process_whose_name_was_taken_is_told_so(redis_client):
    paused = presence(redis_client)
    paused.announce()
    redis_client.delete(*(presence_key("cue", type_, "default", "w1") for type_ in ("dispatch", "sweep")))
    successor = presence(redis_client)
    successor.announce()
    with pytest.raises(InstanceTaken, match="'w1'"):
        paused.refresh()
    paused.withdraw()
    assert len(list_members(redis_client, "cue").alive) == 2


def test_an_emptied_redis_learns_who_is_present_at_the_next_refresh(redis_client):
    mine = presence(redis_client)
    mine.announce()
    redis_client.flushdb()
    mine.refresh()
    assert len(list_members(redis_client, "cue").alive) == 2
    mine.withdraw()
    mine.refresh()
    assert list_members(redis_client, "cue").alive == ()


OF_W2 = {"type": "dispatch", "group": "default", "instance": "w2"}
UNREADABLE = {
    "text": "not json",
    "number": "3",
    "nested": "[" * 100_000,
    "type": json.dumps({**OF_W2, "type": None}),
    "group": json.dumps({**OF_W2, "group": ["default"]}),
    "in hand": json.dumps({**OF_W2, "in_flight": "some"}),
    "capacity": json.dumps({**OF_W2, "capacity": None}),
    "started_at": json.dumps({**OF_W2, "started_at": 10**400}),
    "last_heartbeat": json.dumps({**OF_W2, "last_heartbeat": float("nan")}),
    "heartbeat": json.dumps({**OF_W2, "last_heartbeat": "now"}),
    "work": json.dumps({**OF_W2, "work": [1]}),
}


@pytest.mark.parametrize("record", UNREADABLE.values(), ids=UNREADABLE)
def test_an_unreadable_record_is_skipped_and_its_name_is_not_free(redis_client, record):
    for instance in ("w1", "w2"):
        presence(redis_client, instance, types=("dispatch",)).announce()
    redis_client.set(presence_key("cue", "dispatch", "default", "w2"), record)
    members = list_members(redis_client, "cue")
    assert [actor.instance for actor in members.alive] == ["w1"]
    assert members.gone == ()
    with pytest.raises(InstanceTaken):
        presence(redis_client, "w2", types=("dispatch",)).announce(patience_seconds=0)
