"""The layers of a job file and what they wait for; the format is described in domain.job_spec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opencue_sched.domain.command import command_problems
from opencue_sched.domain.depends import (
    ChunkedRange,
    DependType,
    LayerEdge,
    frame_by_frame,
    previous_frame,
    waiting_circle,
)
from opencue_sched.domain.errors import InvalidInput
from opencue_sched.domain.exit_decision import MEMORY_FLOOR_KB
from opencue_sched.domain.frame_range import FrameRange
from opencue_sched.domain.names import (
    FRAME_NAME_WIDTH,
    HOST_TAG_WIDTH,
    JOB_NAME_WIDTH,
    LAYER_NAME_WIDTH,
    LAYER_RANGE_WIDTH,
    LAYER_SERVICES_WIDTH,
    LAYER_TAGS_WIDTH,
    LIMIT_NAME_WIDTH,
    frame_name,
)
from opencue_sched.domain.spec_fields import INT_MAX, Fields, near
from opencue_sched.domain.tags import join_tags
from opencue_sched.domain.units import CENTICORES_PER_CORE, booked_cores

DEFAULT_MEMORY_KB = 4_194_304
DEFAULT_TAGS = ("general",)
DEFAULT_SERVICES = ("default",)
LAYER_TYPES = ("render", "pre", "util")

_NO_FRAMES = FrameRange("", ())
_LAYER_DEPENDS = {
    "layer": DependType.LAYER_ON_LAYER,
    "any_frame": DependType.LAYER_ON_LAYER,
    "frame_by_frame": DependType.FRAME_BY_FRAME,
    "previous_frame": DependType.PREVIOUS_FRAME,
}


@dataclass(frozen=True, slots=True)
class DependSpec:
    """What a layer, or the job, waits for. ``on_job`` is another job's full name; None is the job itself.

    ``any_frame``: one frame of the layer is enough (depend.b_any).
    """

    type: DependType
    on_job: str | None = None
    on_layer: str | None = None
    on_frame: int | None = None
    any_frame: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer, checked. Cores in centicores with OpenCue's meaning of 0 and negative values, memory in KB."""

    name: str
    type: str
    command: str
    frame_range: FrameRange
    chunk_size: int
    cores_min_centicores: int
    cores_max_centicores: int
    threadable: bool
    memory_kb: int
    gpus: int
    gpu_memory_kb: int
    tags: tuple[str, ...]
    services: tuple[str, ...]
    limits: tuple[str, ...]
    timeout_minutes: int
    timeout_llu_minutes: int
    environment: Mapping[str, str]
    depends: tuple[DependSpec, ...]

    @property
    def frame_numbers(self) -> tuple[int, ...]:
        """The numbers of the layer's frames, in dispatch order."""
        return self.frames.numbers

    @property
    def frames(self) -> ChunkedRange:
        return ChunkedRange(self.frame_range, self.chunk_size)

    @property
    def least_cores(self) -> int:
        """The whole cores every frame takes at least, on any host."""
        if not self.threadable or self.cores_min_centicores <= 0:
            return 1
        return booked_cores(self.cores_min_centicores)


