"""The chaos benchmark's witness on a real database: it must see what is made wrong by hand, and nothing else."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Engine, text

from benchmarks.chaos.licences import Licence, become
from benchmarks.chaos.silent_release import release_silently
from benchmarks.chaos.site import Witness
from benchmarks.chaos.verdict import placeable, results_counted_wrongly, sample_figures, unfinished
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostIds, LayerSpec
from opencue_sched.embedded.servers.processes import ServiceFailed
from tests.kit.limits import report
from tests.kit.polling import eventually

NAMES = itertools.count()
OTHERS_SUCCEEDED = text("UPDATE frame SET str_state = 'SUCCEEDED' WHERE pk_frame <> ALL(:frames)")
SET_STATE = text("UPDATE frame SET str_state = :state, str_host = 'h', int_exit_status = 0 WHERE pk_frame = :frame")


@pytest.fixture(scope="module")
def engine(engine_with_commit_times: Engine) -> Engine:
    return engine_with_commit_times


class Bookings:
    """A show whose caps allow two cores each, one host, six waiting frames; books them one by one, caps or not."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM proc"))
            farm = Farm(connection, seed=next(NAMES))
            show = farm.show(f"show{next(NAMES)}", folder_max_cores=20)
            farm.subscription(show, farm.default_alloc(), size=20)
            self.limit = farm.limit(f"limit{next(NAMES)}", 20)
            layer = LayerSpec(frames=6, limits=[self.limit], gpus=1)
            self.job = farm.job([layer], show=show, name=f"{show.name}-job", max_cores=20)
            self.host = farm.host(name=f"host{next(NAMES)}", cores=8, gpus=8)
        self.where = {
            "sub": ("subscription", "int_burst", "pk_show", show.id),
            "folder": ("folder_resource", "int_max_cores", "pk_folder", self.job.folder_id),
            "folder_gpus": ("folder_resource", "int_max_gpus", "pk_folder", self.job.folder_id),
            "job": ("job_resource", "int_max_cores", "pk_job", self.job.id),
            "job_gpus": ("job_resource", "int_max_gpus", "pk_job", self.job.id),
            "limit": ("limit_record", "int_max_value", "pk_limit_record", self.limit),
        }
        self._frames = iter(self.job.frames)

    def cap(self, vertex: str, value: int) -> None:
        table, column, key, id_ = self.where[vertex]
        unit = 1 if vertex.startswith("limit") or vertex.endswith("gpus") else 100
        statement = text(f"UPDATE {table} SET {column} = :value WHERE {key} = :id")  # noqa: S608 - names from above
        with self._engine.begin() as connection:
            connection.execute(statement, {"value": value * unit, "id": id_})

    def counts(self, what: str, most: int) -> None:
        """The limit is of so many machines (HOST) or frames (FRAME)."""
        with self._engine.begin() as connection:
            become(connection, Licence("limit", what, most), self.limit)
        self.cap("limit", most)

    def report(self, *names: str) -> None:
        """A licence server is asked now, and says that these hold the limit, with a token each."""
        with self._engine.begin() as connection:
            report(connection, self.limit, *names)

    def another_host(self) -> HostIds:
        with self._engine.begin() as connection:
            return Farm(connection, seed=next(NAMES)).host(name=f"host{next(NAMES)}", cores=8, gpus=8)

    def book(self, *, on: HostIds | None = None, meanwhile: tuple[str, int] | None = None) -> str:
        """Id of a new proc. ``meanwhile``: a cap changed by somebody else before the booking's COMMIT."""
        with self._engine.begin() as connection:
            (proc_id,) = Farm(connection, seed=next(NAMES)).run([next(self._frames)], on or self.host, gpus=1)
            if meanwhile is not None:
                self.cap(*meanwhile)
        return proc_id

    def release(self, proc_id: str) -> None:
        with self._engine.begin() as connection:
            connection.execute(text("DELETE FROM proc WHERE pk_proc = :id"), {"id": proc_id})


@pytest.fixture
def bookings(engine: Engine) -> Bookings:
    return Bookings(engine)


@pytest.fixture
def witness(engine: Engine, bookings: Bookings) -> Iterator[Witness]:
    """It watches from before the first booking. The test stops it, or it is stopped."""
    found = Witness(engine.url.render_as_string(hide_password=False))
    eventually(lambda: found.samples, 20, "the first sample")
    yield found
    if found.running:
        found.stop()


