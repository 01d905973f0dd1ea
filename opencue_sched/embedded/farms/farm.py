"""A synthetic farm written straight into PostgreSQL, on a schema of ours or of Cuebot's.

Jobs are put in the way Cuebot does: rows first with frames in SETUP, dependencies next, then the activation that moves
frames to WAITING (or DEPEND) and writes the counters. Everything is set-based, so thousands of frames take one
statement per table. The caller owns the transaction.

The SQL here writes test data only; what the scheduler itself runs is in ``opencue_sched.store``. Of a dependency,
``er`` is the side that waits (OpenCue's depend_er), and ``on`` the side that it waits for.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, text

from opencue_sched.domain.units import CENTICORES_PER_CORE, UNLIMITED
from opencue_sched.embedded.farms.farm_specs import (
    AllocIds,
    HostIds,
    HostSpec,
    JobIds,
    JobSpec,
    LayerIds,
    LayerSpec,
    ShowIds,
)
from opencue_sched.store.submit import open_jobs

KB_PER_GB = 1024 * 1024
_ROWS_PER_STATEMENT = 20_000
"""How many rows one statement inserts at most."""

# Give jobs their caps and priorities.
_JOB_RESOURCES = text(
    """
    UPDATE job_resource SET int_min_cores = wanted.min_cores, int_max_cores = wanted.max_cores,
           int_max_gpus = wanted.max_gpus, int_priority = wanted.priority
      FROM json_to_recordset(CAST(:rows AS json))
           AS wanted(job varchar, min_cores int, max_cores int, max_gpus int, priority int)
     WHERE job_resource.pk_job = wanted.job
    """
)
# Give a folder its caps of cores and GPUs.
_FOLDER_CAPS = text("UPDATE folder_resource SET int_max_cores = :cores, int_max_gpus = :gpus WHERE pk_folder = :folder")
# Not by _insert(): PostgreSQL takes the name of this table for its geometric type.
_INSERT_POINT = text("INSERT INTO point (pk_point, pk_dept, pk_show) VALUES (:point, :dept, :show)")
# Have frames run, as a booking would.
_RUN_FRAMES = text(
    """
    UPDATE frame SET str_state = 'RUNNING', str_host = run.host_name, int_cores = run.cores, int_gpus = run.gpus,
           int_mem_reserved = run.memory, ts_started = now(), ts_updated = now(), int_version = int_version + 1
      FROM json_to_recordset(CAST(:rows AS json))
           AS run(frame varchar, host_name varchar, cores int, gpus int, memory bigint)
     WHERE frame.pk_frame = run.frame
    """
)
# Take what runs of some frames hold from the idle amounts of their hosts.
_TAKE_FROM_HOSTS = text(
    """
    UPDATE host SET int_cores_idle = int_cores_idle - taken.cores, int_mem_idle = int_mem_idle - taken.memory,
           int_gpus_idle = int_gpus_idle - taken.gpus, int_gpu_mem_idle = int_gpu_mem_idle - taken.gpu_memory
      FROM (SELECT host, sum(cores) AS cores, sum(memory) AS memory, sum(gpus) AS gpus, sum(gpu_memory) AS gpu_memory
              FROM json_to_recordset(CAST(:rows AS json))
                   AS run(host varchar, cores int, memory bigint, gpus int, gpu_memory bigint) GROUP BY host) taken
     WHERE host.pk_host = taken.host
    """
)
# Count one more dependency of each of these frames.
_ADD_DEPEND = text("UPDATE frame SET int_depend_count = int_depend_count + 1 WHERE pk_frame = ANY(:frames)")
# The layer, job and show of each of these frames.
_FRAME_PLACES = text(
    "SELECT frame.pk_frame, frame.pk_layer, frame.pk_job, job.pk_show FROM frame JOIN job USING (pk_job)"
    " WHERE pk_frame = ANY(:frames)"
)


class Farm:
    """Builds farms, show by show or in bulk. ``seed`` makes the generated ids reproducible.

    A job or host that names no show or allocation gets the default ones: show ``show`` (managed, subscribed to the
    default allocation with 100,000 cores) and allocation ``local.general`` with the tag ``general`` in the facility
    ``local``. They are created when first needed.
    """

    def __init__(self, connection: Connection, *, seed: int | None = None) -> None:
        self.connection = connection
        self._random = random.Random(seed) if seed is not None else random.SystemRandom()
        self._serial = 0
        self._default_show: ShowIds | None = None
        self._default_alloc: AllocIds | None = None
        self._default_facility: str | None = None

    # Rows

    def new_id(self) -> str:
        """A new row id."""
        return str(uuid.UUID(int=self._random.getrandbits(128), version=4))

    def next_name(self, prefix: str) -> str:
        """``prefix`` with the next number of this farm."""
        self._serial += 1
        return f"{prefix}{self._serial:04d}"

    def named(self, table: str, key: str, name: str, **row: Any) -> str:
        """Get or create: the id of the row of ``table`` called ``name``, which is inserted, with ``row``, if there is
        none."""
        found = self.connection.execute(
            text(f"SELECT {key} FROM {table} WHERE str_name = :name ORDER BY {key}"),  # noqa: S608 - names are ours
            {"name": name},
        ).scalar()
        if found is not None:
            return str(found)
        new_id = self.new_id()
        self.insert(table, [{key: new_id, "str_name": name, **row}])
        return new_id

    def insert(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert rows that all have the same columns; columns that are not given get the schema's defaults."""
        if not rows:
            return
        columns = ", ".join(rows[0])
        statement = text(
            f"INSERT INTO {table} ({columns}) SELECT {columns}"  # noqa: S608 - names are ours
            f" FROM json_populate_recordset(CAST(NULL AS {table}), CAST(:rows AS json))"
        )
        for start in range(0, len(rows), _ROWS_PER_STATEMENT):
            self.connection.execute(statement, {"rows": json.dumps(rows[start : start + _ROWS_PER_STATEMENT])})

    # Shows and what they may use

    def facility(self, name: str = "local") -> str:
        """Id of the facility ``name``, made if need be."""
        return self.named("facility", "pk_facility", name)

    def default_facility(self) -> str:
        """Id of the facility of jobs that name none, made if need be."""
        if self._default_facility is None:
            self._default_facility = self.facility()
        return self._default_facility

    def dept(self, name: str = "Pipeline") -> str:
        """Id of the department ``name``, made if need be."""
        return self.named("dept", "pk_dept", name)

    def alloc(self, tag: str = "general", *, facility: str = "local", name: str | None = None) -> AllocIds:
        """The allocation ``facility.tag`` (or ``name``), made if need be."""
        facility_id = self.facility(facility)
        name = name or f"{facility}.{tag}"
        row = {"str_tag": tag, "pk_facility": facility_id, "b_default": False}
        return AllocIds(self.named("alloc", "pk_alloc", name, **row), name, tag, facility_id)

    def default_alloc(self) -> AllocIds:
        """The allocation of hosts that name none, made if need be."""
        if self._default_alloc is None:
            self._default_alloc = self.alloc()
        return self._default_alloc

    def show(
        self,
        name: str | None = None,
        *,
        managed: bool = True,
        active: bool = True,
        booking_enabled: bool = True,
        dept: str = "Pipeline",
        folder_max_cores: float = -1,
        folder_max_gpus: int = -1,
    ) -> ShowIds:
        """A new show with its root folder, whose caps are given here, and its point."""
        show_id, dept_id = self.new_id(), self.dept(dept)
        name = name or self.next_name("show")
        show = {"pk_show": show_id, "str_name": name, "b_active": active, "b_booking_enabled": booking_enabled}
        self.insert("show", [{**show, "b_scheduler_managed": managed}])
        self.insert("show_stats", [{"pk_show": show_id}])
        root = self.folder(show_id, name, dept_id=dept_id, max_cores=folder_max_cores, max_gpus=folder_max_gpus)
        self.connection.execute(_INSERT_POINT, {"point": self.new_id(), "dept": dept_id, "show": show_id})
        return ShowIds(show_id, name, root, dept_id)

    def default_show(self) -> ShowIds:
        """The show of jobs that name none, made if need be."""
        if self._default_show is None:
            self._default_show = self.show("show")
            self.subscription(self._default_show, self.default_alloc(), size=100_000)
        return self._default_show

    def folder(
        self,
        show: ShowIds | str,
        name: str,
        *,
        parent: str | None = None,
        dept_id: str | None = None,
        max_cores: float = -1,
        max_gpus: int = -1,
    ) -> str:
        """Id of a new folder. ``max_cores`` and ``max_gpus`` are the enforced caps (folder_resource)."""
        folder_id = self.new_id()
        row = {"pk_folder": folder_id, "pk_parent_folder": parent, "str_name": name[:36]}
        show_id = show.id if isinstance(show, ShowIds) else show
        self.insert("folder", [{**row, "pk_show": show_id, "pk_dept": dept_id or self.dept()}])
        self.connection.execute(_FOLDER_CAPS, {"folder": folder_id, "cores": centicores(max_cores), "gpus": max_gpus})
        return folder_id

    def subscription(self, show: ShowIds, alloc: AllocIds, *, size: float = 100, burst: float | None = None) -> str:
        """Id of a new subscription; ``size`` and ``burst`` in cores, burst like size unless given."""
        subscription_id = self.new_id()
        row = {"pk_subscription": subscription_id, "pk_alloc": alloc.id, "pk_show": show.id}
        caps = {"int_size": centicores(size), "int_burst": centicores(size if burst is None else burst)}
        self.insert("subscription", [{**row, **caps}])
        return subscription_id

    def limit(self, name: str, max_value: int) -> str:
        """Id of a new limit (a licence, say) of ``max_value`` running frames."""
        limit_id = self.new_id()
        self.insert("limit_record", [{"pk_limit_record": limit_id, "str_name": name, "int_max_value": max_value}])
        return limit_id

    # Hosts

    def host(self, **spec: Any) -> HostIds:
        """One host; the keywords are the fields of HostSpec."""
        return self.hosts([HostSpec(**spec)])[0]

    def hosts(self, specs: Iterable[HostSpec]) -> list[HostIds]:
        """Many hosts, with their tags and their host_stat."""
        hosts, stats, tags, made = [], [], [], []
        for spec in specs:
            alloc = spec.alloc or self.default_alloc()
            ids = HostIds(self.new_id(), spec.name or self.next_name("host"), alloc.id)
            own_tags = self._host_tags(spec, ids, alloc)
            hosts.append(host_row(spec, ids, own_tags))
            stats.append(host_stat_row(spec, ids, self.new_id()))
            tags += own_tags
            made.append(ids)
        self.insert("host", hosts)
        self.insert("host_stat", stats)
        self.insert("host_tag", tags)
        return made

    def _host_tags(self, spec: HostSpec, ids: HostIds, alloc: AllocIds) -> list[dict[str, Any]]:
        """The rows of a host's tags."""
        wanted = [("MANUAL", tag) for tag in spec.tags] + [("HARDWARE", tag) for tag in spec.hardware_tags]
        if spec.alloc_tag:
            wanted.append(("ALLOC", alloc.tag))
        if spec.hostname_tag:
            wanted.append(("HOSTNAME", ids.name))
        return [
            {"pk_host_tag": self.new_id(), "pk_host": ids.id, "str_tag": tag, "str_tag_type": kind, "b_constant": False}
            for kind, tag in sorted(wanted)
        ]

    # Jobs

    def job(self, layers: Sequence[LayerSpec] | None = None, **spec: Any) -> JobIds:
        """One job (of one one-frame layer unless ``layers`` says more); the keywords are the fields of JobSpec."""
        return self.jobs([JobSpec(layers=layers or [LayerSpec()], **spec)])[0]

    def jobs(self, specs: Iterable[JobSpec]) -> list[JobIds]:
        """Many jobs with their layers, frames, limits and environments; those with ``activate`` are activated."""
        specs = list(specs)
        jobs: list[dict[str, Any]] = []
        resources: list[dict[str, Any]] = []
        made: list[JobIds] = []
        layers: list[tuple[JobIds, int, LayerSpec]] = []
        for spec in specs:
            show = spec.show or self.default_show()
            name = spec.name or self.next_name(f"{show.name}-{spec.shot}-{spec.user}_job")
            layer_ids = [self._layer_ids(layer, position) for position, layer in enumerate(spec.layers)]
            ids = JobIds(self.new_id(), name, show, spec.folder_id or show.folder_id, tuple(layer_ids))
            jobs.append(job_row(spec, ids, spec.facility_id or self.default_facility()))
            resources.append(job_resource_row(spec, ids))
            layers += [(ids, position, layer) for position, layer in enumerate(spec.layers)]
            made.append(ids)
        self.insert("job", jobs)
        self.connection.execute(_JOB_RESOURCES, {"rows": json.dumps(resources)})
        self._insert_layers(layers)
        self._insert_environments(zip(specs, made, strict=True))
        self.activate([ids for ids, spec in zip(made, specs, strict=True) if spec.activate])
        return made

    def _layer_ids(self, layer: LayerSpec, position: int) -> LayerIds:
        frames = tuple(self.new_id() for _ in layer.frame_numbers())
        return LayerIds(self.new_id(), layer.name or f"layer{position + 1}", frames)

    def _insert_layers(self, layers: Sequence[tuple[JobIds, int, LayerSpec]]) -> None:
        """Insert layers, each given as its job, its place there from 0 and what it is, with their frames and limits."""
        rows, delayed, frames, limits = [], [], [], []
        for job, position, spec in layers:
            ids = job.layers[position]
            row = layer_row(spec, job, position)
            if spec.start_after is None:
                rows.append(row)
            else:
                delayed.append({**row, "ts_start_after": spec.start_after.isoformat()})
            frames += frame_rows(spec, job, position)
            limits += [
                {"pk_layer_limit": self.new_id(), "pk_layer": ids.id, "pk_limit_record": limit} for limit in spec.limits
            ]
        self.insert("layer", rows)
        self.insert("layer", delayed)
        self.insert("frame", frames)
        self.insert("layer_limit", limits)

    def _insert_environments(self, jobs: Iterable[tuple[JobSpec, JobIds]]) -> None:
        """Insert the environment variables of these jobs and of their layers."""
        of_jobs, of_layers = [], []
        for spec, ids in jobs:
            for key, value in spec.env.items():
                row = {"pk_job": ids.id, "str_key": key, "str_value": value}
                of_jobs.append({"pk_job_env": self.new_id(), **row})
            for layer, layer_ids in zip(spec.layers, ids.layers, strict=True):
                for key, value in layer.env.items():
                    row = {"pk_job": ids.id, "pk_layer": layer_ids.id, "str_key": key, "str_value": value}
                    of_layers.append({"pk_layer_env": self.new_id(), **row})
        self.insert("job_env", of_jobs)
        self.insert("layer_env", of_layers)

    def activate(self, jobs: Sequence[JobIds]) -> None:
        """Make jobs bookable: frames SETUP to WAITING (or DEPEND), counters, job PENDING."""
        if not jobs:
            return
        ids = [job.id for job in jobs]
        open_jobs(self.connection, ids)

    # Dependencies, as Cuebot stores them: call before or after the activation of the dependent job

    def layer_on_layer(self, er: tuple[JobIds, int], on: tuple[JobIds, int], *, any_frame: bool = False) -> str:
        """Id of a dependency of a layer (job, index of the layer) on a whole layer, or on any frame of it."""
        layer = er[0].layers[er[1]]
        row = {**_depend_columns(er, on), "str_type": "LAYER_ON_LAYER", "b_any": any_frame}
        return self._depend(row, layer.frames)

    def frame_by_frame(self, er: tuple[JobIds, int], on: tuple[JobIds, int]) -> str:
        """Id of a dependency of each frame of a layer on the frame at the same position of another."""
        composite = {"str_type": "FRAME_BY_FRAME", "b_composite": True}
        parent = self._depend({**_depend_columns(er, on), **composite}, ())
        pairs = zip(er[0].layers[er[1]].frames, on[0].layers[on[1]].frames, strict=False)
        for er_frame, on_frame in pairs:
            self.frame_on_frame((*er, er_frame), (*on, on_frame), parent=parent)
        return parent

    def frame_on_frame(
        self, er: tuple[JobIds, int, str], on: tuple[JobIds, int, str], *, parent: str | None = None
    ) -> str:
        """Id of a dependency of one frame (job, index of the layer, frame id) on another."""
        frames = {"pk_frame_depend_er": er[2], "pk_frame_depend_on": on[2], "pk_parent": parent}
        row = {**_depend_columns(er[:2], on[:2]), **frames, "str_type": "FRAME_ON_FRAME"}
        return self._depend(row, [er[2]])

    def job_on_job(self, er: JobIds, on: JobIds) -> str:
        """Id of a dependency of every frame of a job on a whole job."""
        row = {"pk_job_depend_er": er.id, "pk_job_depend_on": on.id, "str_type": "JOB_ON_JOB"}
        return self._depend(row, er.frames)

    def _depend(self, row: Mapping[str, Any], frames: Sequence[str]) -> str:
        """Insert a dependency and have these frames wait for it; returns its id."""
        depend_id = self.new_id()
        external = row["pk_job_depend_er"] != row["pk_job_depend_on"]
        target = {"str_target": "EXTERNAL" if external else "INTERNAL", "str_signature": depend_id}
        self.insert("depend", [{"pk_depend": depend_id, **row, **target}])
        if frames:
            self.connection.execute(_ADD_DEPEND, {"frames": list(frames)})
        return depend_id

    # Running frames

    def run(
        self,
        frames: Sequence[str],
        host: HostIds,
        *,
        cores: float = 1,
        memory_gb: float = 1,
        gpus: int = 0,
        gpu_memory_gb: float = 0,
    ) -> list[str]:
        """Ids of new procs that run ``frames`` on ``host``, as if a scheduler had booked them a moment ago.

        Frames, counters and the host change; the five accounting tables do not (a managed show's are recomputed).
        """
        places = {row.pk_frame: row for row in self.connection.execute(_FRAME_PLACES, {"frames": list(frames)})}
        reserved = {"cores": centicores(cores), "memory": kilobytes(memory_gb), "gpus": gpus}
        reserved["gpu_memory"] = kilobytes(gpu_memory_gb)
        rows = json.dumps([{"frame": frame, "host": host.id, "host_name": host.name, **reserved} for frame in frames])
        self.connection.execute(_RUN_FRAMES, {"rows": rows})
        self.connection.execute(_TAKE_FROM_HOSTS, {"rows": rows})
        procs = [
            {
                "pk_proc": self.new_id(),
                "pk_host": host.id,
                "pk_job": places[frame].pk_job,
                "pk_show": places[frame].pk_show,
                "pk_layer": places[frame].pk_layer,
                "pk_frame": frame,
                "int_cores_reserved": reserved["cores"],
                "int_mem_reserved": reserved["memory"],
                "int_mem_pre_reserved": reserved["memory"],
                "int_gpus_reserved": reserved["gpus"],
                "int_gpu_mem_reserved": reserved["gpu_memory"],
                "int_gpu_mem_pre_reserved": reserved["gpu_memory"],
            }
            for frame in frames
        ]
        self.insert("proc", procs)
        return [str(proc["pk_proc"]) for proc in procs]