def read_layer(data: object, path: str, problems: list[str]) -> LayerSpec:
    """One entry of ``layers``. Fields that do not read are noted and left empty."""
    fields = Fields(data, path, problems)
    cores = fields.centicores("cores", default=CENTICORES_PER_CORE)
    depends = [read_layer_depend(entry, at, problems) for at, entry in fields.items("depends")]
    layer = LayerSpec(
        name=fields.name("name", width=LAYER_NAME_WIDTH, required=True) or "",
        type=_type(fields),
        command=_command(fields),
        frame_range=_range(fields),
        chunk_size=fields.integer("chunk", default=1, least=1),
        cores_min_centicores=cores,
        cores_max_centicores=_most_cores(fields, cores),
        threadable=_threadable(fields, cores),
        memory_kb=fields.memory_kb("memory", default=DEFAULT_MEMORY_KB, least=MEMORY_FLOOR_KB),
        gpus=fields.integer("gpus", default=0, least=0),
        gpu_memory_kb=fields.memory_kb("gpu_memory", default=0, least=0),
        tags=_tags(fields),
        services=_services(fields),
        limits=fields.words("limits", separators=",", default=(), width=LIMIT_NAME_WIDTH),
        timeout_minutes=fields.integer("timeout", default=0, least=0),
        timeout_llu_minutes=fields.integer("timeout_llu", default=0, least=0),
        environment=fields.environment("env"),
        depends=tuple(dict.fromkeys(filter(None, depends))),
    )
    fields.refuse_unknown()
    numbers = layer.frame_range.numbers
    if numbers and layer.name:
        width = max(len(frame_name(number, layer.name)) for number in (min(numbers), max(numbers)))
        if width > FRAME_NAME_WIDTH:
            fields.wrong("name", f"makes frame names of {width} characters; OpenCue stores {FRAME_NAME_WIDTH} at most")
    return layer


def read_layer_depend(entry: object, path: str, problems: list[str]) -> DependSpec | None:
    """One entry of a layer's ``depends``; a bare name is a layer of the same job."""
    before = len(problems)
    fields = Fields({"layer": entry} if isinstance(entry, str) else entry, path, problems)
    job, layer, frame = _target(fields)
    kind = fields.text("type", width=64)
    fields.refuse_unknown()
    if kind is not None and (layer is None or frame is not None):
        fields.wrong("type", "goes with a layer, not with a job alone or with a frame")
    elif kind is not None and kind not in _LAYER_DEPENDS:
        fields.wrong("type", f"{kind!r} is not one of {', '.join(_LAYER_DEPENDS)}{near(kind, _LAYER_DEPENDS)}")
    elif job is None and layer is None and len(problems) == before:
        problems.append(f"{path}: names neither a layer nor a job")
    if len(problems) > before:
        return None
    if frame is not None:
        return DependSpec(DependType.LAYER_ON_FRAME, job, layer, frame)
    if layer is None:
        return DependSpec(DependType.LAYER_ON_JOB, job)
    return DependSpec(_LAYER_DEPENDS[kind or "layer"], job, layer, any_frame=kind == "any_frame")


def read_job_depend(entry: object, path: str, problems: list[str]) -> DependSpec | None:
    """One entry of a job's ``depends``; a bare name is another job."""
    before = len(problems)
    fields = Fields({"job": entry} if isinstance(entry, str) else entry, path, problems)
    job, layer, frame = _target(fields)
    fields.refuse_unknown()
    if job is None and len(problems) == before:
        problems.append(f"{path}: names no job")
    if len(problems) > before:
        return None
    if frame is not None:
        return DependSpec(DependType.JOB_ON_FRAME, job, layer, frame)
    return DependSpec(DependType.JOB_ON_JOB if layer is None else DependType.JOB_ON_LAYER, job, layer)


def check_layer_depends(layers: Sequence[LayerSpec], problems: list[str]) -> None:
    """Whether the layers that layers of the same job wait for are there, and none waits for itself in the end."""
    by_name = {layer.name: layer for layer in layers if layer.name}
    edges: list[LayerEdge] = []
    for position, layer in enumerate(layers):
        for number, depend in enumerate(layer.depends):
            if depend.on_job is not None or depend.on_layer is None:
                continue
            path = f"layers[{position}].depends[{number}]"
            on = by_name.get(depend.on_layer)
            if on is None:
                others = [name for name in by_name if name != layer.name]
                problems.append(f"{path}: the job has no layer {depend.on_layer!r}{near(depend.on_layer, others)}")
                continue
            problem = _mismatch(layer, on, depend)
            if problem is not None:
                problems.append(f"{path}: {problem}")
            edges.append(LayerEdge(layer.name, on.name, depend.type))
    circle = waiting_circle(edges)
    if circle:
        problems.append(f"layers: wait for one another for ever: {' -> '.join(circle)}")


