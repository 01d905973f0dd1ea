"""Several services at once, and completions against bookings: one winner, exact hosts, no deadlock."""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError
from structlog.testing import capture_logs

from opencue_sched.clients.postgres import make_engine
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.reports.completion import Releaser, end_runs, with_counters
from opencue_sched.reports.run_ends import CompletedFrame, RunVerdict
from opencue_sched.settings import Settings
from opencue_sched.store.release import Counters, WiderLocks
from tests.kit.runs import FarmView, RecordedLedger, complete_frame, start
from tests.kit.statements import listening


def together(work: Sequence[Callable[[], object]]) -> list[object]:
    """Run callables at the same moment, each in a thread; results in order, errors raised."""
    barrier = threading.Barrier(len(work))

    def go(function: Callable[[], object]) -> object:
        barrier.wait(10)
        return function()

    with ThreadPoolExecutor(len(work)) as threads:
        return list(threads.map(go, work))


def retried(logs: Sequence[MutableMapping[str, object]]) -> list[object]:
    """SQLSTATEs our transactions were rolled back with (a booking that is rolled back raises by itself)."""
    return [entry["sqlstate"] for entry in logs if entry["event"] == "release_retried"]


def test_one_completion_at_two_services_is_applied_once(
    view: FarmView, engine: Engine, settings: Settings, ledger: RecordedLedger
) -> None:
    # given twelve running frames, and two services with an engine each
    run = start(view, LayerSpec(frames=12), running=12, cores=1)
    other = make_engine(settings)
    try:
        # when both get each report at the same moment
        for index in range(12):
            pair = together(
                [
                    lambda service=service, index=index: (
                        complete_frame(  # type: ignore[misc]
                            service, run.report(index), ledger=ledger
                        ).verdict
                    )
                    for service in (engine, other)
                ]
            )
            # then exactly one of them applied it
            assert sorted(pair) == [RunVerdict.APPLIED, RunVerdict.STALE]  # type: ignore[type-var]
    finally:
        other.dispose()
    assert sorted(ledger.released) == sorted(run.procs)
    assert view.job_state(run.job) == "FINISHED"
    view.assert_consistent()


def test_overlapping_batches_in_any_order_do_not_deadlock(view: FarmView, engine: Engine) -> None:
    # given 24 frames of two layers and jobs, each of whose reports arrives at three services, in different batches
    with view.farm() as farm:
        hosts = [farm.host(cores=32, memory_gb=64) for _ in range(3)]
        jobs = [farm.job([LayerSpec(frames=6), LayerSpec(frames=6)]) for _ in range(2)]
        farm.layer_on_layer((jobs[0], 1), (jobs[1], 0))
        farm.layer_on_layer((jobs[1], 1), (jobs[0], 0))
        frames = [frame for job in jobs for frame in job.layers[0].frames]
        procs = [farm.run([frame], hosts[index % 3])[0] for index, frame in enumerate(frames)]
    names = [hosts[index % 3].name for index in range(len(frames))]
    reports = [CompletedFrame(proc, frame, name, 0) for proc, frame, name in zip(procs, frames, names, strict=True)]

    # when they are applied in opposite orders and sizes
    def apply(order: Sequence[CompletedFrame], size: int) -> list[RunVerdict]:
        return [
            outcome.verdict  # type: ignore[union-attr]
            for start_at in range(0, len(order), size)
            for outcome in Releaser(engine).end(order[start_at : start_at + size])
        ]

    with capture_logs() as logs:
        verdicts = together(
            [
                lambda: apply(reports, 4),
                lambda: apply(reports[::-1], 3),
                lambda: apply(reports[1::2] + reports[::2], 1),
            ]
        )

    # then each is applied once, what depended on them is free, and nobody had to be rolled back
    applied = sum(verdict is RunVerdict.APPLIED for part in verdicts for verdict in part)  # type: ignore[attr-defined]
    assert applied == len(reports)
    assert set(view.states([frame for job in jobs for frame in job.layers[1].frames])) == {"WAITING"}
    assert retried(logs) == []
    view.assert_consistent()


