"""Submitting a job: checked against the farm, stored and activated in one transaction, in a constant number of
statements.

What the job's file leaves open is what the folder says, then the show. Frames go in as SETUP and are activated at the
end, as Cuebot does (facts B); the database's own trigger then wakes the scheduler.
"""

from __future__ import annotations

import hashlib
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog
from sqlalchemy import Connection, Engine

from opencue_sched.domain.cluster import join_tags
from opencue_sched.domain.depends import ChunkedRange, DependTarget, DependType, frame_by_frame, previous_frame
from opencue_sched.domain.farm import FrameState, JobState
from opencue_sched.domain.frame_range import FrameRange
from opencue_sched.domain.job_spec import DependSpec, InvalidJobSpec, JobSpec, LayerSpec, near
from opencue_sched.domain.units import CENTICORES_PER_CORE, LOG_DIR_WIDTH, frame_name
from opencue_sched.errors import InvalidInput
from opencue_sched.settings import Settings
from opencue_sched.store import shows as naming
from opencue_sched.store import submit
from opencue_sched.store.submit import DependRow, LayerProgress

# Where a job goes: the show, folder, facility, department, limits and other jobs that its file names.
#
# Everything that is not there is said at once, each with the name that was probably meant.

_PAIRING = {DependType.FRAME_BY_FRAME: frame_by_frame, DependType.PREVIOUS_FRAME: previous_frame}


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What the job's dependencies mean outside the job: jobs by name, layers and frames of theirs by id."""

    jobs: Mapping[str, submit.OtherJob]
    layers: Mapping[tuple[str, str], submit.OtherLayer]
    """By job id and layer name."""
    frames: Mapping[tuple[str, int], str]
    """Ids by layer id and frame number, of the layers whose frames matter."""

    def job(self, depend: DependSpec) -> submit.OtherJob:
        return self.jobs[(depend.on_job or "").lower()]

    def layer(self, depend: DependSpec) -> submit.OtherLayer:
        return self.layers[self.job(depend).id, depend.on_layer or ""]

    def frame(self, depend: DependSpec) -> str:
        return self.frames[self.layer(depend).id, depend.on_frame or 0]

    def range_of(self, depend: DependSpec) -> ChunkedRange:
        """The frames of the layer that is waited for. Raises InvalidInput when its range makes no sense."""
        layer = self.layer(depend)
        return ChunkedRange(FrameRange.parse(layer.frame_range), max(1, layer.chunk_size))


@dataclass(frozen=True, slots=True)
class Place:
    """What a job file's names stand for."""

    show: submit.ShowRow
    folder: submit.FolderRow
    facility_id: str
    facility_name: str
    dept_id: str
    limits: Mapping[str, str]
    elsewhere: Elsewhere


def find_place(connection: Connection, spec: JobSpec) -> Place:
    """Raises InvalidJobSpec naming everything that is not there."""
    problems: list[str] = []
    show = submit.find_show(connection, spec.show)
    if show is None:
        shows = naming.similar_names(connection, naming.Kind.SHOW, spec.show)
        problems.append(f"show: there is no show {spec.show!r}{near(spec.show, shows)}")
    elif not show.active:
        problems.append(f"show: {show.name!r} is not active; `opencue-sched show active {show.name} on` makes it so")
    names = submit.names(connection)
    facility = _one_of(names["facility"], spec.facility, "facility", problems)
    dept = _one_of(names["dept"], spec.dept, "dept", problems) if spec.dept is not None else None
    folder = _folder(connection, show, spec.folder, problems) if show is not None else None
    limits = _limits(names["limit"], spec.layers, problems)
    elsewhere = _elsewhere(connection, spec, problems)
    if problems or show is None or folder is None or facility is None:
        raise InvalidJobSpec(problems)
    dept_id = dept.id if dept is not None else folder.dept_id
    return Place(show, folder, facility.id, facility.name, dept_id, limits, elsewhere)


def _one_of(named: Sequence[submit.Named], wanted: str | None, key: str, problems: list[str]) -> submit.Named | None:
    """The one of this name; without a name the default one, or the only one."""
    if wanted is None:
        default = [one for one in named if one.default] or (list(named) if len(named) == 1 else [])
        if default:
            return default[0]
        names = ", ".join(sorted(one.name for one in named)) or "none"
        problems.append(f"{key}: is missing, and no {key} is marked as the default one; there are: {names}")
        return None
    found = next((one for one in named if one.name == wanted), None)
    if found is None:
        problems.append(f"{key}: there is no {key} {wanted!r}{near(wanted, [one.name for one in named])}")
    return found


