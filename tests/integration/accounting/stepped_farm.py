"""The farm of the model-based test: small caps, two shows, and what holds in PostgreSQL whatever Redis says."""

from __future__ import annotations

import json
import select
from collections.abc import Collection

import psycopg2
from psycopg2.errors import LockNotAvailable
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import OperationalError

from opencue_sched.accounting import keys
from opencue_sched.accounting.keys import Booking, unpack_entry
from opencue_sched.accounting.recompute import entries_of
from opencue_sched.domain.caps import Vertices
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import AllocIds, JobIds, LayerSpec, ShowIds
from opencue_sched.store import accounting
from tests.kit.limits import has_types
from tests.kit.sessions import end_sessions

FRAMES = 64
CAPS = {
    "burst": (0, 2, 4, 8),
    "folder": (-1, 1, 3, 7),
    "job": (-1, 2, 5),
    "gpus": (-1, 1, 2),
    "limit": (0, 1, 2, 3),
    "seats": (0, 1, 1, 2),
    "reported": (1, 2, 3, 4),
}

_FOLDERS = (0, 0, 2)
_RESET = """
    DELETE FROM proc;
    UPDATE subscription SET int_burst = 600, int_cores = 0, int_gpus = 0
     WHERE (int_burst, int_cores, int_gpus) <> (600, 0, 0);
    UPDATE folder_resource SET int_max_cores = 700, int_max_gpus = 2, int_cores = 0, int_gpus = 0
     WHERE (int_max_cores, int_max_gpus, int_cores, int_gpus) <> (700, 2, 0, 0);
    UPDATE job_resource SET int_max_cores = 500, int_max_gpus = -1, int_cores = 0, int_gpus = 0
     WHERE (int_max_cores, int_max_gpus, int_cores, int_gpus) <> (500, -1, 0, 0);
    UPDATE show SET b_scheduler_managed = true, b_booking_enabled = true
     WHERE NOT (b_scheduler_managed AND b_booking_enabled);
"""
_RESET_LIMITS = """
    DELETE FROM limit_host;
    UPDATE limit_record l
       SET int_max_value = said.most, str_type = said.type, ts_reported = NULL
      FROM (VALUES ('nuke', 2, 'FRAME'), ('katana', 1, 'HOST'), ('arnold', 3, 'FRAME')) AS said(name, most, type)
     WHERE l.str_name = said.name
       AND (l.int_max_value <> said.most OR l.str_type <> said.type OR l.ts_reported IS NOT NULL);
"""
_RESET_LIMITS_BEFORE_V49 = """
    UPDATE limit_record l
       SET int_max_value = said.most, b_host_limit = said.of_machines
      FROM (VALUES ('nuke', 2, false), ('katana', 1, true), ('arnold', 3, false)) AS said(name, most, of_machines)
     WHERE l.str_name = said.name AND (l.int_max_value <> said.most OR l.b_host_limit <> said.of_machines);
"""
_CAP_CHANGES = {
    "burst": "UPDATE subscription SET int_burst = :cap * 100 WHERE pk_show = :a AND pk_alloc = :b",
    "folder": "UPDATE folder_resource SET int_max_cores = :cap * 100 WHERE pk_folder = :a",
    "job": "UPDATE job_resource SET int_max_cores = :cap * 100 WHERE pk_job = :a",
    "gpus": "UPDATE folder_resource SET int_max_gpus = :cap WHERE pk_folder = :a",
    **dict.fromkeys(
        ("limit", "seats", "reported"), "UPDATE limit_record SET int_max_value = :cap WHERE pk_limit_record = :a"
    ),
}
_REPORT = """
    WITH asked AS (UPDATE limit_record SET ts_reported = clock_timestamp() WHERE pk_limit_record = :limit),
         former AS (DELETE FROM limit_host WHERE pk_limit_record = :limit)
    INSERT INTO limit_host (pk_limit_host, pk_limit_record, str_host_name, str_reported_name)
    SELECT gen_random_uuid()::text, :limit, gen_random_uuid()::text, said FROM unnest(CAST(:names AS varchar[])) AS said
"""
_RETYPE = """
    UPDATE limit_record SET str_type = CASE str_type WHEN 'HOST' THEN 'FRAME' ELSE 'HOST' END
     WHERE pk_limit_record = :limit
"""
_RETYPE_BEFORE_V49 = "UPDATE limit_record SET b_host_limit = NOT b_host_limit WHERE pk_limit_record = :limit"
INSERT_PROC = text(
    """
    INSERT INTO proc (pk_proc, pk_host, pk_job, pk_show, pk_layer, pk_frame, int_cores_reserved, int_gpus_reserved,
                      int_mem_reserved)
    SELECT CAST(:proc AS varchar), :host, frame.pk_job, job.pk_show, frame.pk_layer, frame.pk_frame, :centicores,
           :gpus, 1
      FROM frame JOIN job USING (pk_job) JOIN show USING (pk_show)
     WHERE pk_frame = :frame AND (:foreign OR (show.b_scheduler_managed AND show.b_booking_enabled))
    ON CONFLICT (pk_frame) DO NOTHING
    """
)


