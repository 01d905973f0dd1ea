"""What a new job waits for, as rows of ``depend`` and as the number of things each of its frames waits for.

As in Cuebot, a dependency frame by frame is a composite row with one FRAME_ON_FRAME row below it for each pair, and one
that is met already goes in inactive. Two fields of a job file may ask for the same pair of frames; it goes in once.
"""

from __future__ import annotations

import hashlib
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from opencue_sched.domain.depends import (
    ChunkedRange,
    DependTarget,
    DependType,
    frame_by_frame,
    previous_frame,
)
from opencue_sched.domain.job_spec import InvalidJobSpec, JobSpec
from opencue_sched.domain.layer_spec import DependSpec, LayerSpec
from opencue_sched.operate.submit_place import Elsewhere, external_depends, is_over
from opencue_sched.store.submit import DependRow
from opencue_sched.store.submit_targets import LayerProgress


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
            for depend in _whole_before_any(layer.spec.depends):
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
            over = is_over(progress.job_states.get(on_job.id, on_job.state))
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
        pairing = frame_by_frame if kind is DependType.FRAME_BY_FRAME else previous_frame
        pairs = pairing(layer.spec.frames, on_range)
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


def _whole_before_any(depends: Iterable[DependSpec]) -> list[DependSpec]:
    """A layer asked for both as a whole and by any frame: the whole counts, and comes first."""
    return sorted(depends, key=lambda depend: depend.any_frame)


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