def _folder(
    connection: Connection, show: submit.ShowRow, wanted: str | None, problems: list[str]
) -> submit.FolderRow | None:
    folders = submit.folders_of(connection, show.id)
    if wanted is None:
        root = next((folder for folder in folders if folder.root), None)
        if root is None:
            problems.append(f"folder: show {show.name!r} has no root folder")
        return root
    found = next((folder for folder in folders if folder.name == wanted), None)
    if found is None:
        hint = near(wanted, [folder.name for folder in folders])
        problems.append(f"folder: show {show.name!r} has no folder {wanted!r}{hint}")
    return found


def _limits(named: Sequence[submit.Named], layers: Sequence[LayerSpec], problems: list[str]) -> dict[str, str]:
    ids = {limit.name: limit.id for limit in named}
    for position, layer in enumerate(layers):
        problems += [
            f"layers[{position}].limits: there is no limit {name!r}{near(name, ids)}"
            for name in layer.limits
            if name not in ids
        ]
    return ids


def external_depends(spec: JobSpec) -> Iterable[tuple[str, LayerSpec | None, DependSpec]]:
    """Every dependency on another job: the path of its field, the layer that waits (None: the job), and itself."""
    for number, depend in enumerate(spec.depends):
        yield f"depends[{number}]", None, depend
    for position, layer in enumerate(spec.layers):
        for number, depend in enumerate(layer.depends):
            if depend.on_job is not None:
                yield f"layers[{position}].depends[{number}]", layer, depend


def _elsewhere(connection: Connection, spec: JobSpec, problems: list[str]) -> Elsewhere:
    wanted = list(external_depends(spec))
    if not wanted:
        return Elsewhere({}, {}, {})
    names = {(depend.on_job or "").lower() for _, _, depend in wanted}
    jobs = submit.find_jobs(connection, names)
    by_job = {
        (layer.job_id, layer.name): layer for layer in submit.layers_of(connection, [j.id for j in jobs.values()])
    }
    counted = {
        by_job[key].id
        for _, _, depend in wanted
        if (depend.type in _PAIRING or depend.on_frame is not None)
        and (job := jobs.get((depend.on_job or "").lower())) is not None
        and (key := (job.id, depend.on_layer or "")) in by_job
    }
    frames = {(frame.layer_id, frame.number): frame.id for frame in submit.frames_of(connection, counted)}
    elsewhere = Elsewhere(jobs, by_job, frames)
    for path, layer, depend in wanted:
        problem = _external_problem(connection, elsewhere, layer, depend)
        if problem:
            problems.append(f"{path}: {problem}")
    return elsewhere


def _external_problem(
    connection: Connection, elsewhere: Elsewhere, layer: LayerSpec | None, depend: DependSpec
) -> str | None:
    name = (depend.on_job or "").lower()
    job = elsewhere.jobs.get(name)
    if job is None:
        return f"there is no job {name!r}{near(name, naming.similar_names(connection, naming.Kind.JOB, name))}"
    if depend.on_layer is None:
        return None
    if (job.id, depend.on_layer) not in elsewhere.layers:
        layers = [layer_name for job_id, layer_name in elsewhere.layers if job_id == job.id]
        return f"job {name!r} has no layer {depend.on_layer!r}{near(depend.on_layer, layers)}"
    if depend.on_frame is not None and (elsewhere.layer(depend).id, depend.on_frame) not in elsewhere.frames:
        on = elsewhere.layer(depend)
        return f"{depend.on_frame} is not the number of a frame of layer {on.name!r} ({on.frame_range})"
    if layer is not None and depend.type in _PAIRING:
        try:
            pairs = _PAIRING[depend.type](layer.frames, elsewhere.range_of(depend))
        except InvalidInput as error:
            return f"layer {depend.on_layer!r} of job {name!r} cannot be waited for frame by frame: {error}"
        if pairs == ():
            return f"layers {layer.name!r} and {depend.on_layer!r} of job {name!r} have no frame in common"
    return None


# What a new job waits for, as rows of ``depend`` and as the number of things each of its frames waits for.
#
# As in Cuebot, a dependency frame by frame is a composite row with one FRAME_ON_FRAME row below it for each pair, and
# one that is met already goes in inactive. Two fields of a job file may ask for the same pair of frames; it goes in
# once.


