"""A layer that found no host rests, unless a host has changed since it was looked up."""

from __future__ import annotations

from opencue_sched.dispatch.rest import LayerRest
from opencue_sched.domain.verdicts import LayerVerdict, Verdict

BLOCKED = LayerVerdict("job", "layer", Verdict.NO_HOST, 0, 3)


def test_a_layer_that_found_no_host_rests_until_a_host_changes():
    rest = LayerRest(60.0)
    rest.rest("cluster", [BLOCKED], roused=rest.roused)
    assert rest.resting("cluster").keys() == {"layer"}
    rest.rouse()
    assert rest.resting("cluster") == {}


def test_a_layer_does_not_rest_when_another_pass_took_note_of_a_change_meanwhile():
    rest = LayerRest(60.0)
    before = rest.roused
    rest.rouse()
    rest.rest("cluster", [BLOCKED], roused=before)
    assert rest.resting("cluster") == {}
