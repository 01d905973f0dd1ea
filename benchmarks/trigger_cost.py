"""What the triggers of this scheduler cost whoever else writes to the database: with them, and without, in turns."""

from __future__ import annotations

import select
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from time import perf_counter

import psycopg2
from sqlalchemy import Connection, Engine, create_engine, text

from benchmarks.figures import Spread
from benchmarks.recompute_cost import seed_farm
from opencue_sched.dispatch.commit import commit_plan
from opencue_sched.domain.caps import Vertices
from opencue_sched.domain.hosts import Resources
from opencue_sched.domain.plans import PlannedProc
from opencue_sched.domain.states import ExitStatus
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, LayerSpec
from opencue_sched.reports.completion import Releaser
from opencue_sched.reports.run_ends import CompletedFrame
from opencue_sched.settings import Settings
from opencue_sched.store.backlog import fetch_layers, fetch_portions
from opencue_sched.store.hosts import fetch_hosts_by_id
from opencue_sched.store.schema import SchemaFacts, check_schema

CHANNELS = ("opencue_sched_release", "opencue_sched_caps", "opencue_sched_work", "opencue_sched_backlog")
_RELEASES, _TOGETHER, _PLAN = 500, 50, 500
_COMMIT_DEADLINE_SECONDS = 120.0
_LAYERS = 50
"""Layers of a job whose frames end: each is named when the first of its frames waits again, or its memory rises."""

_EXIT_STATUSES = {"completions": 0, "retries": 1, "memory raises": ExitStatus.MEMORY_FAILURE}

_ALL, _BACKLOG = "opencue_sched_", "opencue_sched_(work_arrived|backlog)"
_OURS = text(
    "SELECT tgname, CAST(tgrelid AS regclass)::text AS of FROM pg_trigger WHERE tgname ~ ('^' || :which)"
    " AND NOT tgisinternal ORDER BY 2, 1"
)
_KEEP = text("CREATE TABLE kept_procs AS SELECT * FROM proc; CREATE UNIQUE INDEX ON kept_procs (pk_proc)")
_RESTORE = text("INSERT INTO proc SELECT * FROM kept_procs")
_INSERT_ONE = text("INSERT INTO proc SELECT * FROM kept_procs WHERE pk_proc = :id")
_MANAGED = text("UPDATE show SET b_scheduler_managed = :managed")
_DELETE_ALL = text("DELETE FROM proc")
_DELETE_ONE = text("DELETE FROM proc WHERE pk_proc = :id")
_IDS = text("SELECT pk_proc FROM kept_procs ORDER BY pk_proc LIMIT :count")
_RUNNING = text(
    "SELECT p.pk_proc, p.pk_frame, h.str_name FROM proc p JOIN host h USING (pk_host) WHERE p.pk_job = :job"
)
_FINISH = text("UPDATE job SET str_state = 'FINISHED' WHERE pk_job = :job")
# What a Cuebot writes to the five tables at each release of a show of its own.
_FIVE = [
    text(f"UPDATE {table} SET int_cores = int_cores - 0 WHERE {key} = (SELECT min({key}) FROM {table})")  # noqa: S608
    for table, key in (
        ("subscription", "pk_subscription"),
        ("layer_resource", "pk_layer"),
        ("job_resource", "pk_job"),
        ("folder_resource", "pk_folder"),
        ("point", "pk_point"),
    )
]


@dataclass(frozen=True)
class TriggerCost:
    """Milliseconds of the whole, commits included; the ratio is of neighbouring rounds."""

    phase: str
    rows: int
    without_ms: Spread
    with_ms: Spread
    ratio: Spread
    microseconds_more_a_row: float


