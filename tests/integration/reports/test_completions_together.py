"""Completions that are applied together."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from sqlalchemy import Engine, text

from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.reports.completion import Releaser
from opencue_sched.reports.completion_batcher import CompletionBatcher, CompletionRefused
from opencue_sched.reports.run_ends import CompletedFrame, RunVerdict
from tests.kit.counted import Counted
from tests.kit.runs import FarmView
from tests.kit.statements import listening, naming, rows_read


def running(view: FarmView, count: int) -> list[CompletedFrame]:
    """Frames of a layer, each with a host of its own; the reports that end them."""
    with view.farm() as farm:
        hosts = [farm.host(cores=16, memory_gb=64) for _ in range(count)]
        job = farm.job([LayerSpec(frames=count)])
        procs = [farm.run([frame], host)[0] for frame, host in zip(job.frames, hosts, strict=True)]
    ids = zip(procs, job.frames, hosts, strict=True)
    return [CompletedFrame(proc, frame, host.name, 0, max_rss_kb=500_000) for proc, frame, host in ids]


def end(engine: Engine, reports: Sequence[CompletedFrame]) -> None:
    outcomes = Releaser(engine).end(reports)
    assert [outcome.verdict for outcome in outcomes] == [RunVerdict.APPLIED] * len(reports)


def test_the_same_few_messages_for_any_number_of_ends(view: FarmView, engine: Engine) -> None:
    # given frames that run on as many hosts
    reports = running(view, 62)
    counts = []
    for number in (1, 60):
        together, reports = reports[:number], reports[number:]
        # when one of them ends, and when most do
        sent: list[str] = []
        with listening(engine, "before_cursor_execute", lambda *sends: sent.append(sends[2])):  # noqa: B023
            end(engine, together)
        counts.append(len(sent))
    # then as many messages are sent
    assert counts[0] == counts[1] <= 6
    view.assert_consistent()


def test_a_column_that_is_widened_between_two_ends_costs_none(view: FarmView, engine: Engine) -> None:
    # given ends that were written by statements which PostgreSQL keeps planned
    reports = running(view, 6)
    end(engine, reports[:3])
    # when an upgrade gives the answers another type, then the next are written
    view.run_sql("ALTER TABLE frame ALTER int_version TYPE bigint")
    end(engine, reports[3:])
    view.assert_consistent()


def test_an_end_that_postgresql_refuses_is_found_by_halving(view: FarmView, engine: Engine) -> None:
    # given frames that end together, of which PostgreSQL refuses one
    reports = running(view, 64)
    bad = reports[23].frame_id
    view.run_sql(
        f"""
        CREATE FUNCTION refuse_one() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF NEW.pk_frame = '{bad}' THEN RAISE EXCEPTION 'not this one'; END IF;
            RETURN NEW;
        END $$;
        CREATE TRIGGER refuse_one BEFORE UPDATE ON frame FOR EACH ROW EXECUTE FUNCTION refuse_one();
        """
    )
    # when they do
    begun: list[object] = []
    try:
        with listening(engine, "begin", begun.append):
            outcomes = Releaser(engine).end(reports)
    finally:
        view.run_sql("DROP TRIGGER refuse_one ON frame; DROP FUNCTION refuse_one()")
    # then it alone is refused, after as many transactions as halving takes
    refused = [outcome.frame_id for outcome in outcomes if outcome.verdict is not RunVerdict.APPLIED]
    assert refused == [bad]
    assert len(begun) == 1 + 2 * 6
    view.assert_consistent()


def test_what_is_read_for_ends_does_not_grow_with_the_farm(view: FarmView, engine: Engine) -> None:
    # given as many frames that run elsewhere, and then four times as many
    reports = running(view, 40)
    read: list[int] = []
    for others in (400, 1600):
        with view.farm() as more:
            more.job([LayerSpec(frames=others)], show=more.show(f"more{others}"), name=f"more{others}")
        view.run_sql("UPDATE frame SET str_state = 'RUNNING' WHERE str_state = 'WAITING'")
        view.run_sql("ANALYZE")
        # when some end
        together, reports = reports[:15], reports[15:]
        with rows_read(engine) as of_each:
            end(engine, together)
        read += of_each
    # then no more is read for it
    assert read[1] <= 1.2 * read[0]


def test_what_is_read_for_ends_does_not_grow_with_frames_that_began_since_tables_were_analysed(
    view: FarmView, engine: Engine
) -> None:
    # given a farm that PostgreSQL analysed while nothing ran
    with view.farm() as farm:
        farm.job([LayerSpec(frames=1600)])
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        # Entries of the rows of earlier tests are read as well.
        connection.execute(text("VACUUM ANALYZE"))
    # when all is started, and a few frames end
    reports = running(view, 15)
    view.run_sql("UPDATE frame SET str_state = 'RUNNING' WHERE str_state = 'WAITING'")
    with rows_read(engine) as of_each:
        end(engine, reports)
    # then those are read by their ids
    assert sum(of_each) < 1600


def test_one_that_makes_us_fail_is_answered_with_the_error(engine: Engine) -> None:
    def fail() -> None:
        raise ValueError("a bug")

    # given three reports that come together, of which one meets a bug
    counts = Counted()
    batcher = CompletionBatcher(Releaser(engine, count=counts).end, counts)
    good, bad, other = (batcher.submit(CompletedFrame(name, f"frame-{name}", "h", 0)) for name in ("a", "bad", "b"))
    # when they are applied
    with listening(engine, "before_cursor_execute", naming("frame-bad", fail)):
        batcher.start()
        # then its host alone is told of that
        with pytest.raises(CompletionRefused, match=r"frame-bad .*\bh\b.*a bug"):
            bad.result(60)
        assert [end.result(60).verdict for end in (good, other)] == [RunVerdict.UNKNOWN] * 2
        batcher.stop(10)
    assert counts["completion_refused"] == 1
