"""What a worker and the leading beat show of the fleet, both in the process of the test, and what is done there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import REGISTRY
from sqlalchemy import text

from opencue_sched.worker import fleet_metrics
from opencue_sched.worker.process import Process
from tasks import dispatch
from tests.kit.tasks import run_task


class Gate:
    """The leader gate of a beat, which leads while ``fence`` is a number."""

    def __init__(self) -> None:
        self.fence: int | None = 1
        self.tick_age = 0.0


def sample(name: str, **labels: str) -> float:
    """A value that a worker or a beat shows; 0 where neither does."""
    found = (registry.get_sample_value(name, labels) for registry in (REGISTRY, fleet_metrics.BEAT))
    return next((value for value in found if value is not None), 0.0)


@contextmanager
def increments(name: str, **labels: str) -> Iterator[list[float]]:
    """How much a counter grew."""
    grown = [-sample(name, **labels)]
    yield grown
    grown[0] += sample(name, **labels)


def series(name: str) -> dict[tuple[str, ...], float]:
    """What a beat shows of a metric, by the values of its labels; without zeros."""
    found = (metric for metric in fleet_metrics.BEAT.collect() if metric.name == name)
    return {tuple(it.labels.values()): it.value for metric in found for it in metric.samples if it.value}


def run_passes(process: Process) -> list[str]:
    """Pass once over every cluster that has work; how each ended."""
    process.hosts.cache.expire()
    while not process.hosts.reread():
        pass
    process.backlog.missed()
    process.backlog.resync()
    process.sweep(wake_shows=[cluster.show_id for cluster in process.sweeper.clusters])
    ended = [
        str(run_task(dispatch.dispatch_cluster, process, uuid)["ended"]) for uuid in process.postings.posted().values()
    ]
    process.verdicts.write()
    return ended


def put_to_sleep(process: Process, cluster: str) -> None:
    for posting in process.postings.find_all(cluster):
        process.postings.update(posting, "rest", 60_000)


def fail_and_trash(process: Process, *clusters: str) -> None:
    """A pass over each cluster fails; the first of them somebody takes off the board."""
    for key in clusters:
        posting = process.postings.posted().get(key)
        assert posting is not None
        process.postings.update(posting, "rest", 0)
        claim = process.postings.claim(posting, "test", ttl_seconds=60)
        assert claim is not None
        process.postings.end(claim, "fail", delay_seconds=60, reason="postgresql: DataError: out of range", error="")
    process.postings.update(str(process.postings.posted().get(clusters[0])), "trash", "bad hosts")


def hold_a_host(connection) -> None:
    """A host has drained for two hours, for a layer that is gone."""
    connection.execute(
        text(
            "INSERT INTO opencue_sched_hold (pk_host, pk_layer, pk_job, cores, memory_kb, gpus, granted_at, until)"
            " SELECT pk_host, 'layer', 'job', 8, 1, 0, now() - interval '2 hours', now() + interval '1 minute'"
            " FROM host LIMIT 1"
        )
    )
