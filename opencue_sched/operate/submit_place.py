"""Where a job goes: the show, folder, facility, department, limits and other jobs that its file names.

Everything that is not there is said at once, each with the name that was probably meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from opencue_sched.domain.depends import ChunkedRange, DependType, frame_by_frame, previous_frame
from opencue_sched.domain.errors import InvalidInput
from opencue_sched.domain.frame_range import FrameRange
from opencue_sched.domain.job_spec import InvalidJobSpec, JobSpec
from opencue_sched.domain.layer_spec import DependSpec, LayerSpec
from opencue_sched.domain.spec_fields import near
from opencue_sched.domain.states import JobState
from opencue_sched.store import naming, submit_targets

_PAIRING = {DependType.FRAME_BY_FRAME: frame_by_frame, DependType.PREVIOUS_FRAME: previous_frame}


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What the job's dependencies mean outside the job: jobs by name, layers and frames of theirs by id."""

    jobs: Mapping[str, submit_targets.OtherJob]
    layers: Mapping[tuple[str, str], submit_targets.OtherLayer]
    """By job id and layer name."""
    frames: Mapping[tuple[str, int], str]
    """Ids by layer id and frame number, of the layers whose frames matter."""

    def job(self, depend: DependSpec) -> submit_targets.OtherJob:
        return self.jobs[(depend.on_job or "").lower()]

    def layer(self, depend: DependSpec) -> submit_targets.OtherLayer:
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

    show: submit_targets.ShowRow
    folder: submit_targets.FolderRow
    facility_id: str
    facility_name: str
    dept_id: str
    limits: Mapping[str, str]
    elsewhere: Elsewhere


def find_place(connection: Connection, spec: JobSpec) -> Place:
    """Raises InvalidJobSpec naming everything that is not there."""
    problems: list[str] = []
    show = submit_targets.find_show(connection, spec.show)
    if show is None:
        shows = naming.similar_names(connection, naming.Kind.SHOW, spec.show)
        problems.append(f"show: there is no show {spec.show!r}{near(spec.show, shows)}")
    elif not show.active:
        problems.append(f"show: {show.name!r} is not active; `opencue-sched show active {show.name} on` makes it so")
    names = submit_targets.names(connection)
    facility = _one_of(names["facility"], spec.facility, "facility", problems)
    dept = _one_of(names["dept"], spec.dept, "dept", problems) if spec.dept is not None else None
    folder = _folder(connection, show, spec.folder, problems) if show is not None else None
    limits = _limits(names["limit"], spec.layers, problems)
    elsewhere = _elsewhere(connection, spec, problems)
    if problems or show is None or folder is None or facility is None:
        raise InvalidJobSpec(problems)
    dept_id = dept.id if dept is not None else folder.dept_id
    return Place(show, folder, facility.id, facility.name, dept_id, limits, elsewhere)


def _one_of(
    named: Sequence[submit_targets.Named], wanted: str | None, key: str, problems: list[str]
) -> submit_targets.Named | None:
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
    connection: Connection, show: submit_targets.ShowRow, wanted: str | None, problems: list[str]
) -> submit_targets.FolderRow | None:
    folders = submit_targets.folders_of(connection, show.id)
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


def _limits(named: Sequence[submit_targets.Named], layers: Sequence[LayerSpec], problems: list[str]) -> dict[str, str]:
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
    jobs = submit_targets.find_jobs(connection, names)
    by_job = {
        (layer.job_id, layer.name): layer
        for layer in submit_targets.layers_of(connection, [j.id for j in jobs.values()])
    }
    counted = {
        by_job[key].id
        for _, _, depend in wanted
        if (depend.type in _PAIRING or depend.on_frame is not None)
        and (job := jobs.get((depend.on_job or "").lower())) is not None
        and (key := (job.id, depend.on_layer or "")) in by_job
    }
    frames = {(frame.layer_id, frame.number): frame.id for frame in submit_targets.frames_of(connection, counted)}
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


def is_over(state: str) -> bool:
    """Whether a job in this state will change no more."""
    return state == JobState.FINISHED.value
