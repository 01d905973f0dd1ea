"""Which layers a pass has read too early."""

from __future__ import annotations

from opencue_sched.dispatch.worked_layers import WorkedLayers


def test_who_read_before_a_booking_is_told_of_it_and_who_read_after_it_is_not() -> None:
    worked = WorkedLayers()
    worked.note(["a", "b"], 10.0)
    worked.note(["b"], 11.0)
    assert worked.since(9.5) == {"a", "b"}
    assert worked.since(10.5) == {"b"}
    assert worked.since(11.0) == frozenset()


def test_a_booking_is_forgotten_when_no_pass_can_have_read_before_it() -> None:
    worked = WorkedLayers()
    worked.note(["a"], 10.0)
    worked.note([], 15.0)
    assert worked.since(0.0) == {"a"}
    worked.note(["b"], 30.0)
    assert worked.since(0.0) == {"b"}