def trigger_costs(engine: Engine, settings: Settings, *, procs: int, rounds: int) -> list[TriggerCost]:
    """Bulk deletes, releases and bookings, with a session that listens as a worker does."""
    seed_farm(engine, procs)
    # On a busy machine a commit is to be measured, not cancelled.
    patient = settings.accounting.model_copy(update={"commit_deadline": _COMMIT_DEADLINE_SECONDS})
    settings = settings.model_copy(update={"accounting": patient})
    with engine.begin() as connection:
        connection.execute(_KEEP)
        ids = list(connection.execute(_IDS, {"count": _RELEASES}).scalars())
        facts = check_schema(connection)
    with _listening(engine):
        return [
            _compared(engine, "bulk delete", procs, rounds, lambda: _bulk_delete(engine)),
            _compared(engine, "single deletes", _RELEASES, rounds, lambda: _single_deletes(engine, ids)),
            _compared(engine, "a Cuebot's bookings", _RELEASES, rounds, lambda: _foreign_inserts(engine, ids)),
            _compared(engine, "five-table updates", _RELEASES, rounds, lambda: _five_tables(engine)),
            _compared(engine, "bookings", _PLAN, rounds, lambda: _booking(engine, settings, facts)[0]),
            _compared(engine, "completions", _PLAN, rounds, lambda: _ends(engine, settings, facts)),
            # What it costs that the backlog is named, and with it that there is work.
            *(
                _compared(
                    engine,
                    f"{phase}: backlog",
                    _PLAN,
                    rounds,
                    partial(_ends, engine, settings, facts, exit_status=exit_status, layers=_LAYERS),
                    which=_BACKLOG,
                )
                for phase, exit_status in _EXIT_STATUSES.items()
            ),
        ]


