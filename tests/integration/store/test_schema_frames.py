"""The frame triggers: eligible times, dependencies, counters and history, on our schema and on Cuebot's."""
# ruff: noqa: S608 - the names put into statements are written here

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobIds, LayerSpec

_STATES = ("waiting", "running", "dead", "depend", "eaten", "succeeded", "checkpoint")


def _set(connection: Connection, frames: Any, **values: Any) -> list[Any]:
    """Update frames in one statement; returns what the triggers made of (state, version) of each."""
    assignments = ", ".join(f"{column} = :{column}" for column in values)
    return list(
        connection.execute(
            text(f"UPDATE frame SET {assignments} WHERE pk_frame = ANY(:frames) RETURNING str_state, int_version"),
            {**values, "frames": list(frames)},
        ).all()
    )


def _start(connection: Connection, frames: Any, host: str = "nowhere") -> None:
    _set(connection, frames, str_state="RUNNING", str_host=host, ts_started="2026-01-01T00:00:00Z", ts_stopped=None)


def _counts(connection: Connection, table: str, key: str, value: str) -> dict[str, int]:
    columns = ", ".join(f"int_{state}_count" for state in _STATES)
    row = connection.execute(text(f"SELECT {columns} FROM {table} WHERE {key} = :value"), {"value": value}).one()
    return {state: count for state, count in zip(_STATES, row, strict=True) if count}


def _true_counts(connection: Connection, key: str, value: str) -> dict[str, int]:
    rows = connection.execute(
        text(f"SELECT lower(str_state), count(*) FROM frame WHERE {key} = :value GROUP BY 1"),
        {"value": value},
    )
    return {row[0]: row[1] for row in rows}


def _assert_counters_true(connection: Connection, job: JobIds) -> None:
    assert _counts(connection, "job_stat", "pk_job", job.id) == _true_counts(connection, "pk_job", job.id)
    for layer in job.layers:
        assert _counts(connection, "layer_stat", "pk_layer", layer.id) == _true_counts(connection, "pk_layer", layer.id)


def _frame(connection: Connection, frame: str) -> Any:
    return connection.execute(text("SELECT * FROM frame WHERE pk_frame = :frame"), {"frame": frame}).one()


def _runs(connection: Connection, frame: str) -> list[Any]:
    return list(
        connection.execute(
            text("SELECT * FROM frame_history WHERE pk_frame = :frame ORDER BY int_ts_stopped = 0"), {"frame": frame}
        ).all()
    )


def test_waiting_stamps_the_eligible_time(engine: Engine) -> None:
    with engine.begin() as connection:
        job = Farm(connection).job(activate=False)
        assert _frame(connection, job.frames[0]).ts_eligible is None
        _set(connection, job.frames, str_state="WAITING")
        assert _frame(connection, job.frames[0]).ts_eligible is not None


def test_a_frame_inserted_waiting_is_eligible_at_once(engine: Engine) -> None:
    with engine.begin() as connection:
        job = Farm(connection).job(activate=False)
        connection.execute(
            text(
                "INSERT INTO frame (pk_frame, pk_layer, pk_job, str_name, str_state, int_number, int_layer_order)"
                " VALUES ('new', :layer, :job, '0099-layer1', 'WAITING', 99, 99)"
            ),
            {"layer": job.layers[0].id, "job": job.id},
        )
        assert _frame(connection, "new").ts_eligible is not None


