"""Submitting a job: it is checked against the farm, stored and activated in one transaction.

The number of statements does not grow with the job. A value that the job's file leaves open is taken from the folder,
and where the folder has none either, from the show. Frames go in as SETUP and are activated at the end, as Cuebot does;
the database's own trigger then wakes the scheduler.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog
from sqlalchemy import Connection, Engine, Row

from opencue_sched.domain.clusters import join_tags
from opencue_sched.domain.names import frame_name, near
from opencue_sched.domain.units import CENTICORES_PER_CORE
from opencue_sched.jobs.depends import DependRows, Target, Targets, find_targets, new_id
from opencue_sched.jobs.job_file import JobSpec, LayerSpec, depends_of, shell_drops
from opencue_sched.reports.run_ends import satisfying_states
from opencue_sched.settings import DEFAULT_OS, Settings
from opencue_sched.store import folders, named_rows, submit
from opencue_sched.store.schema import knows_start_after
from opencue_sched.store.shows import list_shows
from opencue_sched.text_file import InvalidFile

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SubmittedLayer:
    """A layer of a job that was submitted."""

    id: str
    name: str
    frames: int
    """How many frames the layer has."""
    waiting: int
    """How many frames of the layer are WAITING, so could run at once; the others depend on something."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job that was submitted, or with ``dry_run`` would have been."""

    dry_run: bool
    job_id: str
    name: str
    show: str
    folder: str
    facility: str
    paused: bool
    frames: int
    depends: int
    log_dir: str
    layers: tuple[SubmittedLayer, ...]
    notes: tuple[str, ...]
    """Sentences that the submitter should read."""


def submit_job(
    engine: Engine,
    spec: JobSpec,
    settings: Settings,
    *,
    dry_run: bool = False,
    unserved: Callable[[Connection, str, Settings], list[str]] = lambda *_: [],
) -> Submitted:
    """Store and activate a job. With ``dry_run`` all of it is done, and then rolled back.

    ``unserved`` returns notes on what of the stored job the farm could not serve. Raises InvalidFile naming everything
    that is wrong; then nothing was stored.
    """
    with engine.connect() as connection:
        with connection.begin() as transaction:
            submitted = _submit(connection, spec, settings, dry_run=dry_run)
            if dry_run:
                notes = unserved(connection, submitted.job_id, settings)
                transaction.rollback()
        if not dry_run:
            log.info("job_submitted", job=submitted.job_id, name=submitted.name, frames=submitted.frames)
            # After the commit: these reads may take long, and nobody is to wait for the transaction's locks meanwhile.
            notes = unserved(connection, submitted.job_id, settings)
    return replace(submitted, notes=(*submitted.notes, *notes))


def _submit(connection: Connection, spec: JobSpec, settings: Settings, *, dry_run: bool) -> Submitted:
    """Store and activate a job in the caller's transaction; what the farm cannot serve is not looked for. Raises
    InvalidFile."""
    place = _find_place(connection, spec, settings)
    show = place.show
    job = _job_row(spec, place, settings)
    _refuse_more_than_the_job_may_have(spec, job)
    depends, notes_on_met = _depends(job["job"], spec, place)
    layers: list[dict[str, Any]] = []
    frames: list[tuple[str, str, str, int, int, int, int]] = []  # in the order that submit.insert_job describes
    for order, (layer, ids) in enumerate(zip(spec.layers, depends.layers.values(), strict=True), start=1):
        layers.append(_layer_row(layer, ids.layer, order))
        frames += [
            (frame_id, ids.layer, frame_name(number, layer.name), number, position, order, depends.waits_for[frame_id])
            for position, (number, frame_id) in enumerate(ids.frames.items())
        ]
    if not submit.insert_job(connection, job, layers, frames, [row._asdict() for row in depends.rows]):
        name = spec.full_name
        raise InvalidFile(f"name: a job called {name!r} is already pending; kill it first or choose another")
    notes = [*_notes_on_variables(spec), *notes_on_met]
    if not show.managed:
        command = f"opencue-sched show managed {show.name} on"
        notes = [f"show {show.name} is not managed by this scheduler; `{command}` hands it over", *notes]
    if show.paused and not spec.paused:
        notes = [f"show {show.name} is paused, so the job is", *notes]
    return Submitted(
        dry_run=dry_run,
        job_id=job["job"],
        name=spec.full_name,
        show=show.name,
        folder=place.folder.name,
        facility=place.facility.name,
        paused=job["paused"],
        frames=len(frames),
        depends=len(depends.rows),
        log_dir=job["log_dir"],
        layers=tuple(
            SubmittedLayer(
                ids.layer,
                name,
                len(ids.frames),
                sum(not depends.waits_for[frame_id] for frame_id in ids.frames.values()),
            )
            for name, ids in depends.layers.items()
        ),
        notes=tuple(notes),
    )