def centicores(cores: float) -> int:
    """The centicores of some cores; -1, which is no cap, stays -1."""
    return UNLIMITED if cores == UNLIMITED else round(cores * CENTICORES_PER_CORE)


def kilobytes(gigabytes: float) -> int:
    """The KB of some GB."""
    return round(gigabytes * KB_PER_GB)


def host_row(spec: HostSpec, ids: HostIds, tags: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The columns of host."""
    idle_cores = spec.cores if spec.idle_cores is None else spec.idle_cores
    idle_memory = spec.memory_gb if spec.idle_memory_gb is None else spec.idle_memory_gb
    return {
        "pk_host": ids.id,
        "pk_alloc": ids.alloc_id,
        "str_name": ids.name,
        "str_lock_state": spec.lock,
        "int_cores": centicores(spec.cores),
        "int_procs": 1,
        "int_cores_idle": centicores(idle_cores),
        "int_mem": kilobytes(spec.memory_gb),
        "int_mem_idle": kilobytes(idle_memory),
        "int_gpus": spec.gpus,
        "int_gpus_idle": spec.gpus,
        "int_gpu_mem": kilobytes(spec.gpu_memory_gb),
        "int_gpu_mem_idle": kilobytes(spec.gpu_memory_gb),
        "int_thread_mode": spec.thread_mode,
        "str_tags": " ".join(str(tag["str_tag"]) for tag in sorted(tags, key=itemgetter("str_tag_type", "str_tag"))),
    }


def host_stat_row(spec: HostSpec, ids: HostIds, stat_id: str) -> dict[str, Any]:
    """The columns of host_stat."""
    free = spec.memory_gb if spec.free_memory_gb is None else spec.free_memory_gb
    pinged = datetime.now(UTC) - timedelta(seconds=spec.ping_age)
    return {
        "pk_host_stat": stat_id,
        "pk_host": ids.id,
        "int_mem_total": kilobytes(spec.memory_gb),
        "int_mem_free": kilobytes(free),
        "int_swap_total": kilobytes(2),
        "int_swap_free": kilobytes(2),
        "int_mcp_total": kilobytes(100),
        "int_mcp_free": kilobytes(80),
        "int_gpu_mem_total": kilobytes(spec.gpu_memory_gb),
        "int_gpu_mem_free": kilobytes(spec.gpu_memory_gb),
        "ts_ping": pinged.isoformat(),
        "ts_booted": (pinged - timedelta(days=1)).isoformat(),
        "str_state": spec.state,
        "str_os": spec.os,
    }


def job_row(spec: JobSpec, ids: JobIds, facility_id: str) -> dict[str, Any]:
    """The columns of job."""
    return {
        "pk_job": ids.id,
        "pk_folder": ids.folder_id,
        "pk_show": ids.show.id,
        "pk_facility": facility_id,
        "pk_dept": ids.show.dept_id,
        "str_name": ids.name,
        "str_visible_name": ids.name,
        "str_shot": spec.shot,
        "str_user": spec.user,
        "str_state": "STARTUP",
        "str_log_dir": spec.log_dir,
        "int_uid": spec.uid,
        "b_paused": spec.paused,
        "b_autoeat": spec.autoeat,
        "int_max_retries": spec.max_retries,
        "str_show": ids.show.name,
        "str_os": spec.os,
    }


def job_resource_row(spec: JobSpec, ids: JobIds) -> dict[str, Any]:
    """The caps and priority of a job, by the names that _JOB_RESOURCES has for them."""
    return {
        "job": ids.id,
        "min_cores": centicores(spec.min_cores),
        "max_cores": centicores(spec.max_cores),
        "max_gpus": spec.max_gpus,
        "priority": spec.priority,
    }


def layer_row(spec: LayerSpec, job: JobIds, position: int) -> dict[str, Any]:
    """The columns of layer."""
    return {
        "pk_layer": job.layers[position].id,
        "pk_job": job.id,
        "str_name": job.layers[position].name,
        "str_cmd": spec.command,
        "str_range": spec.frame_range(),
        "int_chunk_size": spec.chunk,
        "int_dispatch_order": position + 1,
        "int_cores_min": round(spec.cores * CENTICORES_PER_CORE),
        "int_cores_max": round(spec.cores_max * CENTICORES_PER_CORE),
        "int_mem_min": kilobytes(spec.memory_gb),
        "int_gpus_min": spec.gpus,
        "int_gpus_max": spec.gpus,
        "int_gpu_mem_min": kilobytes(spec.gpu_memory_gb),
        "str_tags": spec.tags,
        "str_type": spec.type,
        "b_threadable": spec.threadable,
        "b_optimize": spec.optimize,
        "str_services": spec.services,
        "int_timeout": spec.timeout,
        "int_timeout_llu": spec.timeout_llu,
    }


def frame_rows(spec: LayerSpec, job: JobIds, position: int) -> list[dict[str, Any]]:
    """The columns of frame, for each frame of a layer."""
    layer = job.layers[position]
    return [
        {
            "pk_frame": frame_id,
            "pk_layer": layer.id,
            "pk_job": job.id,
            "str_name": f"{number:04d}-{layer.name}",
            "str_state": "SETUP",
            "int_number": number,
            "int_dispatch_order": order,
            "int_layer_order": position + 1,
        }
        for order, (number, frame_id) in enumerate(zip(spec.frame_numbers(), layer.frames, strict=True))
    ]


def _depend_columns(er: tuple[JobIds, int], on: tuple[JobIds, int]) -> dict[str, str]:
    """The columns of the table depend for a layer (job, index of the layer) that depends on another."""
    return {
        "pk_job_depend_er": er[0].id,
        "pk_layer_depend_er": er[0].layers[er[1]].id,
        "pk_job_depend_on": on[0].id,
        "pk_layer_depend_on": on[0].layers[on[1]].id,
    }
