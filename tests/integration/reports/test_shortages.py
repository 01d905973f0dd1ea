"""Frames that end with a limit's exit status, since they got no licence: their layers are bound, and wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Engine, text

from opencue_sched.domain.states import FrameState
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.reports.completion import Releaser
from opencue_sched.store.limit_bindings import LicenceShortage, follow_shortages
from tests.kit.limits import has_types
from tests.kit.runs import FarmView, complete_frame, start

SHORT = 330


@pytest.fixture(autouse=True)
def limit(engine: Engine, view: FarmView) -> None:
    """A limit whose shortage frames tell by their exit status; its layers wait for five minutes."""
    with engine.connect() as connection:
        if not has_types(connection):
            pytest.skip("limits have no exit status before V49")
    view.run_sql(
        "INSERT INTO limit_record (pk_limit_record, str_name, int_max_value, int_exit_status, int_delay_minutes)"
        " VALUES ('nuke', 'nuke', 5, :status, 5)",
        status=SHORT,
    )


def bound(engine: Engine) -> list[tuple[str, str]]:
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT pk_limit_record, str_source FROM layer_limit ORDER BY 1"))
        return [(row.pk_limit_record, row.str_source) for row in rows]


def start_after(engine: Engine) -> tuple[datetime | None, str | None]:
    with engine.connect() as connection:
        return tuple(connection.execute(text("SELECT ts_start_after, str_start_after_reason FROM layer")).one())


def minutes_from_now(moment: datetime | None) -> float:
    assert moment is not None
    return (moment - datetime.now(UTC)).total_seconds() / 60


@pytest.mark.parametrize(
    ("layer", "job"),
    [
        ({}, {}),
        ({}, {"max_retries": 0}),
        ({"timeout": 10, "ran_seconds": 601}, {}),
        ({"ran_seconds": 43_201}, {"max_retries": 0}),
    ],
    ids=["retries", "no retries", "timed out", "ran for long"],
)
def test_a_frame_that_got_no_licence_waits_with_its_layer_whatever_its_retries(
    engine: Engine, view: FarmView, layer: dict[str, Any], job: dict[str, Any]
) -> None:
    # given a running frame, when it ends with the limit's exit status
    fields = {**layer}
    ran = fields.pop("ran_seconds", 0)
    run = start(view, LayerSpec(frames=2, **fields), **job)
    view.run_sql("UPDATE frame SET ts_started = clock_timestamp() - make_interval(secs => :ran)", ran=ran)
    outcome = complete_frame(engine, run.report(exit_status=SHORT))
    # then it waits, its layer is bound, and starts nothing for five minutes
    assert outcome.state is FrameState.WAITING
    assert bound(engine) == [("nuke", "AUTO")]
    moment, reason = start_after(engine)
    assert 4 < minutes_from_now(moment) <= 5
    assert str(SHORT) in reason
    view.assert_consistent()


def test_a_frame_that_is_eaten_binds_and_delays_nothing(engine: Engine, view: FarmView) -> None:
    run = start(view, autoeat=True)
    assert complete_frame(engine, run.report(exit_status=SHORT)).state is FrameState.EATEN
    assert (bound(engine), start_after(engine)) == ([], (None, None))


@pytest.mark.parametrize(("retries", "state"), [(3, FrameState.WAITING), (0, FrameState.DEAD)])
def test_without_a_delay_the_layer_is_bound_and_the_frame_failed_as_any_other(
    engine: Engine, view: FarmView, retries: int, state: FrameState
) -> None:
    view.run_sql("UPDATE limit_record SET int_delay_minutes = 0")
    run = start(view, max_retries=retries)
    assert complete_frame(engine, run.report(exit_status=SHORT)).state is state
    assert (bound(engine), start_after(engine)) == ([("nuke", "AUTO")], (None, None))


def test_a_limit_that_does_not_tag_delays_alone(engine: Engine, view: FarmView) -> None:
    view.run_sql("UPDATE limit_record SET b_auto_tag = false")
    run = start(view)
    complete_frame(engine, run.report(exit_status=SHORT))
    assert bound(engine) == []
    assert start_after(engine)[0] is not None


@pytest.mark.parametrize("source", ["SPEC", "MANUAL"])
def test_what_a_job_file_or_a_person_bound_stays_that(engine: Engine, view: FarmView, source: str) -> None:
    run = start(view)
    view.run_sql(
        "INSERT INTO layer_limit (pk_layer_limit, pk_layer, pk_limit_record, str_source)"
        " SELECT 'bound', pk_layer, 'nuke', :source FROM layer",
        source=source,
    )
    complete_frame(engine, run.report(exit_status=SHORT))
    assert bound(engine) == [("nuke", source)]


def test_a_later_delay_stays_and_several_frames_of_one_transaction_delay_once(engine: Engine, view: FarmView) -> None:
    run = start(view, LayerSpec(frames=4), running=3)
    view.run_sql("UPDATE layer SET ts_start_after = now() + interval '1 hour', str_start_after_reason = 'a person'")
    Releaser(engine).end([run.report(index, exit_status=SHORT) for index in range(3)])
    moment, reason = start_after(engine)
    assert minutes_from_now(moment) > 58
    assert (reason, bound(engine)) == ("a person", [("nuke", "AUTO")])


@pytest.fixture
def layers(view: FarmView) -> list[str]:
    """The ids of three layers, in their order."""
    with view.farm() as farm:
        farm.job([LayerSpec()] * 3)
    return [row.pk_layer for row in view.rows("SELECT pk_layer FROM layer ORDER BY pk_layer")]


@contextmanager
def an_hour_meanwhile(engine: Engine, view: FarmView, layers: Sequence[str]) -> Iterator[None]:
    """While another transaction that delays the second of three layers for an hour is open, and is waited for, frames
    of all three get no licence, the last layer named first; after it their transaction is committed."""

    def end() -> None:
        shortage = LicenceShortage("nuke", SHORT, delay_minutes=5, auto_tag=False)
        with engine.begin() as connection:
            follow_shortages(connection, [(layer, shortage) for layer in reversed(layers)])

    with ThreadPoolExecutor(1) as threads:
        with engine.begin() as other:
            hour = "UPDATE layer SET ts_start_after = now() + interval '1 hour' WHERE pk_layer = :layer"
            other.execute(text(hour), {"layer": layers[1]})
            ended: Future[None] = threads.submit(end)
            view.wait_for_waiters(1)
            yield
        ended.result()


def test_layers_are_delayed_in_the_order_of_their_ids(engine: Engine, view: FarmView, layers: list[str]) -> None:
    # given layers that are to be delayed, when another transaction has the second
    with an_hour_meanwhile(engine, view, layers):
        free = view.rows("SELECT pk_layer FROM layer FOR NO KEY UPDATE SKIP LOCKED")
    # then the first was locked by then, the third was not
    assert [row.pk_layer for row in free] == layers[2:]


def test_a_longer_delay_that_was_waited_for_stays(engine: Engine, view: FarmView, layers: list[str]) -> None:
    # given layers that are to be delayed, when another transaction delays the second for longer
    with an_hour_meanwhile(engine, view, layers):
        pass
    # then that stays, and the others are delayed
    rows = view.rows("SELECT ts_start_after FROM layer ORDER BY pk_layer")
    assert [minutes_from_now(row.ts_start_after) > 30 for row in rows] == [False, True, False]


def test_another_exit_status_is_no_shortage(engine: Engine, view: FarmView) -> None:
    run = start(view)
    complete_frame(engine, run.report(exit_status=331))
    assert (bound(engine), start_after(engine)) == ([], (None, None))