def _compared(
    engine: Engine, phase: str, rows: int, rounds: int, work: Callable[[], float], *, which: str = _ALL
) -> TriggerCost:
    """``work`` answers how many seconds it took; the first round of each kind is not counted. Our triggers whose names
    begin with ``which`` are switched."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + 1):
        for on in (True, False) if number % 2 else (False, True):
            _switch(engine, on, which)
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.execute(text("ANALYZE; CHECKPOINT"))
            seconds = work()
            if number:
                times[on].append(1000 * seconds)
    _switch(engine, True)
    without, own = Spread.of(times[False], digits=1), Spread.of(times[True], digits=1)
    ratio = Spread.of([mine / theirs for mine, theirs in zip(times[True], times[False], strict=True)])
    return TriggerCost(phase, rows, without, own, ratio, round(1000 * (own.median - without.median) / rows, 1))


def _switch(engine: Engine, on: bool, which: str = _ALL) -> None:
    with engine.begin() as connection:
        for name, table in connection.execute(_OURS, {"which": which}).all():
            connection.execute(text(f"ALTER TABLE {table} {'ENABLE' if on else 'DISABLE'} TRIGGER {name}"))


def _bulk_delete(engine: Engine) -> float:
    began = perf_counter()
    with engine.begin() as connection:
        connection.execute(_DELETE_ALL)
    seconds = perf_counter() - began
    _restore(engine)
    return seconds


def _single_deletes(engine: Engine, ids: Sequence[str]) -> float:
    """One transaction each, as a Cuebot releases."""
    began = perf_counter()
    for proc_id in ids:
        with engine.begin() as connection:
            connection.execute(_DELETE_ONE, {"id": proc_id})
    seconds = perf_counter() - began
    _restore(engine)
    return seconds


def _foreign_inserts(engine: Engine, ids: Sequence[str]) -> float:
    """Procs of a show that is not managed, one transaction each, by sessions that are not ours."""
    with engine.begin() as connection:
        connection.execute(_MANAGED, {"managed": False})
        connection.execute(_DELETE_ALL)
    cuebot = create_engine(engine.url, connect_args={"application_name": "a Cuebot"})
    cuebot.connect().close()
    began = perf_counter()
    for proc_id in ids:
        with cuebot.begin() as connection:
            connection.execute(_INSERT_ONE, {"id": proc_id})
    seconds = perf_counter() - began
    cuebot.dispose()
    with engine.begin() as connection:
        connection.execute(_MANAGED, {"managed": True})
    _restore(engine)
    return seconds


def _restore(engine: Engine) -> None:
    _switch(engine, False)
    with engine.begin() as connection:
        connection.execute(_DELETE_ALL)
        connection.execute(_RESTORE)


def _five_tables(engine: Engine) -> float:
    began = perf_counter()
    for _ in range(_RELEASES):
        with engine.begin() as connection:
            for statement in _FIVE:
                connection.execute(statement)
    return perf_counter() - began


def _booking(engine: Engine, settings: Settings, facts: SchemaFacts, layers: int = 1) -> tuple[float, list[str]]:
    """A plan of one new job's frames, committed; how long that took and the job."""
    with engine.begin() as connection:
        farm = Farm(connection)
        show = farm.default_show()
        hosts = farm.hosts([HostSpec(f"host-{uuid.uuid4().hex}"[:30], cores=128, memory_gb=512) for _ in range(10)])
        job = farm.job([LayerSpec(frames=_PLAN // layers)] * layers, show=show, name=f"job-{uuid.uuid4().hex}", os=None)
        plan = _plan(connection, facts, job.id, [host.id for host in hosts])
    began = perf_counter()
    result = commit_plan(engine, plan, {}, settings, facts=facts)
    seconds = perf_counter() - began
    assert len(result.committed) == _PLAN, result.lost[:1]
    return seconds, [job.id]


def _plan(connection: Connection, facts: SchemaFacts, job_id: str, host_ids: Sequence[str]) -> list[PlannedProc]:
    rows = fetch_layers(connection, facts, facilities=None, job_ids=[job_id]).layers
    portions = fetch_portions(connection, facts, {row.layer.id: _PLAN for row in rows})
    frames = {portion.layer_id: portion.frames for portion in portions}
    hosts = cycle(fetch_hosts_by_id(connection, host_ids, 3600.0))
    plan = []
    for row in rows:
        job, layer = row.job, row.layer
        for frame in frames[layer.id]:
            host = next(hosts)
            ids = (job.show_id, host.alloc_id, job.folder_id, job.id, layer.id, job.dept_id, layer.limit_ids)
            taken = Resources(1, 1024 * 1024, 0, 0)
            plan.append(PlannedProc(str(uuid.uuid4()), job, layer, frame, host, taken, Vertices(*ids)))
    return plan


def _ends(engine: Engine, settings: Settings, facts: SchemaFacts, *, exit_status: int = 0, layers: int = 1) -> float:
    """The same job's frames end, reported in groups as our report service applies them."""
    _, (job_id,) = _booking(engine, settings, facts, layers)
    with engine.connect() as connection:
        reports = [
            CompletedFrame(proc, frame, host, exit_status)
            for proc, frame, host in connection.execute(_RUNNING, {"job": job_id})
        ]
    began = perf_counter()
    for start in range(0, len(reports), _TOGETHER):
        Releaser(engine).end(reports[start : start + _TOGETHER])
    seconds = perf_counter() - began
    with engine.begin() as connection:
        connection.execute(_FINISH, {"job": job_id})
    return seconds


@contextmanager
def _listening(engine: Engine) -> Iterator[None]:
    """A session that hears our notifications and does nothing about them: what a listener costs the sender."""
    connection = psycopg2.connect(engine.url.set(drivername="postgresql").render_as_string(hide_password=False))
    connection.autocommit = True
    with connection.cursor() as cursor:
        for channel in CHANNELS:
            cursor.execute(f"LISTEN {channel}")
    ended = threading.Event()

    def hear() -> None:
        while not ended.is_set():
            if select.select([connection], [], [], 0.1)[0]:
                connection.poll()
                connection.notifies.clear()

    thread = threading.Thread(target=hear)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        connection.close()