def look_again(witness: Witness) -> None:
    """Wait until it has looked at the present state."""
    count = len(witness.samples)
    eventually(lambda: len(witness.samples) > count + 30, 20, "more samples")


@pytest.mark.parametrize("vertices", [("sub",), ("folder",), ("job", "folder_gpus"), ("limit", "job_gpus")], ids=str)
def test_one_booking_above_any_cap_is_a_violation(bookings, witness, vertices):
    for vertex in vertices:
        bookings.cap(vertex, 2)
    procs = [bookings.book() for _ in range(3)]
    witness.stop()
    assert {(it["proc_id"], it["vertex"].split(":")[0]) for it in witness.violations} == {
        (procs[2], vertex) for vertex in vertices
    }
    assert all(violation["held"] > violation["cap"] for violation in witness.violations)
    assert witness.seen == set(procs)
    assert len(witness.booked) == 3


def test_a_machine_too_many_is_forbidden_and_counted(bookings, witness):
    elsewhere = bookings.another_host()
    bookings.counts("HOST", 1)
    look_again(witness)
    bookings.book()
    bookings.book()
    look_again(witness)
    assert witness.forbidden == []
    late = bookings.book(on=elsewhere)
    witness.stop()
    assert {(booking["proc_id"], booking["use"]) for booking in witness.forbidden} == {(late, 1), ("", 2)}
    assert witness.judged["bookings of machines"] == 3


@pytest.mark.parametrize("counts", ["HOST", "FRAME"])
def test_a_booking_that_a_report_forbids_is_found(bookings, witness, counts):
    elsewhere = bookings.another_host()
    bookings.counts(counts, 3)
    bookings.report("artist", bookings.host.name.upper() + ".studio.example")
    look_again(witness)
    bookings.book()
    look_again(witness)
    assert witness.forbidden == []
    late = [bookings.book(on=elsewhere), bookings.book(on=bookings.another_host())]
    witness.stop()
    assert [booking["proc_id"] for booking in witness.forbidden] == (late[1:] if counts == "HOST" else late)
    assert witness.violations == []


def test_a_lowered_cap_is_passed_by_the_next_booking_only(bookings, witness):
    procs = [bookings.book() for _ in range(3)]
    look_again(witness)
    bookings.cap("sub", 1)
    look_again(witness)
    assert witness.violations == []
    bookings.release(procs[0])
    late = bookings.book()
    witness.stop()
    assert [violation["proc_id"] for violation in witness.violations] == [late]


def test_a_cap_that_is_lowered_before_the_commit_of_a_booking_binds_it(bookings, witness):
    bookings.book()
    look_again(witness)
    late = bookings.book(meanwhile=("sub", 1))
    witness.stop()
    assert [violation["proc_id"] for violation in witness.violations] == [late]


def test_a_booking_that_its_host_reported_before_anybody_looked_is_judged_by_its_own_time(engine, bookings, witness):
    look_again(witness)
    with frozen(witness):
        bookings.book()
        bookings.cap("sub", 0)
        with engine.begin() as connection:
            connection.execute(text("UPDATE proc SET ts_ping = current_timestamp"))
    look_again(witness)
    witness.stop()
    assert witness.violations == []
    assert len(witness.booked) == 1


