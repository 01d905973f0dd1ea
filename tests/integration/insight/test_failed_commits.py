"""Clusters whose commits fail, one after the other, as `opencue-sched doctor` names them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from sqlalchemy import Engine

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.insight.audit import Finding, Severity
from opencue_sched.insight.doctor import diagnose
from opencue_sched.settings import Settings
from tests.kit.passes import Passes, passes
from tests.kit.plans import refuse_more_than
from tests.kit.wording import lacks


@pytest.fixture
def one(engine: Engine, settings: Settings) -> Iterator[Passes]:
    """A process in dry run beside a farm on which a frame waits and fits."""
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        farm.job([LayerSpec()])
    dry_run = settings.rqd.model_copy(update={"dry_run_mode": True})
    with passes(engine, settings.model_copy(update={"rqd": dry_run})) as found:
        yield found


def test_a_cluster_whose_last_commits_all_failed_is_named_with_the_error(
    one: Passes, engine: Engine, redis_client: redis.Redis, settings: Settings
) -> None:
    def clusters() -> list[Finding]:
        return [found for found in diagnose(engine, redis_client, settings).findings if found.what == "clusters"]

    # Given a server that takes no booking
    refuse_more_than(engine, 0, "57014")
    (cluster,) = [cluster for cluster, _ in one.sweeper.sweep().send]
    # When one commit fails, that is an accident
    one.runner.run([cluster], alive=lambda: True)
    assert clusters() == []
    # When the next fail too, nothing is dispatched there, and doctor says so
    one.runner.run([cluster], alive=lambda: True)
    one.runner.run([cluster], alive=lambda: True)
    (found,) = clusters()
    assert found.level is Severity.FAIL
    assert not lacks(found.text, "3 commits", cluster.key, "too many", "57014")
    # When one goes through, that is over
    refuse_more_than(engine, 1, "57014")
    (report,) = one.runner.run([cluster], alive=lambda: True)
    assert report.frames_booked == 1
    assert clusters() == []
