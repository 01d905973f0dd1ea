"""Whether a cluster goes on at once with the jobs behind those that a pass could not place (see dispatch.rest)."""

from __future__ import annotations

from opencue_sched.dispatch.report import PassReport
from opencue_sched.dispatch.rest import LayerRest


def walk_on(rest: LayerRest, report: PassReport, *, more: bool) -> None:
    """Decide it for a pass that is done, and what the next one leaves out. ``more``: there may be jobs behind.

    Frames that were lost to somebody else may be had a moment later, so their layers have their turn once more before
    the walk goes on; those that lose all of them again are passed over like the others, or twenty of them would keep
    everybody waiting. Those without a host are not: they rest, and a host that changes for one of them is for them
    first. Nor are those without a host only because frames that were then refused or lost had it in the plan: there is
    one for them, and they are next.

    Whatever woke the cluster in the middle of a walk, or since another process ended it, may be for those that were
    passed over: then they have their turn at once.
    """
    key = report.cluster.key
    once = report.lost - rest.lost_before(key, report.lost)
    next_ones = rest.given_back(key, report.given_back)
    blocked = [it for it in report.blocked if it.kind not in next_ones]
    hostless = {it.verdict.layer_id for it in report.blocked}
    in_vain = [it for it in report.verdicts if it.layer_id not in once and report.in_vain(it)]
    passed_over = [report.as_is(it) for it in in_vain if it.layer_id not in hostless]
    more = more or bool(next_ones)
    if report.frames_booked or not more or not (in_vain or once):
        woken = rest.walk_ends(key, report.wakes)
        report.go_on = woken and not report.frames_booked
    elif passed_over or blocked:
        rest.walk_on(key, passed_over, report.wakes)
        report.go_on = True
    rest.count_pass(key, blocked, passed_over, full=more)
    report.look_again = rest.look_again(key)
