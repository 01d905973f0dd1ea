"""A run that ends rouses who waits at a cap of it, whatever hosts that work is for, and nobody else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine, text

from opencue_sched.accounting.caps import note_imported
from opencue_sched.dispatch import clusters
from opencue_sched.domain.cluster import Cluster, Verdict
from opencue_sched.embedded.farm import Farm
from opencue_sched.embedded.farm_specs import LayerSpec
from opencue_sched.settings import Rqd, Settings
from opencue_sched.store.accounting import managed_show_versions
from opencue_sched.store.pending import CapHeadroom, CapKind, Capped, fetch_headroom
from opencue_sched.worker.runtime import Runtime
from tests.polling import eventually

from .passes import Passes, passes


@pytest.fixture
def here(engine: Engine, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Passes]:
    monkeypatch.setattr(clusters, "_SCAN_BELIEVED_SECONDS", 0.0)  # who is woken is what has work by now
    queue = settings.queue.model_copy(update={"manual_tags_chunk_size": 1})
    with passes(engine, settings.model_copy(update={"rqd": Rqd(dry_run_mode=True), "queue": queue})) as runner:
        yield runner


def plant(here: Passes, cap: str, *, clusters: int) -> None:
    """Two frames for hosts of one tag, which fill a cap, and one under it for hosts of each of some other tags."""
    tags = [f"tag{number}" for number in range(clusters)]
    with here.engine.begin() as connection:
        farm = Farm(connection)
        show = farm.default_show()
        for tag in ("busy", *tags):
            farm.host(cores=8, tags=[tag], alloc_tag=False, hostname_tag=False)
        limits = [farm.limit("arnold", 2)] if cap == "limit" else []
        folder = farm.folder(show, "capped", max_cores=2) if cap == "folder" else None
        layers = [LayerSpec(frames=1, tags=tag, limits=limits) for tag in ("busy", "busy", *tags)]
        farm.job(layers, show=show, folder_id=folder, max_cores=2 if cap == "job" else 100)
        note_imported(here.client, managed_show_versions(connection))


def put_to_rest(here: Passes) -> dict[str, list[Verdict]]:
    """A pass over every cluster, in the order of their tags, and then all sleep: what each pass said."""
    said = {}
    for cluster, enqueued in sorted(here.sweeper.sweep().send, key=lambda sent: sent[0].tags):
        claim = here.sweeper._postings.claim(enqueued.uuid, "somebody", ttl_seconds=10)
        report = here.runner.run([cluster], alive=lambda: True)[0]
        assert claim is not None
        here.sweeper._postings.end(claim, "sleep", delay_seconds=600)
        said[cluster.tags[0]] = [it.verdict for it in report.verdicts]
    return said


def woken_by(here: Passes, host: str) -> list[Cluster]:
    """The clusters that are sent for when something came free on a host, however long ago room was last counted."""
    sent: list[Cluster] = []

    def counted() -> bool:
        report = here.sweeper.sweep(wake_hosts=[host])
        sent.extend(cluster for cluster, _ in report.send)
        return not report.ask_again

    eventually(counted)
    return sent


def running(engine: Engine) -> list[tuple[str, str]]:
    """What runs: proc and host."""
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text("SELECT pk_proc, pk_host FROM proc"))]


def end(here: Passes, proc: str) -> None:
    with here.engine.begin() as connection:
        frame = connection.execute(text("DELETE FROM proc WHERE pk_proc = :id RETURNING pk_frame"), {"id": proc})
        stopped = text("UPDATE frame SET str_state = 'SUCCEEDED' WHERE pk_frame = :id")
        connection.execute(stopped, {"id": frame.scalar()})
    here.runner.ledger.release([proc])


@pytest.mark.parametrize(
    ("cap", "verdict"),
    [("limit", Verdict.OVER_LIMIT), ("folder", Verdict.OVER_FOLDER), ("job", Verdict.OVER_JOB)],
)
def test_as_many_clusters_as_there_is_room_for_are_roused_by_a_run_that_ends(
    here: Passes, engine: Engine, cap: str, verdict: Verdict
) -> None:
    plant(here, cap, clusters=3)
    assert put_to_rest(here) == {"busy": [Verdict.FLOWING] * 2} | {f"tag{number}": [verdict] for number in range(3)}
    procs = running(engine)
    (host,) = {host for _, host in procs}

    # when nothing ended under the cap
    assert woken_by(here, host) == []

    # when one run did, the cluster that waits longest is roused, and the next for the next
    woken = []
    for proc, _ in procs:
        end(here, proc)
        assert here.sweeper.sweep().send == (), "a sweep that nobody asked for rouses nobody"
        (cluster,) = woken_by(here, host)
        assert here.runner.run([cluster], alive=lambda: True)[0].frames_booked == 1
        woken += cluster.tags
    assert woken == ["tag0", "tag1"]
    assert woken_by(here, host) == []


def test_room_is_counted_only_so_often_and_what_ended_meanwhile_is_asked_for_again(
    here: Passes, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given work that waits at a cap whose use takes long to count
    plant(here, "folder", clusters=1)
    put_to_rest(here)
    (one, host), _ = running(engine)
    passed, counts = [0.0], []

    def slowly(*given: Any) -> dict[Capped, CapHeadroom]:
        counts.append(given)
        passed[0] += 3
        return fetch_headroom(*given)

    monkeypatch.setattr(clusters, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0]))
    monkeypatch.setattr(clusters, "fetch_headroom", slowly)
    assert here.sweeper.sweep(wake_hosts=[host]).ask_again == 0

    # when a run ends and is told of at once
    end(here, one)
    report = here.sweeper.sweep(wake_hosts=[host])

    # then nobody counts, and who told is to ask again
    assert len(counts) == 1
    assert report.send == ()
    assert report.ask_again > 0
    # and after ten times as long as the counting took it is counted
    passed[0] += 31
    assert len(here.sweeper.sweep(wake_hosts=[host]).send) == 1


def test_a_freed_host_costs_nothing_more_while_nobody_waits_at_a_cap(here: Passes, engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host(cores=1, hostname_tag=False)
        farm.job([LayerSpec(frames=1), LayerSpec(frames=1, cores=4)])
    here.sweeper.sweep()
    with here.counted() as before:
        here.sweeper.sweep(wake_hosts=[host.id])
    (cluster,) = here.sweeper.feed.clusters.values()
    while here.runner.run([cluster], alive=lambda: True)[0].frames_booked:
        continue
    with here.counted() as after:
        here.sweeper.sweep(wake_hosts=[host.id])
    assert after.texts == before.texts
    assert here.sweeper.cap_waits.caps() == frozenset()


def test_room_is_what_a_cap_leaves_of_live_use_and_a_vertex_without_a_cap_has_no_end_of_it(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        show = farm.default_show()
        host = farm.host(cores=16, gpus=4, gpu_memory_gb=8)
        folder = farm.folder(show, "capped", max_cores=10, max_gpus=3)
        limit, unused = farm.limit("arnold", 5), farm.limit("maya", -1)
        first = farm.job([LayerSpec(frames=2, limits=[limit])], folder_id=folder, max_cores=-1, max_gpus=0)
        second = farm.job([LayerSpec(frames=1)], folder_id=folder, max_cores=4.5, max_gpus=2)
        farm.run(first.frames, host, cores=1.5, gpus=1)
        farm.run(second.frames, host, cores=1)
        asked = [Capped(CapKind.FOLDER, folder), Capped(CapKind.LIMIT, limit), Capped(CapKind.LIMIT, unused)]
        asked += [Capped(CapKind.JOB, job) for job in (first.id, second.id, "gone")]
        room = fetch_headroom(connection, asked)
    assert list(map(room.get, asked)) == [
        CapHeadroom(5, 1),
        CapHeadroom(3, 0),
        CapHeadroom(0, 0),
        CapHeadroom(float("inf"), float("inf")),
        CapHeadroom(3, 2),
        None,
    ]


def test_the_sweeps_of_a_worker_rouse_what_its_own_passes_wait_for(settings: Settings, engine: Engine) -> None:
    app = Celery("caps", broker="memory://", set_as_current=False)
    made = Runtime(settings, app)
    try:
        assert made.dispatcher.runner.cap_waits is made.sweeper.cap_waits
    finally:
        made.close()
        app.close()
