"""A run that ends rouses who waits at a cap, whatever hosts that work is for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pytest
from celery import Celery
from sqlalchemy import Engine, text

from opencue_sched.accounting.imported_shows import note_imported
from opencue_sched.coordination.postings import Enqueued
from opencue_sched.domain.clusters import Cluster
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.settings import Rqd, Settings
from opencue_sched.store.accounting import managed_show_versions
from opencue_sched.worker.process import Process
from tests.kit.frozen_clock import Clock
from tests.kit.passes import Passes, passes


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def here(engine: Engine, settings: Settings, clock: Clock) -> Iterator[Passes]:
    queue = settings.queue.model_copy(update={"manual_tags_chunk_size": 1})
    changed = settings.model_copy(update={"rqd": Rqd(dry_run_mode=True), "queue": queue})
    with passes(engine, changed, sweep_clock=clock) as runner:
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


Sent = tuple[Cluster, Enqueued]


def put_to_rest(here: Passes, sent: Iterable[Sent]) -> dict[str, list[Verdict]]:
    """A pass over every cluster, in the order of their tags, and then all sleep: what each pass said."""
    said = {}
    for cluster, enqueued in sorted(sent, key=lambda it: it[0].tags):
        claim = here.postings.claim(enqueued.uuid, "somebody", ttl_seconds=10)
        report = here.runner.run([cluster], alive=lambda: True)[0]
        assert claim is not None
        here.postings.end(claim, "sleep", delay_seconds=600)
        said[cluster.tags[0]] = [it.verdict for it in report.verdicts]
    return said


def woken_by(here: Passes, clock: Clock, host: str) -> Sequence[Sent]:
    """The clusters that are sent for when something came free on a host, longer after others did than any has to wait
    and than the scan before is believed."""
    clock.advance(2)
    report = here.sweeper.sweep(wake_hosts=[host])
    assert report.ask_again == 0
    return report.send


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
def test_clusters_that_wait_at_a_cap_are_roused_by_a_run_that_ends_until_they_wait_no_more(
    here: Passes, clock: Clock, engine: Engine, cap: str, verdict: Verdict
) -> None:
    plant(here, cap, clusters=3)
    said = put_to_rest(here, here.sweeper.sweep().send)
    assert said == {"busy": [Verdict.FLOWING] * 2} | {f"tag{number}": [verdict] for number in range(3)}

    for (proc, host), booked in zip(running(engine), ({"tag0"}, {"tag1"}), strict=True):
        # when a run ends
        end(here, proc)
        assert here.sweeper.sweep().send == (), "a sweep that nobody asked for rouses nobody"

        # then those that wait are looked at, and the first has what came free
        said = put_to_rest(here, woken_by(here, clock, host))
        assert {tag for tag, verdicts in said.items() if verdicts == [Verdict.FLOWING]} == booked
        assert set(said) == {"tag0", "tag1", "tag2"} - ({"tag0"} - booked)


def test_the_sweeps_of_a_worker_rouse_what_its_own_passes_wait_for(settings: Settings, engine: Engine) -> None:
    app = Celery("caps", broker="memory://", set_as_current=False)
    made = Process(settings, app)
    try:
        assert made.dispatcher.runner.at_caps is made.sweeper.at_caps
    finally:
        made.close()
        app.close()
