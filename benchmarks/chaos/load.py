"""The work: shows with tight bursts, capped folders and jobs, licences; refilled as it drains."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import SQLAlchemyError

from benchmarks.chaos.licences import LICENCES, become
from benchmarks.chaos.site import ALLOCS
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import AllocIds, JobIds, LayerSpec, ShowIds

MAX_RETRIES = 1000
JOBS_PENDING = 14
WAITING_FRAMES = 120

# Bursts in cores: together less than the farm has, so that it is the caps that hold work back.
BURSTS = {"alpha": (16, 10), "beta": (12, 12), "gamma": (18, 6)}
FOLDER_CAPS = {"alpha": 20, "beta": 14, "gamma": 16}
SHOTS_CAP = 7
JOB_CAPS = (-1, 3, 5, 8, 12)
# GPUs, of which there are more on hosts than any cap allows.
FOLDER_GPUS, SHOTS_GPUS = 4, 2
JOB_GPUS = (-1, 1, 2, 3)
WITH_GPUS = 0.15
# More layers with a licence than the licences can serve would in time leave only such work, and no other cap in use.
# A machine with a licence runs many such frames.
LICENSED = {"FRAME": 0.06, "HOST": 0.15}

_WAITING = text(
    "SELECT j.pk_show, count(*) AS jobs, coalesce(sum(s.int_waiting_count + s.int_depend_count), 0) AS waiting "
    "FROM job j JOIN job_stat s USING (pk_job) WHERE j.str_state = 'PENDING' GROUP BY j.pk_show"
)


@dataclass(frozen=True, slots=True)
class Cap:
    """A cap that may be changed: its row, and what it is when nobody meddles. Centicores, GPUs; a limit's in frames or
    machines."""

    kind: str
    table: str
    column: str
    where: Mapping[str, str]
    value: int

    def write(self, connection: Connection, value: int, *, silent: bool = False) -> None:
        """Set the cap; ``silent`` keeps the notification back, as an edit on a database without triggers would."""
        if silent:
            connection.execute(text("SET LOCAL opencue_sched.quiet_caps = 'on'"))
        condition = " AND ".join(f"{column} = :{column}" for column in self.where)
        statement = f"UPDATE {self.table} SET {self.column} = :value WHERE {condition}"  # noqa: S608 - our own names
        connection.execute(text(statement), {**self.where, "value": value})


@dataclass
class Load:
    """Shows and their work. Everything random comes from ``chance``."""

    engine: Engine
    chance: random.Random
    waiting_frames: int = WAITING_FRAMES
    shows: dict[str, ShowIds] = field(default_factory=dict)
    caps: list[Cap] = field(default_factory=list)
    jobs: int = 0
    _shots: dict[str, str] = field(default_factory=dict)
    _limits: dict[str, float] = field(default_factory=dict)

    def plant(self) -> None:
        """Shows, subscriptions, folders and limits, without work."""
        with self.engine.begin() as connection:
            farm = Farm(connection)
            allocs = [farm.alloc(tag) for tag in ALLOCS]
            for licence in LICENCES:
                limit_id = farm.limit(licence.name, licence.maximum)
                become(connection, licence, limit_id)
                self._limits[limit_id] = LICENSED[licence.counts]
                where = {"pk_limit_record": limit_id}
                if licence.changes:
                    self.caps.append(Cap("limit", "limit_record", "int_max_value", where, licence.maximum))
            for name in BURSTS:
                self._plant_show(farm, name, allocs)

    def _plant_show(self, farm: Farm, name: str, allocs: list[AllocIds]) -> None:
        show = self.shows[name] = farm.show(name, folder_max_cores=FOLDER_CAPS[name], folder_max_gpus=FOLDER_GPUS)
        shots = self._shots[name] = farm.folder(
            show, f"{name}-shots", parent=show.folder_id, max_cores=SHOTS_CAP, max_gpus=SHOTS_GPUS
        )
        for alloc, burst in zip(allocs, BURSTS[name], strict=True):
            farm.subscription(show, alloc, size=burst)
            where = {"pk_show": show.id, "pk_alloc": alloc.id}
            self.caps.append(Cap("subscription", "subscription", "int_burst", where, burst * 100))
        for folder, cap, gpus in ((show.folder_id, FOLDER_CAPS[name], FOLDER_GPUS), (shots, SHOTS_CAP, SHOTS_GPUS)):
            self.caps.append(Cap("folder", "folder_resource", "int_max_cores", {"pk_folder": folder}, cap * 100))
            self.caps.append(Cap("folder GPUs", "folder_resource", "int_max_gpus", {"pk_folder": folder}, gpus))

    def refill(self) -> int:
        """New jobs where work runs out; returns how many. Nothing while the database is away."""
        added = 0
        try:
            with self.engine.begin() as connection:
                held = {row.pk_show: row for row in connection.execute(_WAITING)}
                farm = Farm(connection)
                for name, show in self.shows.items():
                    row = held.get(show.id)
                    if row is None or (row.jobs < JOBS_PENDING and row.waiting < self.waiting_frames):
                        self._submit(farm, name, show)
                        added += 1
        except SQLAlchemyError:
            # One of the faults; what an unknown COMMIT left behind is counted at the end like everything else.
            return 0
        return added

    def _submit(self, farm: Farm, name: str, show: ShowIds) -> JobIds:
        self.jobs += 1
        chance = self.chance
        layers = [self._layer() for _ in range(chance.randint(1, 3))]
        job = farm.job(
            layers,
            show=show,
            name=f"{name}-chaos-{self.jobs}",
            folder_id=chance.choice((show.folder_id, self._shots[name])),
            priority=chance.randint(1, 100),
            max_cores=chance.choice(JOB_CAPS),
            max_gpus=chance.choice(JOB_GPUS),
            max_retries=MAX_RETRIES,
            os=None,
        )
        if len(layers) > 1 and chance.random() < 0.3:
            farm.layer_on_layer((job, 1), (job, 0))
        return job

    def _layer(self) -> LayerSpec:
        chance = self.chance
        return LayerSpec(
            frames=chance.randint(4, 16),
            cores=chance.choice((0.5, 1, 1, 1, 2, 2, 3)),
            gpus=int(chance.random() < WITH_GPUS),
            tags=chance.choice((*ALLOCS, " | ".join(ALLOCS))),
            limits=[limit for limit, share in self._limits.items() if chance.random() < share],
        )

    def job_caps(self) -> list[Cap]:
        """The caps of jobs that are pending and capped, as they are now."""
        query = text(
            "SELECT r.pk_job, r.int_max_cores, r.int_max_gpus FROM job_resource r JOIN job USING (pk_job) "
            "WHERE job.str_state = 'PENDING' ORDER BY job.str_name"
        )
        with self.engine.connect() as connection:
            rows = connection.execute(query).all()
        caps = []
        for row in rows:
            where = {"pk_job": row.pk_job}
            if row.int_max_cores > 100:
                caps.append(Cap("job", "job_resource", "int_max_cores", where, row.int_max_cores))
            if row.int_max_gpus > 1:
                caps.append(Cap("job GPUs", "job_resource", "int_max_gpus", where, row.int_max_gpus))
        return caps
