"""Where a process serves its metrics, and which series it serves."""

from __future__ import annotations

import urllib.request

import pytest
from prometheus_client import REGISTRY, CollectorRegistry

from opencue_sched.clock import boot_clock
from opencue_sched.embedded.servers.processes import free_port
from opencue_sched.errors import SchedulerError
from opencue_sched.worker import fleet_metrics, metrics
from opencue_sched.worker.fleet_metrics import FleetCensus
from tests.integration.worker.metered import Gate


def test_a_second_process_serves_the_next_free_port_and_none_serves_none():
    port = free_port()
    first = metrics.serve_metrics("127.0.0.1", port, REGISTRY)
    second = metrics.serve_metrics("127.0.0.1", port, REGISTRY)
    assert first is not None
    assert second is not None
    try:
        assert first[1] == port
        assert port < second[1] < port + metrics.PORTS_TRIED
        with urllib.request.urlopen(f"http://127.0.0.1:{second[1]}/metrics", timeout=10) as answer:
            assert b"scheduler_jobs_queried_total" in answer.read()
    finally:
        for server in (first[0], second[0]):
            server.shutdown()
            server.server_close()
    assert metrics.serve_metrics("127.0.0.1", 0, REGISTRY) is None


def test_an_address_of_another_machine_is_a_clear_error():
    with pytest.raises(SchedulerError, match=r"192\.0\.2\.1:"):
        metrics.serve_metrics("192.0.2.1", free_port(), REGISTRY)


def of_beats(*, leading: bool) -> set[str]:
    of_leader = {name for figures in fleet_metrics.LEADING for name, _, _ in figures.gauges} if leading else set()
    standby = {"leader_fence", "tick_age_seconds", "ticks_ahead_seconds"}
    return {f"scheduler_{name}" for name in standby | of_leader}


def test_each_process_shows_only_the_series_that_it_feeds(census: FleetCensus, gate: Gate, monkeypatch):
    def names(registry: CollectorRegistry) -> set[str]:
        found = {metric.name for metric in registry.collect()}
        return {name for name in found if name.startswith(("scheduler_", "cuebot_"))}

    assert names(metrics.REPORT_SERVICE) == {"scheduler_release_events"}
    assert not names(REGISTRY) & of_beats(leading=True)
    assert "scheduler_jobs_queried" in names(REGISTRY)
    # when a beat leads and has looked at the fleet, when it leads no more, and when no census went well for a minute
    census.look_at_queues()
    census.look_at_farm()
    assert names(fleet_metrics.BEAT) == of_beats(leading=True)
    gate.fence = None
    assert names(fleet_metrics.BEAT) == of_beats(leading=False)
    gate.fence = 1
    assert names(fleet_metrics.BEAT) == of_beats(leading=True)
    later = boot_clock() + 61
    monkeypatch.setattr(fleet_metrics, "boot_clock", lambda: later)
    assert names(fleet_metrics.BEAT) == of_beats(leading=False)