@contextmanager
def frozen(witness: Witness) -> Iterator[None]:
    os.kill(witness.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(witness.pid, signal.SIGCONT)


def test_bookings_within_raised_caps_are_no_violation(bookings, witness):
    bookings.cap("sub", 2)
    for _ in range(2):
        bookings.book()
    bookings.cap("sub", 4)
    for _ in range(2):
        bookings.book()
    witness.stop()
    assert witness.violations == []
    assert len(witness.samples) > 0


def test_a_witness_that_dies_is_noticed(engine):
    found = Witness("no URL at all")
    eventually(lambda: not found.running, 20, "its end")
    with pytest.raises(ServiceFailed):
        found.stop()


def test_a_witness_that_sees_nothing_has_no_samples(engine):
    found = Witness("postgresql+psycopg2://nobody@127.0.0.1:1/none")
    eventually(lambda: time.time() > found.began + 1.0)
    found.stop()
    assert found.samples == []
    assert sample_figures(found.samples, [], began=found.began, ended=found.ended).per_second == 0


def test_frames_left_and_results_without_runs_are_named(engine, bookings):
    twice, lost = bookings.job.frames[:2]
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM frame_history"))
        connection.execute(OTHERS_SUCCEEDED, {"frames": [twice, lost]})
        connection.execute(text("UPDATE job_usage SET int_frame_success_count = 0"))
    for state in ("RUNNING", "SUCCEEDED") * 2:
        with engine.begin() as connection:
            connection.execute(SET_STATE, {"state": state, "frame": twice})
    with engine.connect() as connection:
        (left,) = unfinished(connection)
        wrong = results_counted_wrongly(connection, [])
    assert left.startswith(lost)
    assert {tuple(map(int, re.findall(r" (\d+) ", line))) for line in wrong if twice in line} == {(2,), (2, 0, 0)}
    assert any(line.startswith("0 ") for line in wrong)


@pytest.mark.parametrize("vertex", ["sub", "folder", "folder_gpus", "job", "job_gpus", "limit", "nothing"])
def test_a_layer_waits_in_vain_unless_a_cap_is_full(engine, bookings, vertex):
    with engine.begin() as connection:
        connection.execute(text("UPDATE job SET b_paused = pk_job <> :job"), {"job": bookings.job.id})
    for _ in range(2):
        bookings.book()
    if vertex != "nothing":
        bookings.cap(vertex, 2)
    with engine.connect() as connection:
        found = placeable(connection)
    assert len(found) == (1 if vertex == "nothing" else 0)


def waits_in_vain(engine: Engine) -> bool:
    with engine.connect() as connection:
        return bool(placeable(connection))


def test_a_limit_of_machines_is_full_for_one_host_and_open_for_another(engine, bookings):
    with engine.begin() as connection:
        connection.execute(text("UPDATE job SET b_paused = pk_job <> :job"), {"job": bookings.job.id})
        connection.execute(text("UPDATE host_stat SET str_state = 'DOWN'"))
    first, second = bookings.host, bookings.another_host()
    up = text("UPDATE host_stat SET str_state = CASE WHEN pk_host = ANY(:up) THEN 'UP' ELSE 'DOWN' END")

    def let(*hosts: HostIds) -> bool:
        with engine.begin() as connection:
            connection.execute(up, {"up": [host.id for host in hosts]})
        return waits_in_vain(engine)

    # given a limit of one machine that the first host holds
    bookings.counts("HOST", 1)
    bookings.book(on=first)
    assert (let(first), let(second)) == (True, False)
    # when it may be held by two, it is open for both; when both hold it and one may, for the first by id alone
    bookings.counts("HOST", 2)
    assert (let(first), let(second)) == (True, True)
    bookings.book(on=second)
    bookings.counts("HOST", 1)
    lower, higher = sorted((first, second), key=lambda host: host.id)
    assert (let(lower), let(higher)) == (True, False)
    # and where an artist holds it too, for neither.
    bookings.report("artist")
    assert (let(lower), let(higher)) == (False, False)


def test_a_limit_of_frames_is_full_by_what_is_reported_and_what_need_not_be(engine, bookings):
    with engine.begin() as connection:
        connection.execute(text("UPDATE job SET b_paused = pk_job <> :job"), {"job": bookings.job.id})
    bookings.counts("FRAME", 3)
    bookings.book()
    bookings.report("artist")
    assert waits_in_vain(engine)
    bookings.report("artist1", "artist2")
    assert not waits_in_vain(engine)
    with engine.begin() as connection:
        connection.execute(text("UPDATE proc SET ts_dispatched = now() - interval '1 minute'"))
    assert waits_in_vain(engine)


def test_a_silent_release_frees_the_host_and_the_frame_and_tells_nobody(engine, bookings):
    with engine.begin() as connection:
        connection.execute(text("UPDATE show SET b_scheduler_managed = true"))
    procs = [bookings.book(), bookings.book()]
    heard = engine.raw_connection()
    heard.driver_connection.autocommit = True
    heard.cursor().execute("LISTEN opencue_sched_release")
    with engine.begin() as connection:
        assert len(release_silently(connection, most=5)) == len(procs)
    with engine.connect() as connection:
        idle = connection.execute(
            text("SELECT int_cores_idle FROM host WHERE pk_host = :id"), {"id": bookings.host.id}
        ).scalar()
        waiting = connection.execute(
            text("SELECT int_waiting_count FROM job_stat WHERE pk_job = :id"), {"id": bookings.job.id}
        ).scalar()
    heard.driver_connection.poll()
    assert (idle, waiting, heard.driver_connection.notifies) == (800, 6, [])
    heard.close()
