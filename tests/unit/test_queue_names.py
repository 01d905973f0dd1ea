"""Q1: one builder and parser for every queue name."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from opencue_sched.coordination.names import (
    BoardKeys,
    QueueName,
    consumed_queues,
    job_hash,
    parse_presence_key,
    presence_key,
    priority_lists,
    queue_stats,
    reply_queue,
)
from opencue_sched.errors import InvalidInput

names = st.from_regex(r"[a-z0-9][a-z0-9_.-]{0,62}", fullmatch=True)


@given(ns=names, type_=names, group=st.none() | names, instance=st.none() | names)
def test_every_name_that_can_be_built_parses_back(ns, type_, group, instance):
    place = (ns, type_, group, instance if group else None)
    name = QueueName(*place)
    assert QueueName.parse(str(name)) == name
    if group and instance:
        assert parse_presence_key(presence_key(ns, type_, group, instance)) == place[1:]


words = st.sampled_from(["q", "work", "ctl", "type", "group", "inst", "prio", "reply", "job", "meta", "actor", "queue"])


@given(st.text(max_size=80) | st.lists(words | names | st.sampled_from(["stats", "A b", "", "1"])).map(":".join))
@example("cue:meta:actor:inst:Dispatch:default:1")
@example("cue:q:reply:a b")
@example("cue:job:j1\n")
def test_what_parses_is_what_is_built(text):
    with suppress(InvalidInput):
        assert text == str(QueueName.parse(text))


@pytest.mark.parametrize("bad", ["", "Upper", "a:b", "-a", "a" * 64, "a b", "ä"])
def test_names_outside_the_charset_are_refused(bad):
    for place in ((bad, "dispatch"), ("cue", bad), ("cue", "dispatch", bad), ("cue", "dispatch", "spi", bad)):
        with pytest.raises(InvalidInput, match="is not a queue name of the form"):
            QueueName.parse(str(QueueName(*place)))


def test_an_instance_needs_a_group():
    with pytest.raises(InvalidInput, match="is not a queue name of the form"):
        QueueName.parse("cue:q:work:type:dispatch:inst:node1")


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
