"""Every queue name is made by one builder and read by one parser."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from opencue_sched.coordination.keys import (
    BoardKeys,
    QueueName,
    consumed_queues,
    job_hash,
    parse_presence_key,
    presence_key,
    priority_lists,
    queue_stats,
    reply_queue,
    type_of,
)

names = st.from_regex(r"[a-z0-9][a-z0-9_.-]{0,62}", fullmatch=True)


@given(ns=names, type_=names, group=st.none() | names, instance=st.none() | names)
def test_every_name_that_can_be_built_parses_back(ns, type_, group, instance):
    place = (ns, type_, group, instance if group else None)
    assert type_of(str(QueueName(*place))) == type_
    if group and instance:
        assert parse_presence_key(presence_key(ns, type_, group, instance)) == place[1:]


def test_a_queue_of_an_older_naming_has_dispatch_messages():
    assert type_of("render.farm") == "dispatch"


def test_a_worker_consumes_the_most_specific_queue_first():
    assert consumed_queues("cue", "dispatch", "spi", "node1") == (
        "cue:q:work:type:dispatch:group:spi:inst:node1",
        "cue:q:work:type:dispatch:group:spi",
        "cue:q:work:type:dispatch",
    )


def test_the_other_keys_follow_the_seed():
    place = ("cue", "dispatch", "spi", "node1")
    assert priority_lists(QueueName(*place))[2] == "cue:q:work:type:dispatch:group:spi:inst:node1:prio:2"
    sweeps = "cue:q:work:type:sweep"
    assert priority_lists(QueueName("cue", "sweep")) == (sweeps, f"{sweeps}:prio:1", f"{sweeps}:prio:2")
    assert reply_queue("cue", "j1") == "cue:q:reply:j1"
    assert job_hash("cue", "j1") == "cue:job:j1"
    assert queue_stats("cue", "dispatch") == "cue:meta:queue:stats:dispatch"
    assert presence_key("cue", "dispatch", "default", "1") == "cue:meta:actor:inst:dispatch:default:1"
    assert BoardKeys("cue", "clusters", clustered=True).of("ready") == "{cue:board:clusters}:ready"
