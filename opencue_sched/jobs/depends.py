"""What jobs and layers wait for: the jobs, layers and frames that are named, and the rows of ``depend`` that say so.

As in Cuebot, a dependency frame by frame is a composite row with one FRAME_ON_FRAME row below it for each pair, and one
that is met already goes in inactive. What is asked for twice goes in twice, and is met at once.
"""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from sqlalchemy import Connection

from opencue_sched.domain.depends import ChunkedRange, DependType, frame_pairs
from opencue_sched.domain.frame_range import FrameRange
from opencue_sched.domain.names import near
from opencue_sched.domain.states import FrameState, JobState
from opencue_sched.errors import InvalidInput
from opencue_sched.jobs.job_file import Depend
from opencue_sched.store import named_rows, submit
from opencue_sched.store.jobs import LayerView, frames_of, layers_of


class DependingLayer(Protocol):
    """A layer that waits, of a job file or of a job that is in."""

    @property
    def name(self) -> str: ...

    @property
    def frames(self) -> ChunkedRange: ...


@dataclass(frozen=True, slots=True)
class Target:
    """What is waited for: a job, a layer of it, or one of its frames."""

    job: str
    """The id of the job."""
    layer: str = ""
    """The id of the layer; empty for a job."""
    range: ChunkedRange | None = None
    """The numbers of the layer, where single frames matter."""
    frames: Mapping[int, str] = field(default_factory=dict)
    """The ids of the frames of the layer, by number, where single frames matter."""


Edge = tuple[str, DependingLayer | None, Depend, Target]
"""A dependency: the path of its field, the layer that waits (None: the job), itself, and on what."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What is waited for in other jobs, as it stays until the transaction ends."""

    edges: Sequence[Edge]
    """The dependencies on other jobs. The frames of these jobs cannot end before the transaction does."""
    over: Collection[str]
    """Ids of the jobs, layers and frames among these that are over."""
    begun: Collection[str]
    """Ids of the layers among these of which any frame is over."""


def find_targets(
    connection: Connection,
    asked: Iterable[tuple[str, DependingLayer | None, Depend]],
    done: Collection[FrameState],
    problems: list[str],
) -> Targets:
    """Find what is asked for of other jobs: each with the path of its field and the layer that waits, as `Edge` has
    them. ``done`` are the states of a frame that satisfy; what is not there is added to ``problems``."""
    over: set[str] = set()
    begun: set[str] = set()
    wanted = [(path, layer, depend, depend.job.lower()) for path, layer, depend in asked if depend.job]
    if not wanted:
        return Targets([], over, begun)
    jobs = named_rows.find_rows(connection, named_rows.Kind.JOB, {name for *_, name in wanted})
    # The locks come first: what is read after them stays true until we commit.
    states = submit.hold_jobs(connection, {job.id for job in jobs.values()})
    over |= {job for job, state in states.items() if state == JobState.FINISHED}
    layers: dict[str, dict[str, LayerView]] = defaultdict(dict)
    for row in layers_of(connection, *states):
        layers[row.job_id][row.name] = row
        ended = sum(getattr(row, state.lower()) for state in done)
        if ended:
            begun.add(row.id)
        if 0 < ended == row.total:
            over.add(row.id)
    numbered = [
        layers[jobs[name].id][depend.layer].id
        for _, layer, depend, name in wanted
        if (depend.frame is not None or depend.kind(layer).composite)
        and name in jobs
        and depend.layer in layers[jobs[name].id]
    ]
    frames: dict[str, dict[int, str]] = defaultdict(dict)
    for frame in frames_of(connection, layer_ids=numbered):
        frames[frame.layer_id][frame.number] = frame.id
        if frame.state in done:
            over.add(frame.id)
    edges: list[Edge] = []
    for path, layer, depend, name in wanted:
        try:
            if name not in jobs:
                similar = named_rows.similar_names(connection, named_rows.Kind.JOB, name)
                raise InvalidInput(f"there is no job {name!r}{near(name, similar)}")
            job = jobs[name]
            on = Target(job.id) if depend.layer is None else _on_layer(layer, depend, job, layers[job.id], frames)
            edges.append((path, layer, depend, on))
        except InvalidInput as error:
            problems.append(f"{path}: {error}")
    return Targets(edges, over, begun)


