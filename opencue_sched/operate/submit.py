"""Submitting a job: checked against the farm, stored and activated in one transaction, in a constant number of
statements.

What the job's file leaves open is what the folder says, then the show. Frames go in as SETUP and are activated at the
end, as Cuebot does (facts B); the database's own trigger then wakes the scheduler.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog
from sqlalchemy import Connection, Engine

from opencue_sched.domain.job_spec import InvalidJobSpec, JobSpec
from opencue_sched.domain.names import LOG_DIR_WIDTH, frame_name
from opencue_sched.domain.states import FrameState
from opencue_sched.domain.tags import join_tags
from opencue_sched.domain.units import CENTICORES_PER_CORE
from opencue_sched.operate.submit_depends import DependRows, NewLayer, Progress
from opencue_sched.operate.submit_place import Elsewhere, Place, external_depends, find_place
from opencue_sched.settings import Settings
from opencue_sched.store import submit as store
from opencue_sched.store import submit_targets

log = structlog.get_logger(__name__)

STATEMENT_SECONDS = 600.0
"""Time one statement may take: the frames of the largest job in one."""

_LEAST_JOB_CENTICORES = 100


@dataclass(frozen=True, slots=True)
class SubmittedLayer:
    """A layer that went in. ``waiting``: frames that could run at once; the others wait for something."""

    id: str
    name: str
    frames: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job that went in (or would have: ``dry_run``). ``notes`` are sentences the submitter should read."""

    job_id: str
    name: str
    show: str
    folder: str
    facility: str
    log_dir: str
    paused: bool
    layers: tuple[SubmittedLayer, ...]
    frame_ids: tuple[str, ...]
    depends: int
    dry_run: bool
    notes: tuple[str, ...]

    @property
    def frames(self) -> int:
        return len(self.frame_ids)


def submit_job(
    engine: Engine,
    spec: JobSpec,
    settings: Settings,
    *,
    paused: bool = False,
    dry_run: bool = False,
    new_id: Callable[[], str] = lambda: str(uuid.uuid4()),
) -> Submitted:
    """Store and activate a job. ``dry_run`` does it all and takes it back.

    Raises InvalidJobSpec naming everything that is wrong; then nothing was stored.
    """
    with engine.connect() as connection, connection.begin() as transaction:
        store.allow_time(connection, STATEMENT_SECONDS)
        place = find_place(connection, spec)
        submitted = _submit(connection, spec, place, settings, paused=paused, dry_run=dry_run, new_id=new_id)
        if dry_run:
            transaction.rollback()
    if not dry_run:
        log.info("job_submitted", job=submitted.job_id, name=submitted.name, frames=submitted.frames)
    return submitted


def _submit(
    connection: Connection,
    spec: JobSpec,
    place: Place,
    settings: Settings,
    *,
    paused: bool,
    dry_run: bool,
    new_id: Callable[[], str],
) -> Submitted:
    job = _job_row(spec, place, settings, paused=paused, job_id=new_id())
    _refuse_impossible(spec, job)
    if not store.insert_job(connection, job, point_id=new_id()):
        raise InvalidJobSpec([f"name: a job called {job.name!r} is already pending; kill it first or choose another"])
    layers = {
        layer.name: NewLayer(new_id(), layer, {number: new_id() for number in layer.frame_numbers})
        for layer in spec.layers
    }
    store.insert_layers(connection, job.id, [_layer_row(layer, order) for order, layer in _in_order(layers)])
    store.insert_environments(connection, job.id, *_environments(spec, layers, new_id))
    store.insert_layer_limits(
        connection,
        [
            {"id": new_id(), "layer": layer.id, "limit_id": place.limits[limit]}
            for layer in layers.values()
            for limit in layer.spec.limits
        ],
    )
    columns = _frame_columns(layers)
    store.insert_frames(connection, job.id, columns)
    depends = DependRows(job.id, layers, new_id)
    depends.add_internal()
    if place.elsewhere.jobs:
        depends.add_external(spec, place.elsewhere, _hold_still(connection, spec, place.elsewhere, settings))
    store.insert_depends(connection, job.id, depends.rows)
    waits_for = [depends.waits_for[frame] for frame in columns.ids]
    store.activate(connection, job, frames=columns.ids, waits_for=waits_for, layers=len(layers))
    return Submitted(
        job_id=job.id,
        name=job.name,
        show=place.show.name,
        folder=place.folder.name,
        facility=place.facility_name,
        log_dir=job.log_dir,
        paused=job.paused,
        layers=tuple(_submitted_layer(layer, depends) for layer in layers.values()),
        frame_ids=tuple(columns.ids),
        depends=len(depends.rows),
        dry_run=dry_run,
        notes=(*_notes(place, spec, paused=paused), *depends.met),
    )


def _job_row(spec: JobSpec, place: Place, settings: Settings, *, paused: bool, job_id: str) -> store.JobRow:
    folder, show = place.folder, place.show
    min_cores = _first(spec.min_cores_centicores, folder.job_min_cores, show.default_min_cores)
    return store.JobRow(
        id=job_id,
        show_id=show.id,
        show_name=show.name,
        folder_id=folder.id,
        facility_id=place.facility_id,
        dept_id=place.dept_id,
        name=spec.full_name,
        shot=spec.shot,
        user=spec.user,
        log_dir=spec.log_dir or _log_dir(spec, show.name, job_id, settings),
        os=spec.os,
        uid=spec.uid,
        paused=paused or spec.paused or show.paused,
        autoeat=spec.autoeat,
        max_retries=spec.max_retries,
        priority=spec.priority,
        min_cores=max(_LEAST_JOB_CENTICORES, min_cores),
        max_cores=_first(spec.max_cores_centicores, folder.job_max_cores, show.default_max_cores),
        # The schema's default of show.int_default_min_gpus is 100, meant as centicores; no job asks for 100 GPUs.
        min_gpus=_first(spec.min_gpus, folder.job_min_gpus, 0),
        max_gpus=_first(spec.max_gpus, folder.job_max_gpus, show.default_max_gpus),
    )