def test_completions_and_bookings_of_one_job_do_not_deadlock(view: FarmView, engine: Engine) -> None:
    """Bookings as the commit makes them: frames and hosts SKIP LOCKED, layer_stat, job_stat, then the writes."""
    # given a job of three layers on two hosts, half of it running
    with view.farm() as farm:
        hosts = [farm.host(cores=64, memory_gb=256) for _ in range(2)]
        job = farm.job([LayerSpec(frames=20) for _ in range(3)])
        running = [frame for layer in job.layers for frame in layer.frames[:10]]
        procs = [farm.run([frame], hosts[index % 2])[0] for index, frame in enumerate(running)]
    reports = [
        CompletedFrame(proc, frame, hosts[index % 2].name, 0)
        for index, (proc, frame) in enumerate(zip(procs, running, strict=True))
    ]
    waiting = [frame for layer in job.layers for frame in layer.frames[10:]]

    def book(frames: Sequence[str]) -> int:
        booked = 0
        for index, frame in enumerate(frames):
            with engine.begin() as connection:
                found = connection.execute(
                    text(
                        "SELECT pk_frame, pk_layer FROM frame WHERE pk_frame = :f AND str_state = 'WAITING'"
                        " FOR NO KEY UPDATE SKIP LOCKED"
                    ),
                    {"f": frame},
                ).first()
                host = connection.execute(
                    text("SELECT pk_host FROM host WHERE pk_host = :h FOR NO KEY UPDATE SKIP LOCKED"),
                    {"h": hosts[index % 2].id},
                ).first()
                if found is None or host is None:
                    continue
                for table, column, value in (
                    ("layer_stat", "pk_layer", found.pk_layer),
                    ("job_stat", "pk_job", job.id),
                ):
                    connection.execute(
                        text(f"SELECT 1 FROM {table} WHERE {column} = :v FOR NO KEY UPDATE"),  # noqa: S608
                        {"v": value},
                    )
                Farm(connection).run([frame], hosts[index % 2])
                booked += 1
        return booked

    # when completions in batches and bookings one by one go on side by side
    def complete(part: Sequence[CompletedFrame]) -> int:
        return sum(
            outcome.verdict is RunVerdict.APPLIED  # type: ignore[union-attr]
            for start_at in range(0, len(part), 5)
            for outcome in Releaser(engine).end(part[start_at : start_at + 5])
        )

    with capture_logs() as logs:
        done = together(
            [
                lambda: complete(reports[:15]),
                lambda: complete(reports[15:]),
                lambda: book(waiting[:15]),
                lambda: book(waiting[15:][::-1]),
            ]
        )

    # then all of it happened, and nothing was rolled back
    assert done[:2] == [15, 15]
    assert sum(done[2:]) == len(view.procs())  # type: ignore[arg-type]
    assert retried(logs) == []
    view.assert_consistent()


def test_a_layer_that_completes_unforeseen_starts_over_with_more_locks(view: FarmView, engine: Engine) -> None:
    """Dependents' counters are foreseen from unlocked counts; when those were too high the transaction retries."""
    # given the last two frames of a layer another job waits for, one of which completes while the other is at work
    run = start(view, LayerSpec(frames=2), running=2)
    with view.farm() as farm:
        other = farm.job(name="other", show=run.job.show)
        farm.layer_on_layer((other, 0), (run.job, 0))
    first = engine.connect()
    transaction = first.begin()
    with_counts = text("SELECT 1 FROM layer_stat WHERE pk_layer = :l FOR NO KEY UPDATE")
    first.execute(with_counts, {"l": run.job.layers[0].id})

    # when two completions meet at the lock of the layer's counter
    begun: list[int] = []
    with ThreadPoolExecutor(2) as threads, listening(engine, "begin", lambda _: begun.append(threading.get_ident())):
        futures = [threads.submit(end_runs, Releaser(engine), [run.report(index)]) for index in (0, 1)]
        view.wait_for_waiters(2)
        transaction.rollback()
        first.close()
        ended = [future.result(30) for future in futures]

    # then both are applied, and whichever came second started over to lock what it had not foreseen
    assert [each.outcomes[0].verdict for each in ended] == [RunVerdict.APPLIED, RunVerdict.APPLIED]
    assert sum(thread != threading.get_ident() for thread in begun) == 3
    assert view.states(other.frames) == ["WAITING"]
    assert view.job_state(run.job) == "FINISHED"
    view.assert_consistent()


@pytest.mark.parametrize(("code", "attempts"), [("40P01", 2), ("40001", 2), ("55P03", 2), ("P0001", 1)])
def test_what_the_server_rolled_back_for_others_sake_is_done_again(engine: Engine, code: str, attempts: int) -> None:
    calls: list[Counters] = []

    def step(connection: Connection, wider: Counters) -> str:
        calls.append(wider)
        if len(calls) == 1:
            connection.execute(text(f"DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{code}'; END $$"))
        return "done"

    if attempts == 1:
        with pytest.raises(DBAPIError):
            with_counters(engine, step)
    else:
        assert with_counters(engine, step) == "done"
    assert len(calls) == attempts


def test_counters_that_keep_growing_are_an_error_and_not_a_loop(engine: Engine) -> None:
    calls = []

    def step(_connection: object, wider: Counters) -> None:
        calls.append(wider)
        raise WiderLocks(Counters([("layer", str(len(calls)))]))

    try:
        with_counters(engine, step)  # type: ignore[arg-type]
    except RuntimeError as error:
        assert "kept growing" in str(error)
    assert 1 < len(calls) < 20
