"""What is counted of a pass."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY

from opencue_sched.dispatch.report import PassEnd, PassReport
from opencue_sched.domain.cluster import Cluster, ClusterKind
from opencue_sched.operate.metrics import record_pass


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
    report = PassReport(cluster, ended=ended, jobs=3, planned=planned, show_name="whole")
    before = sample("scheduler_jobs_queried_total"), sample("scheduler_jobs_processed_total", show_name="whole")
    record_pass(report)
    after = sample("scheduler_jobs_queried_total"), sample("scheduler_jobs_processed_total", show_name="whole")
    assert (after[0] - before[0], after[1] - before[1]) == (3, processed)