class SteppedFarm:
    """Shows A and B; A has two folders, two jobs and subscriptions to both allocations. Licences: ``limit`` of frames
    and ``seats`` of machines for the first job of A, ``reported`` of frames for the second, ``seats`` for that of B.

    A Cuebot's schema before V49 has no table for what licence servers report: there none reports anything."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # Not an option of ``engine``: each statement would then take two more, to commit at once and not any more.
        self._at_once = create_engine(engine.url, isolation_level="AUTOCOMMIT", pool_size=1)
        with engine.begin() as connection:
            self.has_reports = has_types(connection)
            farm = Farm(connection, seed=7)
            self.allocs: list[AllocIds] = [farm.alloc("general"), farm.alloc("other")]
            self.shows: list[ShowIds] = [farm.show("a"), farm.show("b")]
            self.folders = [self.shows[0].folder_id, farm.folder(self.shows[0], "aside"), self.shows[1].folder_id]
            for show, alloc in ((0, 0), (0, 1), (1, 0)):
                farm.subscription(self.shows[show], self.allocs[alloc])
            self.limit = farm.limit("nuke", 2)
            self.seats, self.reported = farm.limit("katana", 1), farm.limit("arnold", 3)
            self.limits = [self.limit, self.seats, self.reported]
            self._limits_of = ((self.limit, self.seats), (self.reported,), (self.seats,))
            self.hosts = [farm.host(cores=64, memory_gb=256, gpus=8, alloc=alloc) for alloc in self.allocs]
            layers = [LayerSpec(frames=FRAMES, limits=list(limits)) for limits in self._limits_of]
            self.jobs: list[JobIds] = [
                farm.job([layers[0]], show=self.shows[0], name="a0"),
                farm.job([layers[1]], show=self.shows[0], name="a1"),
                farm.job([layers[2]], show=self.shows[1], name="b0"),
            ]
        self.machines = [keys.machine_of(host.id) for host in self.hosts]
        self.vertex_keys = self._vertex_keys()
        self._used = [0] * len(self.jobs)
        self._alloc_of, self._folder_of = [0, 1], [*_FOLDERS]
        self._heard = psycopg2.connect(engine.url.set(drivername="postgresql").render_as_string(hide_password=False))
        self._heard.autocommit = True
        with self._heard.cursor() as cursor:
            cursor.execute("LISTEN opencue_sched_release")

    def close(self) -> None:
        self._heard.close()
        self._at_once.dispose()

    def reset(self) -> None:
        """The farm as it was in the beginning, without a proc."""
        with self.engine.begin() as connection:
            connection.execute(text(_RESET))
            connection.execute(text(_RESET_LIMITS if self.has_reports else _RESET_LIMITS_BEFORE_V49))
        for host in range(len(self.hosts)):
            self.move_host(host, host)
        for job, folder in enumerate(_FOLDERS):
            self.move_job(job, folder)
        self._used = [0] * len(self.jobs)
        self.deleted()

    def sql(self, statement: str, **parameters: object) -> None:
        with self._at_once.connect() as connection:
            connection.execute(text(statement), parameters)

    # What is asked of it

    def vertices(self, job: int, host: int) -> Vertices:
        """The vertices a booking of ``job`` on ``host`` has now, as gather would read them."""
        ids = self.jobs[job]
        alloc, folder = self.allocs[self._alloc_of[host]].id, self.folders[self._folder_of[job]]
        return Vertices(ids.show.id, alloc, folder, ids.id, ids.layers[0].id, ids.show.dept_id, self._limits_of[job])

    def next_frame(self, job: int) -> str:
        """A frame that no booking of this example has had."""
        self._used[job] += 1
        return self.jobs[job].layers[0].frames[(self._used[job] - 1) % FRAMES]

    def live(self) -> dict[str, str]:
        """Procs that are committed: proc id to show id."""
        with self._at_once.connect() as connection:
            return {row.pk_proc: row.pk_show for row in connection.execute(_LIVE)}

    def booking(self, proc_id: str) -> Booking | None:
        """A proc as whoever ends it now knows it; None of a show that is not managed."""
        with self.engine.begin() as connection:
            entries = entries_of(accounting.procs(connection, proc_ids=[proc_id]))
        return unpack_entry(proc_id, entries[proc_id]) if entries else None

    def managed(self, show: int) -> bool:
        with self._at_once.connect() as connection:
            return bool(connection.execute(_MANAGED, {"show": self.shows[show].id}).scalar_one())

    def _vertex_keys(self) -> list[str]:
        """The key of each vertex that a booking can move."""
        subscriptions = [keys.subscription(s.id, a.id) for s in self.shows for a in self.allocs]
        jobs = [key for job in self.jobs for key in (keys.job(job.id), keys.layer(job.layers[0].id))]
        points = [keys.point(show.dept_id, show.id) for show in self.shows]
        listed = [keys.limit(f"{limit}@{machine}") for limit in self.limits[1:] for machine in ("", *self.machines)]
        return [*subscriptions, *map(keys.folder, self.folders), *jobs, *points, *map(keys.limit, self.limits), *listed]

    # What is done to it

    def change_cap(self, kind: str, which: int, cap: int) -> str | None:
        """Set a cap in PostgreSQL, as SQL by hand would; returns the key of its vertex.

        None, and nothing changed, while a booking that has read the cap is not over: whoever changes it waits for that.
        """
        a, b = "", ""
        if kind == "burst":
            show, alloc = ((0, 0), (0, 1), (1, 0))[which % 3]
            a, b = self.shows[show].id, self.allocs[alloc].id
            key = keys.subscription(a, b)
        elif kind in ("folder", "gpus"):
            a = self.folders[which % 3]
            key = keys.folder(a)
        elif kind == "job":
            a = self.jobs[which % 3].id
            key = keys.job(a)
        else:
            a = {"limit": self.limit, "seats": self.seats, "reported": self.reported}[kind]
            key = keys.limit(a)
        return key if self._unless_locked(_CAP_CHANGES[kind], cap=cap, a=a, b=b) else None

    def report(self, limit_id: str, names: Collection[str]) -> str | None:
        """A licence server is asked now, and says who holds a limit; answers as change_cap. None, and nothing changed,
        where the schema has no reports."""
        if not self.has_reports:
            return None
        return keys.limit(limit_id) if self._unless_locked(_REPORT, limit=limit_id, names=list(names)) else None

    def change_type(self) -> str | None:
        """``seats`` counts frames from now on, or machines again; answers as change_cap."""
        statement = _RETYPE if self.has_reports else _RETYPE_BEFORE_V49
        return keys.limit(self.seats) if self._unless_locked(statement, limit=self.seats) else None

    def _unless_locked(self, statement: str, **parameters: object) -> bool:
        """Whether it was done, as nobody had what it needs."""
        with self._at_once.connect() as connection:
            connection.execute(text("SET lock_timeout = '5ms'"))
            try:
                connection.execute(text(statement), parameters)
            except OperationalError as error:
                assert isinstance(error.orig, LockNotAvailable), error
                return False
            finally:
                connection.execute(text("RESET lock_timeout"))
        return True

    def insert_foreign(self, proc_id: str, job: int, host: int, cores: int) -> None:
        """A proc that somebody else books, who knows nothing of the ledger."""
        with self._at_once.connect() as connection:
            row = {"proc": proc_id, "host": self.hosts[host].id, "frame": self.next_frame(job), "gpus": 0}
            connection.execute(INSERT_PROC, {**row, "centicores": cores * 100, "foreign": True})

    def delete(self, proc_id: str) -> list[str]:
        """A proc ends; returns the ids our trigger announced."""
        self.sql("DELETE FROM proc WHERE pk_proc = :id", id=proc_id)
        return self.deleted()

    def deleted(self) -> list[str]:
        """Ids announced by the trigger since the last call.

        PostgreSQL delivers in the order of the commits, so when our own word of now has come, so has every earlier one.
        """
        with self._heard.cursor() as cursor:
            cursor.execute(_NOW)
        announced: list[str] = []
        while True:
            while self._heard.notifies:
                procs = json.loads(self._heard.notifies.pop(0).payload)["procs"]
                if procs == _OURS:
                    return announced
                announced += procs
            assert select.select([self._heard], [], [], _DELIVERY_SECONDS)[0], "PostgreSQL does not notify"
            self._heard.poll()

    def move_host(self, host: int, alloc: int) -> None:
        if self._alloc_of[host] != alloc:
            self._alloc_of[host] = alloc
            self.sql(_MOVE_HOST, host=self.hosts[host].id, alloc=self.allocs[alloc].id)

    def move_job(self, job: int, folder: int) -> None:
        if self._folder_of[job] != folder:
            self._folder_of[job] = folder
            self.sql(_MOVE_JOB, job=self.jobs[job].id, folder=self.folders[folder])

    def end_transactions(self, pids: Collection[int]) -> None:
        """What idle_in_transaction_session_timeout does to a process that was stopped too long."""
        if pids:
            end_sessions(self._at_once, pids)


_OURS = ["now"]
_NOW = f"SELECT pg_notify('opencue_sched_release', '{json.dumps({'procs': _OURS})}')"
_DELIVERY_SECONDS = 30
_MOVE_HOST = "UPDATE host SET pk_alloc = :alloc WHERE pk_host = :host"
_MOVE_JOB = "UPDATE job SET pk_folder = :folder WHERE pk_job = :job"
_LIVE = text("SELECT pk_proc, pk_show FROM proc")
_MANAGED = text("SELECT b_scheduler_managed FROM show WHERE pk_show = :show")