def _notes_on_variables(spec: JobSpec) -> Iterator[str]:
    """Notes on environment variables that a frame's command may not see."""
    environments = {"env": spec.env} | {f"layers[{index}].env": layer.env for index, layer in enumerate(spec.layers)}
    for path, environment in environments.items():
        if names := shell_drops(environment):
            note = f"a shell may drop {', '.join(names)} on its way to the command"
            yield f"{path}: {note}; names are letters, digits and '_'"


# The rows of the job and its layers, as store.submit names their columns.


def _job_row(spec: JobSpec, place: _Place, settings: Settings) -> dict[str, Any]:
    """The row of a job under a new id: the file's values, else the folder's, else the show's. Cores are centicores."""
    folder, show, job_id = place.folder, place.show, new_id()
    roots = {os.lower(): root for os, root in settings.log_root.items()}
    logs = roots.get((spec.os or DEFAULT_OS).lower(), settings.log_root[DEFAULT_OS]).rstrip("/")
    return spec.model_dump(exclude={"layers", "depends", "env"}) | {
        "job": job_id,
        "env": json.dumps(spec.env),
        "show_id": show.id,
        "show": show.name,
        "folder_id": folder.id,
        "facility_id": place.facility.id,
        "dept_id": place.dept_id,
        "full_name": spec.full_name,
        # Where OpenCue's own submission has its jobs log.
        "log_dir": spec.log_dir or f"{logs}/{show.name}/{spec.shot}/logs/{spec.full_name}--{job_id}",
        "paused": spec.paused or show.paused,
        "min_cores": max(CENTICORES_PER_CORE, _first(spec.min_cores, folder.job_min_cores, show.default_min_cores)),
        "max_cores": _first(spec.max_cores, folder.job_max_cores, show.default_max_cores),
        # The schema's default of show.int_default_min_gpus is 100, meant as centicores; no job asks for 100 GPUs.
        "min_gpus": _first(spec.min_gpus, folder.job_min_gpus, 0),
        "max_gpus": _first(spec.max_gpus, folder.job_max_gpus, show.default_max_gpus),
    }


def _first(of_job: int | None, of_folder: int, of_show: int) -> int:
    """The job's own value, else the folder's (below 0: it has none), else the show's."""
    if of_job is not None:
        return of_job
    return of_folder if of_folder >= 0 else of_show


def _refuse_more_than_the_job_may_have(spec: JobSpec, job: Mapping[str, Any]) -> None:
    """Raise InvalidFile for layers whose frames need more than the job may have.

    What it may have is said by its file, its folder or its show.
    """
    problems = []
    # 0 and below mean no maximum.
    cores, gpus = job["max_cores"] // CENTICORES_PER_CORE, job["max_gpus"]
    for position, layer in enumerate(spec.layers):
        if 0 < cores < layer.least_cores:
            problems.append(
                f"layers[{position}].cores: a frame takes at least {layer.least_cores} cores, more than the {cores} "
                "the job may have, by max_cores of its own or what its folder or show says"
            )
        if 0 < gpus < layer.gpus:
            problems.append(f"layers[{position}].gpus: {layer.gpus} is more than the {gpus} the job may have")
    if problems:
        raise InvalidFile(*problems)


def _layer_row(spec: LayerSpec, layer_id: str, order: int) -> dict[str, Any]:
    """The row of a layer, the ``order``-th of its job."""
    return spec.model_dump(exclude={"depends"}) | {
        "id": layer_id,
        "dispatch_order": order,
        "threads": spec.threads,
        "start_after": spec.start_after and spec.start_after.isoformat(),
        "tags": join_tags(spec.tags),
        "services": ",".join(spec.services) or "default",
    }


