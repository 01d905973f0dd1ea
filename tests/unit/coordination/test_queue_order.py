"""The order in which queues are asked."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from opencue_sched.coordination.transport import QUEUE_AGE_SECONDS, AgedOrder
from tests.kit.frozen_clock import Clock

QUEUES = ["instance", "group", "type"]


def order_of(queues, clock) -> AgedOrder:
    order = AgedOrder(clock=clock)
    order.update(queues)
    return order


def test_queues_are_asked_as_declared():
    order = order_of(QUEUES, Clock(0.0))
    assert order.consume(3) == QUEUES
    assert order.rotate("instance") == "instance"
    assert order.consume(3) == QUEUES
    assert order.consume(2) == QUEUES[:2]


def test_a_queue_passed_over_for_its_age_is_asked_first_once():
    clock = Clock(0.0)
    order = order_of(QUEUES, clock)
    for second in range(1, 6):
        clock.now = float(second)
        order.rotate("instance")
        assert order.consume(3)[0] == ("instance" if second < 5 else "group")
    assert order.consume(3) == ["type", "instance", "group"]
    assert order.consume(3) == QUEUES


@given(steps=st.lists(st.sampled_from(QUEUES), min_size=1, max_size=200))
def test_whatever_is_busy_each_queue_comes_first_within_a_few_ages(steps):
    clock = Clock(0.0)
    order = order_of(QUEUES, clock)
    first_at = dict.fromkeys(QUEUES, 0.0)
    for busy in steps:
        clock.now += 1
        asked = order.consume(3)
        assert sorted(asked) == sorted(QUEUES)
        first_at[asked[0]] = clock.now
        if asked[0] == busy:
            first_at[busy] = clock.now
        order.rotate(asked[0])
        assert all(clock.now - at <= QUEUE_AGE_SECONDS + len(QUEUES) for at in first_at.values())


def test_queues_that_come_and_go_are_followed():
    order = AgedOrder(clock=Clock(0.0))
    assert order.consume(3) == []
    order.update(QUEUES)
    order.update(["group"])
    assert order.consume(3) == ["group"]
    order.rotate("gone")
    assert order.consume(3) == ["group"]