@dataclass(frozen=True, slots=True)
class NewLayer:
    """A layer of the new job with the ids of its frames by number."""

    id: str
    spec: LayerSpec
    frames: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the jobs that are waited for have come, while they are held still."""

    job_states: Mapping[str, str]
    layers: Mapping[str, LayerProgress]
    frames_over: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Side:
    """A job, a layer of it or a frame of that."""

    job: str
    layer: str | None = None
    frame: str | None = None


class DependRows:
    """Collects the rows of one job. ``waits_for`` counts active dependencies by frame id."""

    def __init__(self, job_id: str, layers: Mapping[str, NewLayer], new_id: Callable[[], str]) -> None:
        self.rows: list[DependRow] = []
        self.waits_for: Counter[str] = Counter()
        self.met: list[str] = []
        self._job_id = job_id
        self._layers = layers
        self._new_id = new_id
        self._signatures: set[str] = set()

    def add_internal(self) -> None:
        """What layers of the job wait for in the job itself."""
        for layer in self._layers.values():
            # A layer asked for both as a whole and by any frame: the whole counts, and comes first.
            for depend in sorted(layer.spec.depends, key=lambda depend: depend.any_frame):
                if depend.on_job is not None or depend.on_layer is None:
                    continue
                on = self._layers[depend.on_layer]
                side = _Side(self._job_id, on.id, None if depend.on_frame is None else on.frames[depend.on_frame])
                if depend.type.composite:
                    self._add_pairs(layer, depend.type, side, on.spec.frames, on.frames, frozenset())
                else:
                    self._add_whole(layer, depend, side, met=False)

    def add_external(self, spec: JobSpec, elsewhere: Elsewhere, progress: Progress) -> None:
        """What the job and its layers wait for in other jobs. Raises InvalidJobSpec for what would never be met."""
        problems = []
        by_path = list(external_depends(spec))
        for path, layer_spec, depend in sorted(by_path, key=lambda entry: entry[2].any_frame):
            layer = None if layer_spec is None else self._layers[layer_spec.name]
            on_job = elsewhere.job(depend)
            over = progress.job_states.get(on_job.id, on_job.state) == JobState.FINISHED
            side = _external_side(elsewhere, depend)
            if depend.type.composite and layer is not None:
                numbers = {number: frame for (of, number), frame in elsewhere.frames.items() if of == side.layer}
                on_range = elsewhere.range_of(depend)
                open_frames = self._add_pairs(layer, depend.type, side, on_range, numbers, progress.frames_over)
                met = not open_frames
            else:
                met = _is_met(depend, side, over, progress)
                self._add_whole(layer, depend, side, met=met)
            if met:
                self.met.append(_met_note(path, depend))
            elif over:
                problems.append(
                    f"{path}: job {depend.on_job!r} is finished, but not what this waits for: it never will be"
                )
        if problems:
            raise InvalidJobSpec(problems)

    def _add_whole(self, layer: NewLayer | None, depend: DependSpec, side: _Side, *, met: bool) -> None:
        """All frames of the layer, or of the job, wait for one thing."""
        waiting = _Side(self._job_id, None if layer is None else layer.id)
        if not self._add(depend.type, waiting, side, any_frame=depend.any_frame, active=not met) or met:
            return
        for one in self._layers.values() if layer is None else (layer,):
            self.waits_for.update(one.frames.values())

    def _add_pairs(
        self,
        layer: NewLayer,
        kind: DependType,
        side: _Side,
        on_range: ChunkedRange,
        on_frames: Mapping[int, str],
        over: frozenset[str],
    ) -> int:
        """Frames of the layer wait for frames of another; how many pairs are still open.

        One chunk of several frames on either side makes it a dependency of layer on layer, as in Cuebot.
        """
        pairs = _PAIRING[kind](layer.spec.frames, on_range)
        if pairs is None:
            met = all(frame in over for frame in on_frames.values())
            self._add_whole(layer, DependSpec(DependType.LAYER_ON_LAYER), side, met=met)
            return 0 if met else 1
        found = [(layer.frames[er], on_frames[on]) for er, on in pairs if on in on_frames]
        still_open = sum(on not in over for _, on in found)
        waiting = _Side(self._job_id, layer.id)
        parent = self._add(kind, waiting, side, any_frame=False, active=still_open > 0)
        for er, on in found:
            er_side, on_side = _Side(self._job_id, layer.id, er), _Side(side.job, side.layer, on)
            active = on not in over
            kind_of_child = DependType.FRAME_ON_FRAME
            if self._add(kind_of_child, er_side, on_side, any_frame=False, active=active, parent=parent) and active:
                self.waits_for[er] += 1
        return still_open

    def _add(
        self,
        kind: DependType,
        er: _Side,
        on: _Side,
        *,
        any_frame: bool,
        active: bool,
        parent: str | None = None,
    ) -> str | None:
        """Id of the new row; None when there is one for the same pair already."""
        signature = _signature(kind, er, on)
        if signature in self._signatures:
            return None
        self._signatures.add(signature)
        target = DependTarget.INTERNAL if er.job == on.job else DependTarget.EXTERNAL
        depend_id = self._new_id()
        self.rows.append(
            DependRow(
                id=depend_id,
                parent=parent,
                type=kind.value,
                er_layer=er.layer,
                er_frame=er.frame,
                on_job=on.job,
                on_layer=on.layer,
                on_frame=on.frame,
                target=target.value,
                any_frame=any_frame,
                active=active,
                composite=kind.composite,
                signature=signature if active else depend_id,
            )
        )
        return depend_id


def _signature(kind: DependType, er: _Side, on: _Side) -> str:
    """The name of a pair, which ``depend.str_signature`` keeps unique: the same that Cuebot gives it."""
    parts = (kind.value, er.job, on.job, er.frame or er.layer or "", on.frame or on.layer or "")
    digest = hashlib.md5("".join(parts).encode(), usedforsecurity=False).digest()
    return str(uuid.UUID(bytes=digest, version=3))


def _external_side(elsewhere: Elsewhere, depend: DependSpec) -> _Side:
    job_id = elsewhere.job(depend).id
    if depend.on_layer is None:
        return _Side(job_id)
    layer_id = elsewhere.layer(depend).id
    return _Side(job_id, layer_id, None if depend.on_frame is None else elsewhere.frame(depend))


def _is_met(depend: DependSpec, side: _Side, over: bool, progress: Progress) -> bool:
    if side.layer is None:
        return over
    if side.frame is not None:
        return side.frame in progress.frames_over
    layer = progress.layers.get(side.layer)
    return layer is not None and (layer.any_frame if depend.any_frame else layer.every_frame)


def _met_note(path: str, depend: DependSpec) -> str:
    what = f"job {depend.on_job}"
    if depend.on_layer is not None:
        what = f"layer {depend.on_layer} of {what}"
    if depend.on_frame is not None:
        what = f"frame {depend.on_frame} of {what}"
    return f"{path}: {what} is over already, nothing to wait for"


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
        submit.allow_time(connection, STATEMENT_SECONDS)
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
    if not submit.insert_job(connection, job, point_id=new_id()):
        raise InvalidJobSpec([f"name: a job called {job.name!r} is already pending; kill it first or choose another"])
    layers = {
        layer.name: NewLayer(new_id(), layer, {number: new_id() for number in layer.frame_numbers})
        for layer in spec.layers
    }
    submit.insert_layers(connection, job.id, [_layer_row(layer, order) for order, layer in _in_order(layers)])
    submit.insert_environments(connection, job.id, *_environments(spec, layers, new_id))
    submit.insert_layer_limits(
        connection,
        [
            {"id": new_id(), "layer": layer.id, "limit_id": place.limits[limit]}
            for layer in layers.values()
            for limit in layer.spec.limits
        ],
    )
    columns = _frame_columns(layers)
    submit.insert_frames(connection, job.id, columns)
    depends = DependRows(job.id, layers, new_id)
    depends.add_internal()
    if place.elsewhere.jobs:
        depends.add_external(spec, place.elsewhere, _hold_still(connection, spec, place.elsewhere, settings))
    submit.insert_depends(connection, job.id, depends.rows)
    waits_for = [depends.waits_for[frame] for frame in columns.ids]
    submit.activate(connection, job, frames=columns.ids, waits_for=waits_for, layers=len(layers))
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


def _job_row(spec: JobSpec, place: Place, settings: Settings, *, paused: bool, job_id: str) -> submit.JobRow:
    folder, show = place.folder, place.show
    min_cores = _first(spec.min_cores_centicores, folder.job_min_cores, show.default_min_cores)
    return submit.JobRow(
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


def _refuse_impossible(spec: JobSpec, job: submit.JobRow) -> None:
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


def _frame_columns(layers: Mapping[str, NewLayer]) -> submit.FrameColumns:
    rows = [
        (frame, layer.id, frame_name(number, layer.spec.name), number, position, order)
        for order, layer in _in_order(layers)
        for position, (number, frame) in enumerate(layer.frames.items())
    ]
    ids, of_layers, names, numbers, positions, orders = zip(*rows, strict=True)
    return submit.FrameColumns(ids, of_layers, names, numbers, positions, orders)


def _hold_still(connection: Connection, spec: JobSpec, elsewhere: Elsewhere, settings: Settings) -> Progress:
    """Keep what is waited for from ending until the job is in, and see how far it is."""
    done = {FrameState.SUCCEEDED}
    if not settings.release.satisfy_only_on_frame_success:
        done.add(FrameState.EATEN)
    states = submit.hold_jobs(connection, [job.id for job in elsewhere.jobs.values()])
    whole: set[str] = set()
    counted: set[str] = set()
    for _, _, depend in external_depends(spec):
        if depend.on_layer is not None:
            by_frame = depend.on_frame is not None or depend.type.composite
            (counted if by_frame else whole).add(elsewhere.layer(depend).id)
    frames = submit.frames_of(connection, counted) if counted else []
    return Progress(
        job_states=states,
        layers=submit.layer_progress(connection, whole, done) if whole else {},
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
