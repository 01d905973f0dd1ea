"""Plans of a layer or a few, and what they placed."""

from __future__ import annotations

from dataclasses import replace

from opencue_sched.domain.hosts import Host
from opencue_sched.domain.jobs import Job, Layer
from opencue_sched.domain.verdicts import LayerVerdict, Verdict
from opencue_sched.placement.plan_state import Plan
from opencue_sched.placement.policies import Refusal
from tests.kit.values import make_job, make_snapshot, plan
from tests.unit.placement.frozen_pool import FrozenPool

KEPT = Refusal(Verdict.HELD, "kept for others")


def placed(planned: Plan) -> list[tuple[str, str]]:
    """(frame, host) of every planned proc, in order."""
    return [(proc.frame.id, proc.host.id) for proc in planned.procs]


def only_verdict(planned: Plan) -> LayerVerdict:
    assert len(planned.verdicts) == 1
    return planned.verdicts[0]


def plan_layer(layer: Layer, *hosts: Host, job: Job | None = None, **changes: object) -> Plan:
    """Plan one layer of one job; changes named as fields of the snapshot go there, the rest to ``plan``."""
    in_snapshot = {
        name: changes.pop(name) for name in ("subscriptions", "folders", "job_caps", "limits") if name in changes
    }
    job = replace(job or make_job(), layers=(layer,))
    return plan(make_snapshot(job, **in_snapshot), FrozenPool(hosts), **changes)  # type: ignore[arg-type]
