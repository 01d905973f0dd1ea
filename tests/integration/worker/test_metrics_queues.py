"""What the leading beat shows of clusters on the board and of queues."""

from __future__ import annotations

from sqlalchemy import Engine

from opencue_sched.coordination.keys import presence_index
from opencue_sched.coordination.postings import FAILURE_KINDS
from opencue_sched.coordination.presence import Presence
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.worker import fleet_metrics
from opencue_sched.worker.fleet_metrics import FleetCensus
from opencue_sched.worker.process import Process
from tests.integration.worker.metered import fail_and_trash, sample


def test_clusters_that_failed_and_those_off_the_board_are_known(process: Process, census: FleetCensus, engine: Engine):
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(tags=["big"], hostname_tag=False)
        farm.job([LayerSpec(frames=9, tags="general | big")])
    process.sweep()
    one, other = process.postings.posted()
    census.look_at_queues()
    assert sample("scheduler_clusters_cooled_down", reason="postgresql") == sample("scheduler_postings_trashed") == 0
    # when the passes of both fail, and somebody takes one of them off the board
    fail_and_trash(process, one, other)
    census.look_at_queues()
    # then each is known by its state, and the failed one by what failed
    failed = {kind: sample("scheduler_clusters_cooled_down", reason=kind) for kind in FAILURE_KINDS}
    assert failed == {"postgresql": 1, "redis": 0, "program": 0}
    assert sample("scheduler_postings_trashed") == 1


def test_a_group_that_is_gone_has_no_backlog_any_more(census: FleetCensus, redis_client):
    worker = Presence(redis_client, "cue", types=["dispatch"], group="old", instance="one")
    worker.announce()
    census.look_at_queues()
    assert fleet_metrics.BEAT.get_sample_value("scheduler_backlog_per_worker", {"group": "old"}) == 0
    # when it is gone, and forgotten
    worker.withdraw()
    redis_client.delete(presence_index("cue"))
    census.look_at_queues()
    assert fleet_metrics.BEAT.get_sample_value("scheduler_backlog_per_worker", {"group": "old"}) is None