def _mismatch(layer: LayerSpec, on: LayerSpec, depend: DependSpec) -> str | None:
    """Why a depend between two layers would hold nothing back."""
    if not layer.frame_range.numbers or not on.frame_range.numbers:
        return None
    if depend.on_frame is not None and depend.on_frame not in on.frame_numbers:
        return f"{depend.on_frame} is not the number of a frame of layer {on.name!r} ({on.frame_range.text})"
    if depend.type is DependType.FRAME_BY_FRAME and frame_by_frame(layer.frames, on.frames) == ():
        return f"layers {layer.name!r} and {on.name!r} have no frame in common"
    if depend.type is DependType.PREVIOUS_FRAME and not previous_frame(layer.frames, on.frames):
        return f"no frame of {layer.name!r} has a frame before it in {on.name!r}"
    return None


def _target(fields: Fields) -> tuple[str | None, str | None, int | None]:
    job = fields.name("job", width=JOB_NAME_WIDTH)
    layer = fields.name("layer", width=LAYER_NAME_WIDTH)
    frame = fields.optional_integer("frame", least=-INT_MAX)
    if frame is not None and layer is None:
        fields.wrong("frame", "needs the layer it belongs to")
    return job, layer, frame


def _type(fields: Fields) -> str:
    """``layer.str_type``. Post layers belong to a job of their own in OpenCue, which only Cuebot makes."""
    kind = (fields.text("type", width=16) or "render").lower()
    if kind == "post":
        fields.wrong("type", "post layers are not supported; use a util layer that depends on the others")
    elif kind not in LAYER_TYPES:
        fields.wrong("type", f"{kind!r} is not one of {', '.join(LAYER_TYPES)}{near(kind, LAYER_TYPES)}")
    return kind.upper()


def _command(fields: Fields) -> str:
    command: Any = fields.text("command", width=INT_MAX, required=True, lines=True)
    if command is None:
        return ""
    for problem in command_problems(command):
        fields.wrong("command", problem)
    return str(command)


def _range(fields: Fields) -> FrameRange:
    text = fields.text("range", width=LAYER_RANGE_WIDTH, required=True)
    if text is None:
        return _NO_FRAMES
    try:
        return FrameRange.parse(text)
    except InvalidInput as error:
        fields.wrong("range", str(error))
        return _NO_FRAMES


def _most_cores(fields: Fields, cores: int) -> int:
    most = fields.centicores("max_cores", default=0)
    if most < 0:
        fields.wrong("max_cores", "may not be negative; 0 is no limit")
    elif 0 < most < cores:
        fields.wrong("max_cores", "is less than cores")
    return most


def _threadable(fields: Fields, cores: int) -> bool:
    """As in Cuebot, less than one core does not thread."""
    below_one_core = 0 < cores < CENTICORES_PER_CORE
    if below_one_core and fields.given("threadable") is True:
        fields.wrong("threadable", "a layer of less than one core cannot thread")
    return fields.flag("threadable", default=not below_one_core)


def _tags(fields: Fields) -> tuple[str, ...]:
    before = len(fields.problems)
    tags = fields.words("tags", separators="|,", default=DEFAULT_TAGS, width=HOST_TAG_WIDTH)
    if not tags and len(fields.problems) == before:
        fields.wrong("tags", "a layer without tags runs on no host; leave the key out for 'general'")
    if len(join_tags(tags)) > LAYER_TAGS_WIDTH:
        fields.wrong("tags", f"need {len(join_tags(tags))} characters; {LAYER_TAGS_WIDTH} is the most OpenCue stores")
    return tags


def _services(fields: Fields) -> tuple[str, ...]:
    services = fields.words("services", separators=",|", default=DEFAULT_SERVICES, width=LAYER_SERVICES_WIDTH)
    joined = len(",".join(services))
    if joined > LAYER_SERVICES_WIDTH:
        fields.wrong("services", f"need {joined} characters; {LAYER_SERVICES_WIDTH} is the most OpenCue stores")
    return services or DEFAULT_SERVICES