def _refuse_impossible(spec: JobSpec, job: store.JobRow) -> None:
    """Frames that want more than a job may have by what its folder or show says (its own cap was checked before)."""
    most = job.max_cores // CENTICORES_PER_CORE if job.max_cores > 0 else None
    problems = [
        f"layers[{position}].cores: a frame takes at least {layer.least_cores} cores, more than the {most} a job of "
        f"this show or folder may have; give the job max_cores of its own"
        for position, layer in enumerate(spec.layers)
        if most is not None and layer.least_cores > most
    ]
    if problems:
        raise InvalidJobSpec(problems)


def _first(of_job: int | None, of_folder: int, of_show: int) -> int:
    """The job's own value, else the folder's (-1: none), else the show's."""
    if of_job is not None:
        return of_job
    return of_folder if of_folder >= 0 else of_show


def _log_dir(spec: JobSpec, show: str, job_id: str, settings: Settings) -> str:
    """``<root>/<show>/<shot>/logs/<job>--<id>``, as in OpenCue (facts E)."""
    submission = settings.submission
    root = submission.log_root_by_os.get(spec.os or "", submission.log_root)
    log_dir = f"{root.rstrip('/')}/{show}/{spec.shot}/logs/{spec.full_name}--{job_id}"
    if len(log_dir) > LOG_DIR_WIDTH:
        raise InvalidJobSpec([f"log_dir: the default one has {len(log_dir)} characters; {LOG_DIR_WIDTH} is the most"])
    return log_dir


def _in_order(layers: Mapping[str, NewLayer]) -> Sequence[tuple[int, NewLayer]]:
    """The layers with their dispatch order, which starts at 1."""
    return list(enumerate(layers.values(), start=1))


def _layer_row(layer: NewLayer, order: int) -> dict[str, object]:
    spec = layer.spec
    return {
        "id": layer.id,
        "name": spec.name,
        "command": spec.command,
        "frame_range": spec.frame_range.text,
        "chunk_size": spec.chunk_size,
        "dispatch_order": order,
        "tags": join_tags(spec.tags),
        "type": spec.type,
        "cores_min": spec.cores_min_centicores,
        "cores_max": spec.cores_max_centicores,
        "threadable": spec.threadable,
        "memory_kb": spec.memory_kb,
        "gpus": spec.gpus,
        "gpu_memory_kb": spec.gpu_memory_kb,
        "services": ",".join(spec.services),
        "timeout": spec.timeout_minutes,
        "timeout_llu": spec.timeout_llu_minutes,
    }


def _environments(
    spec: JobSpec, layers: Mapping[str, NewLayer], new_id: Callable[[], str]
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    of_job = [{"id": new_id(), "key": key, "value": value} for key, value in spec.environment.items()]
    of_layers = [
        {"id": new_id(), "layer": layer.id, "key": key, "value": value}
        for layer in layers.values()
        for key, value in layer.spec.environment.items()
    ]
    return of_job, of_layers


def _frame_columns(layers: Mapping[str, NewLayer]) -> store.FrameColumns:
    rows = [
        (frame, layer.id, frame_name(number, layer.spec.name), number, position, order)
        for order, layer in _in_order(layers)
        for position, (number, frame) in enumerate(layer.frames.items())
    ]
    ids, of_layers, names, numbers, positions, orders = zip(*rows, strict=True)
    return store.FrameColumns(ids, of_layers, names, numbers, positions, orders)


def _hold_still(connection: Connection, spec: JobSpec, elsewhere: Elsewhere, settings: Settings) -> Progress:
    """Keep what is waited for from ending until the job is in, and see how far it is."""
    done = {FrameState.SUCCEEDED}
    if not settings.release.satisfy_only_on_frame_success:
        done.add(FrameState.EATEN)
    states = submit_targets.hold_jobs(connection, [job.id for job in elsewhere.jobs.values()])
    whole: set[str] = set()
    counted: set[str] = set()
    for _, _, depend in external_depends(spec):
        if depend.on_layer is not None:
            by_frame = depend.on_frame is not None or depend.type.composite
            (counted if by_frame else whole).add(elsewhere.layer(depend).id)
    frames = submit_targets.frames_of(connection, counted) if counted else []
    return Progress(
        job_states=states,
        layers=submit_targets.layer_progress(connection, whole, done) if whole else {},
        frames_over=frozenset(frame.id for frame in frames if frame.state in done),
    )


def _submitted_layer(layer: NewLayer, depends: DependRows) -> SubmittedLayer:
    waiting = sum(depends.waits_for[frame] == 0 for frame in layer.frames.values())
    return SubmittedLayer(layer.id, layer.spec.name, len(layer.frames), waiting)


def _notes(place: Place, spec: JobSpec, *, paused: bool) -> list[str]:
    show = place.show
    notes = []
    if not show.managed:
        notes.append(
            f"show {show.name} is not managed by this scheduler; `opencue-sched show managed {show.name} on` hands it "
            "over"
        )
    if show.paused and not (paused or spec.paused):
        notes.append(f"show {show.name} is paused, so the job is")
    return notes