def test_one_statement_counts_starts_of_several_layers_and_jobs(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        first = farm.job([LayerSpec(frames=5), LayerSpec(frames=3)])
        second = farm.job([LayerSpec(frames=4)])
        _start(connection, [*first.layers[0].frames[:4], *first.layers[1].frames[:2], *second.frames[:3]])
        assert _counts(connection, "layer_stat", "pk_layer", first.layers[0].id) == {"waiting": 1, "running": 4}
        assert _counts(connection, "layer_stat", "pk_layer", first.layers[1].id) == {"waiting": 1, "running": 2}
        assert _counts(connection, "job_stat", "pk_job", first.id) == {"waiting": 2, "running": 6}
        assert _counts(connection, "job_stat", "pk_job", second.id) == {"waiting": 1, "running": 3}


def test_one_statement_counts_different_moves(engine: Engine) -> None:
    with engine.begin() as connection:
        job = Farm(connection).job([LayerSpec(frames=6), LayerSpec(frames=2)])
        frames = job.layers[0].frames
        _start(connection, job.frames[:6])
        ends = ["SUCCEEDED", "SUCCEEDED", "DEAD", "EATEN", "WAITING", "RUNNING"]
        connection.execute(
            text(
                "UPDATE frame SET str_state = n.state, ts_stopped = now() FROM unnest(CAST(:frames AS varchar[]),"
                " CAST(:ends AS varchar[])) n (id, state) WHERE pk_frame = n.id"
            ),
            {"frames": list(frames), "ends": ends},
        )
        assert _counts(connection, "layer_stat", "pk_layer", job.layers[0].id) == {
            "succeeded": 2,
            "dead": 1,
            "eaten": 1,
            "waiting": 1,
            "running": 1,
        }
        _assert_counters_true(connection, job)


def test_a_statement_that_changes_no_state_leaves_counters_and_history(engine: Engine) -> None:
    with engine.begin() as connection:
        job = Farm(connection).job([LayerSpec(frames=3)])
        _start(connection, job.frames)
        before = _runs(connection, job.frames[0])
        _set(connection, job.frames, int_mem_max_used=5, str_state="RUNNING")
        assert _counts(connection, "job_stat", "pk_job", job.id) == {"running": 3}
        assert _runs(connection, job.frames[0]) == before


def test_layers_remember_their_first_start_and_last_stop(engine: Engine) -> None:
    with engine.begin() as connection:
        job = Farm(connection).job([LayerSpec(frames=3)])
        query = text("SELECT ts_started::text, ts_stopped::text FROM layer_stat WHERE pk_layer = :layer")
        layer = {"layer": job.layers[0].id}
        _set(connection, job.frames[:1], str_state="RUNNING", ts_started="2026-01-02T00:00:00Z")
        _set(connection, job.frames[1:], str_state="RUNNING", ts_started="2026-01-03T00:00:00Z")
        _set(connection, job.frames, str_state="SUCCEEDED", ts_stopped="2026-01-04T00:00:00Z")
        assert tuple(connection.execute(query, layer).one()) == ("2026-01-02 00:00:00+00", "2026-01-04 00:00:00+00")


def test_a_satisfied_dependency_releases_the_frame_and_bumps_its_version(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        job = farm.job([LayerSpec(), LayerSpec()], activate=False)
        farm.frame_by_frame((job, 1), (job, 0))
        farm.activate([job])
        frame = job.layers[1].frames[0]
        version = _frame(connection, frame).int_version
        assert _set(connection, [frame], int_depend_count=0) == [("WAITING", version + 1)]
        assert _frame(connection, frame).ts_eligible is not None
        _assert_counters_true(connection, job)


@pytest.mark.parametrize("state", ["WAITING", "DEAD", "SUCCEEDED", "CHECKPOINT"])
def test_a_frame_with_open_dependencies_depends(engine: Engine, state: str) -> None:
    with engine.begin() as connection:
        job = Farm(connection).job()
        _start(connection, job.frames)
        version = _frame(connection, job.frames[0]).int_version
        changed = _set(connection, job.frames, str_state=state, int_depend_count=1, int_version=version + 1)
        assert changed == [("DEPEND", version + 2)]
        _assert_counters_true(connection, job)


def test_a_succeeded_frame_cannot_be_eaten(engine: Engine) -> None:
    with engine.begin() as connection:
        job = Farm(connection).job([LayerSpec(frames=2)])
        _start(connection, job.frames)
        _set(connection, job.frames, str_state="SUCCEEDED")
        assert [state for state, _ in _set(connection, job.frames, str_state="EATEN")] == ["SUCCEEDED", "SUCCEEDED"]
        assert _counts(connection, "job_stat", "pk_job", job.id) == {"succeeded": 2}


@pytest.mark.parametrize(
    ("checkpoint", "state"),
    [("DISABLED", "WAITING"), ("ENABLED", "CHECKPOINT"), ("COPYING", "CHECKPOINT"), ("COMPLETE", "WAITING")],
)
def test_a_checkpointing_frame_goes_back_as_checkpoint(engine: Engine, checkpoint: str, state: str) -> None:
    with engine.begin() as connection:
        job = Farm(connection).job()
        _start(connection, job.frames)
        _set(connection, job.frames, str_checkpoint_state=checkpoint)
        assert _set(connection, job.frames, str_state="WAITING")[0][0] == state
        assert _runs(connection, job.frames[0])[0].int_checkpoint_count == int(state == "CHECKPOINT")
        _assert_counters_true(connection, job)


def test_history_opens_with_a_run_and_closes_with_it(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host()
        job = farm.job([LayerSpec(frames=2)])
        farm.run(job.frames, host, cores=2, memory_gb=3)
        opened = [_runs(connection, frame)[0] for frame in job.frames]
        assert [(run.str_host, run.pk_alloc, run.int_cores) for run in opened] == [(host.name, host.alloc_id, 200)] * 2
        assert [(run.str_state, run.int_ts_stopped) for run in opened] == [("RUNNING", 0)] * 2
        _set(connection, job.frames, str_state="DEAD", int_exit_status=137, int_mem_max_used=77)
        closed = [_runs(connection, frame)[0] for frame in job.frames]
        assert [(run.int_exit_status, run.int_mem_max_used) for run in closed] == [(137, 77)] * 2
        assert all(run.int_ts_stopped >= run.int_ts_started > 0 for run in closed)


def test_a_retry_opens_a_second_run(engine: Engine) -> None:
    with engine.begin() as connection:
        job = Farm(connection).job()
        for exit_status in (1, 0):
            _start(connection, job.frames)
            _set(connection, job.frames, str_state="WAITING", int_exit_status=exit_status)
        assert sorted(run.int_exit_status for run in _runs(connection, job.frames[0])) == [0, 1]


def test_a_run_taken_back_leaves_no_history(engine: Engine) -> None:
    with engine.begin() as connection:
        job = Farm(connection).job()
        _start(connection, job.frames)
        _set(connection, job.frames, str_state="WAITING", int_exit_status=1)
        _start(connection, job.frames)
        _set(connection, job.frames, str_state="WAITING", int_exit_status=299)
        assert [run.int_exit_status for run in _runs(connection, job.frames[0])] == [1]


def test_one_statement_opens_closes_and_takes_back_runs_each_with_its_own_figures(engine: Engine) -> None:
    with engine.begin() as connection:
        # given frames of two layers of which some run
        job = Farm(connection).job([LayerSpec(frames=4), LayerSpec(frames=2)])
        starts, ends, taken_back, stays = job.frames[:2], job.frames[2:4], job.frames[4], job.frames[5]
        _start(connection, [*ends, taken_back, stays])
        # when some start, some end, one is taken back, and one goes on, all in one statement
        moved = {
            starts[0]: ("RUNNING", -1, 1),
            starts[1]: ("RUNNING", -1, 2),
            ends[0]: ("SUCCEEDED", 0, 30),
            ends[1]: ("DEAD", 11, 40),
            taken_back: ("WAITING", 299, 50),
            stays: ("RUNNING", -1, 60),
        }
        connection.execute(
            text(
                "UPDATE frame SET str_state = moved.state, int_exit_status = moved.status, int_cores = moved.figure,"
                " int_mem_max_used = moved.figure"
                "  FROM unnest(CAST(:frames AS varchar[]), CAST(:states AS varchar[]), CAST(:statuses AS int[]),"
                "              CAST(:figures AS int[])) moved (id, state, status, figure) WHERE pk_frame = moved.id"
            ),
            dict(zip(("states", "statuses", "figures"), map(list, zip(*moved.values(), strict=True)), strict=True))
            | {"frames": list(moved)},
        )
        # then each has the run that is its own, and those that run are open
        runs = {frame: _runs(connection, frame) for frame in moved}
        assert [(len(runs[frame]), runs[frame][0].int_cores, runs[frame][0].int_ts_stopped) for frame in starts] == [
            (1, 1, 0),
            (1, 2, 0),
        ]
        assert [
            (len(runs[frame]), runs[frame][0].int_exit_status, runs[frame][0].int_mem_max_used) for frame in ends
        ] == [
            (1, 0, 30),
            (1, 11, 40),
        ]
        assert all(runs[frame][0].int_ts_stopped > 0 for frame in ends)
        assert runs[taken_back] == []
        assert [run.int_ts_stopped for run in runs[stays]] == [0]
        _assert_counters_true(connection, job)


def test_disabled_history_writes_none(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO config (pk_config, str_key) VALUES ('off', 'DISABLE_HISTORY')"))
        job = Farm(connection).job()
        _start(connection, job.frames)
        for table in ("job_history", "layer_history", "frame_history"):
            assert connection.scalar(text(f"SELECT count(*) FROM {table}")) == 0
        _assert_counters_true(connection, job)
