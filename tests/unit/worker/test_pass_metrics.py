"""What is counted of a pass, and of a recompute."""

from __future__ import annotations

from collections import Counter

import pytest
from prometheus_client import REGISTRY

from opencue_sched.accounting.recompute import RecomputeReport
from opencue_sched.dispatch.report import PassEnd, PassReport
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.placement.plan_state import Plan
from opencue_sched.worker.metrics import record_pass, record_recompute

PLAN = Plan()


def sample(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


@pytest.mark.parametrize(
    ("planned", "ended", "processed"),
    [
        (True, PassEnd.BOOKED, 3),
        (True, PassEnd.SATURATED, 3),
        (True, PassEnd.CLAIM_LOST, 0),
        (True, PassEnd.NOT_READY, 0),
        (False, PassEnd.SATURATED, 0),
        (False, PassEnd.QUERY_ERROR, 0),
    ],
)
def test_jobs_are_processed_by_a_pass_that_went_all_the_way(planned: bool, ended: PassEnd, processed: int) -> None:
    cluster = Cluster("facility", "show", ClusterKind.ALLOC, ("general",), "alloc")
    report = PassReport(cluster, ended=ended, jobs=3, show_name="whole", plan=PLAN if planned else None)
    before = sample("scheduler_jobs_queried_total"), sample("scheduler_jobs_processed_total", show_name="whole")
    record_pass(report)
    after = sample("scheduler_jobs_queried_total"), sample("scheduler_jobs_processed_total", show_name="whole")
    assert (after[0] - before[0], after[1] - before[1]) == (3, processed)


def test_refusals_are_counted_by_what_refused() -> None:
    def counted() -> list[float]:
        tables = ("subscription", "folder", "folder_gpus", "limit")
        return [sample("scheduler_accounting_limit_exceeded_total", table=table) for table in tables]

    cluster = Cluster("facility", "show", ClusterKind.ALLOC, ("general",), "alloc")
    before = counted()
    record_pass(PassReport(cluster, refusals=Counter(subscription=1, folder=2, limit=4)))
    assert [after - at_first for after, at_first in zip(counted(), before, strict=True)] == [1, 2, 0, 4]


def test_of_a_recompute_is_shown_what_is_in_flight_and_since_when() -> None:
    record_recompute(RecomputeReport(shows=1, procs=2, in_flight=7, oldest_in_flight_seconds=3.5))
    assert sample("scheduler_ledger_in_flight") == 7
    assert sample("scheduler_ledger_oldest_in_flight_seconds") == 3.5
