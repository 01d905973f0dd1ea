"""Where the schema we make behaves better than Cuebot's on purpose."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
from sqlalchemy import Engine, create_engine, text

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.store import schema
from tests.kit.catalog import read_catalog
from tests.kit.statements import rows_read


@pytest.fixture
def own(empty_database_url: str) -> Iterator[Engine]:
    """A database with the schema we make, whatever the other tests run on."""
    schema.upgrade(empty_database_url)
    engine = create_engine(empty_database_url)
    try:
        yield engine
    finally:
        engine.dispose()


def test_ids_are_text_of_36_characters_and_no_extension_is_needed(own: Engine) -> None:
    with own.connect() as connection:
        columns = read_catalog(connection)["column"]
        extensions = connection.execute(text("SELECT extname FROM pg_extension")).scalars().all()
    ids = {name: type_ for name, type_ in columns.items() if name.partition(".")[2].startswith("pk_")}
    assert len(ids) > 100
    assert {type_.partition(" NOT NULL")[0].partition(" DEFAULT")[0] for type_ in ids.values()} == {
        "character varying(36)"
    }
    assert not {name for name, type_ in columns.items() if type_.startswith("uuid")}
    assert extensions == ["plpgsql"]


def test_statements_over_the_same_jobs_wait_for_each_other_instead_of_deadlocking(own: Engine) -> None:
    # Given three jobs, and sessions that each start and stop their own frames of all, in an order of their own.
    sessions, rounds = 4, 8
    with own.begin() as connection:
        farm = Farm(connection)
        jobs = [farm.job([LayerSpec(frames=sessions), LayerSpec(frames=sessions)]) for _ in range(3)]
    errors: list[BaseException] = []
    together = threading.Barrier(sessions)

    def start_and_stop(session: int) -> None:
        frames = [layer.frames[session] for job in jobs for layer in job.layers]
        change = text(
            "UPDATE frame SET str_state = :state FROM unnest(CAST(:frames AS varchar[])) WITH ORDINALITY n (id, place)"
            " WHERE pk_frame = n.id"
        )
        try:
            together.wait(30)
            for turn in range(rounds):
                frames.reverse()
                with own.begin() as connection:
                    connection.execute(change, {"state": ("RUNNING", "WAITING")[turn % 2], "frames": frames})
        except BaseException as error:
            errors.append(error)

    # When they run at once
    threads = [threading.Thread(target=start_and_stop, args=(session,)) for session in range(sessions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # then none is told to try again and every counter is right.
    assert errors == []
    with own.connect() as connection:
        counted = connection.execute(text("SELECT DISTINCT int_waiting_count, int_running_count FROM layer_stat")).all()
        assert counted == [(sessions, 0)]
        counted = connection.execute(text("SELECT DISTINCT int_waiting_count, int_running_count FROM job_stat")).all()
        assert counted == [(2 * sessions, 0)]


def test_a_frame_costs_no_more_in_a_statement_of_thousands_than_in_one_of_its_own(own: Engine) -> None:
    change = text("UPDATE frame SET str_state = :state WHERE pk_frame = ANY(:frames)")

    def rows_for_each(frames: Sequence[str]) -> float:
        """Rows, and entries of indexes, that are read for each frame when they start, and when they stop."""
        with rows_read(own) as read:
            for state in ("RUNNING", "WAITING"):
                with own.begin() as connection:
                    connection.execute(change, {"state": state, "frames": list(frames)})
        return sum(read) / len(frames)

    with own.begin() as connection:
        job = Farm(connection).job([LayerSpec(frames=3_000)])
    # Given a session whose first statements changed one frame each (plans made then are kept)
    alone = max(rows_for_each([frame]) for frame in job.frames[:10])
    # when it changes thousands at once
    together = rows_for_each(job.frames)
    # then no more is read for a frame (a plan that compares each with each reads thousands), and every one was counted
    # and recorded
    assert together < 2 * alone
    with own.connect() as connection:
        assert connection.scalar(text("SELECT int_waiting_count FROM layer_stat")) == 3_000
        assert connection.scalar(text("SELECT count(*) FROM frame_history WHERE int_ts_stopped > 0")) == 3_010


def test_a_finished_jobs_history_has_every_figure_in_its_own_column(own: Engine) -> None:
    with own.begin() as connection:
        job = Farm(connection).job([LayerSpec(frames=4)])
        connection.execute(
            text("UPDATE job_usage SET int_core_time_success = 11, int_core_time_fail = 12, int_gpu_time_success = 13")
        )
        connection.execute(text("UPDATE job_mem SET int_max_rss = 14, int_gpu_mem_max = 15"))
        connection.execute(
            text(
                "UPDATE job_stat SET int_waiting_count = 1, int_dead_count = 2, int_eaten_count = 3,"
                " int_running_count = 4"
            )
        )
        connection.execute(text("UPDATE job SET str_state = 'FINISHED', ts_stopped = now()"))
        history = connection.execute(text("SELECT * FROM job_history WHERE pk_job = :job"), {"job": job.id}).one()
        assert (history.int_core_time_success, history.int_core_time_fail, history.int_gpu_time_success) == (11, 12, 13)
        assert (history.int_max_rss, history.int_gpu_mem_max) == (14, 15)
        assert (history.int_waiting_count, history.int_dead_count, history.int_eaten_count) == (1, 2, 3)
        assert history.int_running_count == 4
        assert history.int_ts_stopped > 0


def test_history_switched_on_again_does_not_stop_jobs_made_without(own: Engine) -> None:
    with own.begin() as connection:
        connection.execute(text("INSERT INTO config (pk_config, str_key) VALUES ('off', 'DISABLE_HISTORY')"))
        job = Farm(connection).job([LayerSpec(frames=2)])
        connection.execute(text("DELETE FROM config WHERE pk_config = 'off'"))
        connection.execute(text("UPDATE frame SET str_state = 'RUNNING' WHERE pk_job = :job"), {"job": job.id})
        connection.execute(text("UPDATE frame SET str_state = 'SUCCEEDED' WHERE pk_job = :job"), {"job": job.id})
        assert connection.scalar(text("SELECT int_succeeded_count FROM job_stat")) == 2


def test_history_never_makes_a_completion_fail(own: Engine) -> None:
    with own.begin() as connection:
        Farm(connection).job()
        connection.execute(text("UPDATE frame SET str_state = 'RUNNING', str_host = repeat('h', 200)"))
        connection.execute(text("UPDATE frame SET str_state = 'DEAD', int_exit_status = 3221225477"))
        run = connection.execute(text("SELECT str_host, int_exit_status FROM frame_history")).one()
        assert tuple(run) == ("h" * 64, 32767)


def _tag(host: str, tag: str) -> dict[str, object]:
    return {"pk_host_tag": tag[:36], "pk_host": host, "str_tag": tag, "str_tag_type": "MANUAL", "b_constant": False}


def test_tags_beyond_the_column_are_left_out_whole(own: Engine) -> None:
    with own.begin() as connection:
        farm = Farm(connection)
        tags = [f"tag{number:03d}" + "x" * 30 for number in range(6)]
        host = farm.host(hostname_tag=False, alloc_tag=False)
        farm.insert("host_tag", [_tag(host.id, tag) for tag in tags])
        connection.execute(text("SELECT recalculate_tags(:host)"), {"host": host.id})
        shown = connection.scalar(text("SELECT str_tags FROM host WHERE pk_host = :host"), {"host": host.id})
        assert shown == " ".join(tags[:3])


def test_a_new_farm_has_what_the_first_show_needs(own: Engine) -> None:
    with own.connect() as connection:
        alloc = connection.execute(
            text(
                "SELECT a.str_name, a.str_tag, a.b_default, f.str_name AS facility, f.b_default AS first"
                " FROM alloc a JOIN facility f USING (pk_facility)"
            )
        ).all()
        assert [tuple(row) for row in alloc] == [("local.general", "general", True, "local", True)]
        assert connection.scalar(text("SELECT str_name FROM dept WHERE b_default")) == "Unknown"
        assert connection.scalar(text("SELECT int_cores_min FROM service WHERE str_name = 'default'")) == 100
        assert connection.scalar(text("SELECT int_value FROM config WHERE str_key = 'MAX_FRAME_RETRIES'")) == 16
        assert connection.scalar(text("SELECT count(*) FROM task_lock")) == 8
        assert connection.scalar(text("SELECT count(*) FROM pg_extension WHERE extname <> 'plpgsql'")) == 0