def _on_layer(
    waiting: DependingLayer | None,
    depend: Depend,
    job: named_rows.NamedRow,
    layers: Mapping[str, LayerView],
    frames: Mapping[str, Mapping[int, str]],
) -> Target:
    """A layer, or a frame of it, of another job. Raises InvalidInput when there is none, or nothing to wait for."""
    name = depend.layer or ""
    layer = layers.get(name)
    if layer is None:
        raise InvalidInput(f"job {job.name!r} has no layer {name!r}{near(name, layers)}")
    if depend.frame is not None and depend.frame not in frames[layer.id]:
        raise InvalidInput(f"{depend.frame} is not the number of a frame of layer {name!r} ({layer.range})")
    if waiting is None or not depend.kind(waiting).composite:
        return Target(job.id, layer.id, None, frames[layer.id])
    try:
        chunked = ChunkedRange(FrameRange.parse(layer.range), max(1, layer.chunk_size))
    except InvalidInput as error:
        raise InvalidInput(f"layer {name!r} of job {job.name!r} has no frames to wait for: {error}") from error
    if frame_pairs(depend.kind(waiting), waiting.frames, chunked) == ():
        raise InvalidInput(f"layers {waiting.name!r} and {name!r} of job {job.name!r} have no frame in common")
    return Target(job.id, layer.id, chunked, frames[layer.id])


def new_id() -> str:
    """An id for a row of OpenCue's tables."""
    return str(uuid.uuid4())


class DependRow(NamedTuple):
    """A row of ``depend``: a job, layer or frame that waits for another one."""

    id: str
    type: DependType
    er_layer: str | None
    er_frame: str | None
    on_job: str
    on_layer: str
    on_frame: str | None
    active: bool
    any_frame: bool = False
    parent: str | None = None


class DependRows:
    """Collects the rows of ``depend`` by which one job waits, for one transaction."""

    def __init__(self, layers: Mapping[str, Target]) -> None:
        self.layers = layers
        """The layers of the job by name, as its other layers wait for them."""
        self.rows: list[DependRow] = []
        """The rows collected so far."""
        self.waits_for: Counter[str] = Counter()
        """How many active dependencies each frame has, by frame id."""

    def add(self, layer: DependingLayer | None, depend: Depend, on: Target, over: Collection[str]) -> bool:
        """Have frames of the layer, or (None) of the whole job, wait. Returns whether the dependency is met already, by
        what is ``over``."""
        kind, pairs = depend.kind(layer), None
        waiting = self.layers.values() if layer is None else [self.layers[layer.name]]
        er = None if layer is None else self.layers[layer.name].layer
        if kind.composite and layer is not None and on.range is not None:
            pairs = frame_pairs(kind, layer.frames, on.range)
            # One chunk of several frames on either side makes it a dependency of layer on layer, as in Cuebot.
            kind = DependType.LAYER_ON_LAYER if pairs is None else kind
        if pairs is None:
            frame = None if depend.frame is None else on.frames[depend.frame]
            met = (frame or on.layer or on.job) in over
            any_frame = depend.type == "any_frame"
            self.rows.append(DependRow(new_id(), kind, er, None, on.job, on.layer, frame, not met, any_frame))
            if not met:
                self.waits_for.update(frame_id for rows in waiting for frame_id in rows.frames.values())
            return met
        (own,) = waiting
        found = [(own.frames[number], on.frames[needed]) for number, needed in pairs if needed in on.frames]
        still_open = [(er_frame, frame) for er_frame, frame in found if frame not in over]
        parent = DependRow(new_id(), kind, er, None, on.job, on.layer, None, bool(still_open))
        self.rows.append(parent)
        for er_frame, frame in found:
            sides = er, er_frame, on.job, on.layer, frame
            self.rows.append(
                DependRow(new_id(), DependType.FRAME_ON_FRAME, *sides, active=frame not in over, parent=parent.id)
            )
        self.waits_for.update(er_frame for er_frame, _ in still_open)
        return not still_open