# Where a job goes: the show, folder, facility, department, limits and other jobs that its file names.
#
# All names that are not found are reported at once, each with the name that was probably meant.


@dataclass(frozen=True, slots=True)
class _Place:
    """The rows that a job file's names stand for."""

    show: Row[Any]
    folder: Row[Any]
    facility: Row[Any]
    dept_id: str
    targets: Targets
    """What the job waits for in other jobs."""


def _find_place(connection: Connection, spec: JobSpec, settings: Settings) -> _Place:
    """Look up every name in a job file. Raises InvalidFile with all the names that are not found."""
    problems = [
        f"layers[{position}].start_after: this database knows none: that comes with OpenCue's schema V47"
        for position, layer in enumerate(spec.layers)
        if layer.start_after is not None and not knows_start_after(connection)
    ]
    found = named_rows.find_rows(connection, named_rows.Kind.SHOW, [spec.show])
    show = list_shows(connection, found[spec.show].id)[0] if found else None
    folder = None
    if show is None:
        shows = named_rows.similar_names(connection, named_rows.Kind.SHOW, spec.show)
        hint = near(spec.show, shows) or f"; `opencue-sched show create {spec.show}` makes it"
        problems.append(f"show: there is no show {spec.show!r}{hint}")
    elif not show.active:
        problems.append(f"show: {show.name!r} is not active; `opencue-sched show active {show.name} on` makes it so")
    else:
        folder = _named_or_default(folders.list_folders(connection, show.id), spec.folder, "folder", problems)
    names = submit.names(connection)
    facility = _named_or_default(names["facility"], spec.facility, "facility", problems)
    dept = None if spec.dept is None else _named_or_default(names["dept"], spec.dept, "dept", problems)
    limits = [limit.name for limit in names["limit"]]
    for position, layer in enumerate(spec.layers):
        problems += [
            f"layers[{position}].limits: there is no limit {name!r}"
            f"{near(name, limits) or f'; `opencue-sched limit create {name} MAX` makes it'}"
            for name in layer.limits
            if name not in limits
        ]
    targets = find_targets(connection, depends_of(spec), satisfying_states(settings.release), problems)
    if problems or show is None or folder is None or facility is None:
        raise InvalidFile(*problems)
    return _Place(show, folder, facility, folder.dept_id if dept is None else dept.id, targets)


def _named_or_default(rows: Sequence[Row[Any]], wanted: str | None, key: str, problems: list[str]) -> Row[Any] | None:
    """The row whose name is ``wanted``; without a name the default row, or the only one.

    Where there is none, a problem of the field ``key`` is added to ``problems``.
    """
    if wanted is not None:
        found = [row for row in rows if row.name == wanted]
        problem = f"there is no {key} {wanted!r}{near(wanted, [row.name for row in rows])}"
    else:
        found = [row for row in rows if row.is_default] or (list(rows) if len(rows) == 1 else [])
        names = ", ".join(sorted(row.name for row in rows)) or "none"
        problem = f"is missing, and no {key} is marked as the default one; there are: {names}"
    if not found:
        problems.append(f"{key}: {problem}")
    return found[0] if found else None


def _depends(job_id: str, spec: JobSpec, place: _Place) -> tuple[DependRows, list[str]]:
    """The job's rows of ``depend``, and notes on the dependencies that are met already.

    Raises InvalidFile for a dependency that will never be met.
    """
    rows = DependRows(
        {
            layer.name: Target(job_id, new_id(), layer.frames, {number: new_id() for number in layer.frames.numbers})
            for layer in spec.layers
        }
    )
    notes, problems = [], []
    own = [
        (path, layer, depend, rows.layers[depend.layer or ""])
        for path, layer, depend in depends_of(spec)
        if depend.job is None  # on another layer of this job
    ]
    for path, layer, depend, on in [*own, *place.targets.edges]:
        # A dependency on any frame is met by the first frame that is over, all others by what is over as a whole.
        met_by = place.targets.begun if depend.type == "any_frame" else place.targets.over
        if rows.add(layer, depend, on, met_by):
            notes.append(f"{path}: what it waits for is over already")
        elif on.job in place.targets.over:
            problems.append(f"{path}: job {depend.job!r} is finished, but not what this waits for: it never will be")
    if problems:
        raise InvalidFile(*problems)
    return rows, notes
