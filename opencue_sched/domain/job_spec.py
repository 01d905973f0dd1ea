"""The job file: what ``opencue-sched submit`` takes, checked completely before anything is stored.

The file is a mapping (YAML or JSON)::

    show: demo                     # required; must exist
    shot: sh010                    # required
    user: alice                    # required unless the caller knows who submits
    name: comp_v001                # required; the job is called show-shot-user_name
    uid: 1000                      # the user id frames run under
    priority: 50                   # higher goes first, may be negative; default 1
    facility: local                # default: the facility marked as such
    folder: demo                   # default: the show's root folder
    dept: Unknown                  # default: the folder's
    os: linux                      # default: any
    paused: false
    max_retries: 3
    autoeat: false                 # failed frames count as done
    log_dir: /shots/demo/logs      # absolute; default: below the log root
    min_cores: 1                   # default: the show's; max_cores and max_gpus: 0 or -1 is unlimited
    max_cores: 200
    min_gpus: 0
    max_gpus: -1
    env: {OCIO: /shots/demo/config.ocio}
    depends: [other-job]           # see below
    layers:                        # at least one, in dispatch order
      - name: render               # required, unique in the job
        command: 'render #FRAME#'  # required; tokens as in OpenCue
        range: 1-100x2             # required
        type: render               # render (default), pre or util
        chunk: 1                   # frame numbers one frame renders
        cores: 4                   # may be a fraction; 0: the whole host; -1: all but one core
        max_cores: 8               # the most one frame takes; 0: no limit
        threadable: true           # false: exactly one core
        memory: 4GiB               # or a number of KB
        gpus: 0
        gpu_memory: 0
        tags: [general]            # or general|gpu; a frame runs on hosts with any of them
        services: [default]
        limits: [arnold]
        timeout: 90                # minutes; 0: none
        timeout_llu: 15            # minutes without a line in the log; 0: none
        env: {THREADS: "4"}
        depends: [comp]

A layer's ``depends`` entries are the name of a layer that must finish first, or a mapping with ``layer`` and
optionally ``type`` (``layer``, ``any_frame``, ``frame_by_frame``, ``previous_frame``) or ``frame`` (one number). With
``job``, the full name of another job, they mean that job or its layers. A job's entries name a job, or are a mapping
with ``job`` and optionally ``layer`` and ``frame``.

Tags with spaces are refused rather than collapsed: OpenCue would compare ``big mem`` as ``bigmem`` without saying so.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opencue_sched.domain.cluster import join_tags
from opencue_sched.domain.command import RESERVED_VARIABLES, command_problems
from opencue_sched.domain.depends import (
    ChunkedRange,
    DependType,
    LayerEdge,
    frame_by_frame,
    previous_frame,
    waiting_circle,
)
from opencue_sched.domain.exit_rules import MEMORY_FLOOR_KB
from opencue_sched.domain.frame_range import FrameRange
from opencue_sched.domain.units import (
    CENTICORES_PER_CORE,
    DEPT_NAME_WIDTH,
    ENVIRONMENT_WIDTH,
    FACILITY_NAME_WIDTH,
    FOLDER_NAME_WIDTH,
    FRAME_NAME_WIDTH,
    HOST_TAG_WIDTH,
    JOB_NAME_WIDTH,
    JOB_OS_WIDTH,
    LAYER_NAME_WIDTH,
    LAYER_RANGE_WIDTH,
    LAYER_SERVICES_WIDTH,
    LAYER_TAGS_WIDTH,
    LIMIT_NAME_WIDTH,
    LOG_DIR_WIDTH,
    SHOT_NAME_WIDTH,
    SHOW_NAME_WIDTH,
    UNLIMITED,
    USER_NAME_WIDTH,
    booked_cores,
    frame_name,
)
from opencue_sched.errors import InvalidInput

# Reading a mapping that a person wrote, key by key, noting every problem instead of stopping at the first.

_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT])(?:i?B)?\s*$", re.IGNORECASE)
_KB_PER_UNIT = {"K": 1, "M": 1024, "G": 1024**2, "T": 1024**3}
INT_MAX = 2**31 - 1
"""The most OpenCue's integer columns hold."""

_MOST_KB = 2**40
_NAME = re.compile(r"(?!\.+\Z)[A-Za-z0-9_.-]+\Z")
_VARIABLE = re.compile(r"[^\s=\x00-\x1f]+\Z")
_LONGEST = 500
"""Characters of a path, and of what is said of it: a value may have millions."""
_LINE_OR_TAB = re.compile(r"[\t\n\r]")
NAME_CHARACTERS = "letters, digits, '_', '-' and '.'"


def near(word: str, words: Iterable[str]) -> str:
    """``; did you mean x?`` for a mistyped word, or nothing."""
    close = difflib.get_close_matches(word[:64], list(words), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def size_kb(text: str) -> int | None:
    """A size such as ``512MiB``, ``2G`` or ``1.5GB`` in KB, or None. All units are powers of 1024."""
    match = _SIZE.match(text)
    return None if match is None else round(float(match.group(1)) * _KB_PER_UNIT[match.group(2).upper()])


class Fields:
    """One mapping. Every method reads one key; a wrong value is noted as ``path.key: problem`` and replaced by the
    default, so that reading goes on. Keys nobody has asked for when :meth:`refuse_unknown` is called are noted too."""

    def __init__(self, data: object, path: str, problems: list[str]) -> None:
        self.path = path
        self.problems = problems
        self._asked: list[str] = []
        self._data: Mapping[Any, Any] = data if isinstance(data, Mapping) else {}
        self._readable = isinstance(data, Mapping)
        if not self._readable:
            problems.append(f"{path or 'job file'}: expected a mapping of keys, found {_kind(data)}")

    def at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def wrong(self, key: str, problem: str) -> None:
        self.problems.append(f"{self.at(key)[:_LONGEST]}: {problem[:_LONGEST]}")

    def given(self, key: str) -> Any:
        """The raw value; None when the key is absent or empty."""
        self._asked.append(key)
        return self._data.get(key)

    def has(self, key: str) -> bool:
        return self._data.get(key) is not None

    def refuse_unknown(self) -> None:
        for key in self._data:
            if key not in self._asked:
                self.wrong(str(key), f"unknown key{near(str(key), self._asked)}")

    def text(
        self, key: str, *, width: int, default: str | None = None, required: bool = False, lines: bool = False
    ) -> str | None:
        """Text of at most ``width`` characters, the most its column holds, on one line unless it may have ``lines``.
        Whole numbers are taken as text."""
        value = self.given(key)
        if value is None:
            if required and default is None and self._readable:
                self.wrong(key, "is missing" if key not in self._data else "is empty")
            return default
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str):
            self.wrong(key, f"expected text, found {_kind(value)}")
            return default
        value = value.strip()
        if not value:
            self.wrong(key, "is empty")
        elif "\0" in value:
            self.wrong(key, "contains a NUL character")
        elif not lines and _LINE_OR_TAB.search(value):
            self.wrong(key, "contains a line break or a tab")
        elif len(value) > width:
            self.wrong(key, f"has {len(value)} characters; {width} is the most OpenCue stores")
        else:
            return value
        return default

    def name(self, key: str, *, width: int, default: str | None = None, required: bool = False) -> str | None:
        """A name, which ends up in paths and commands: letters, digits, ``_``, ``-`` and ``.`` only."""
        value = self.text(key, width=width, default=default, required=required)
        if value is not None and not _NAME.match(value):
            self.wrong(key, f"{value!r} may contain only {NAME_CHARACTERS}")
            return None
        return value

    def integer(self, key: str, *, default: int, least: int, most: int = INT_MAX) -> int:
        value = self.optional_integer(key, least=least, most=most)
        return default if value is None else value

    def optional_integer(self, key: str, *, least: int, most: int = INT_MAX) -> int | None:
        value = self.given(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            self.wrong(key, f"expected a whole number, found {_kind(value)}")
        elif not least <= value <= most:
            self.wrong(key, f"{value} is not between {least} and {most}")
        else:
            return value
        return None

    def centicores(self, key: str, *, default: int) -> int:
        value = self.optional_centicores(key)
        return default if value is None else value

    def optional_centicores(self, key: str) -> int | None:
        """Cores, as a number that may have a fraction, in centicores."""
        value = self.given(key)
        if value is None:
            return None
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            self.wrong(key, f"expected a number of cores, found {_kind(value)}")
        elif abs(value) > INT_MAX / CENTICORES_PER_CORE or not math.isfinite(value):
            self.wrong(key, f"{value} is not a number of cores")
        elif value != 0 and round(value * CENTICORES_PER_CORE) == 0:
            self.wrong(key, f"{value} is less than a hundredth of a core, the least OpenCue counts")
        else:
            return round(value * CENTICORES_PER_CORE)
        return None

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.given(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.wrong(key, f"expected true or false, found {_kind(value)}")
            return default
        return value

    def memory_kb(self, key: str, *, default: int, least: int) -> int:
        """A size with a unit (``2GiB``), or a whole number of KB."""
        value = self.given(key)
        if value is None:
            return default
        size = value if isinstance(value, int) and not isinstance(value, bool) else None
        if isinstance(value, str):
            size = size_kb(value)
        if size is None:
            self.wrong(key, f"{value!r} is not a size; write 512MiB, 2GiB or a number of KB")
        elif size < least:
            self.wrong(key, f"{value!r} is {size} KB; {least} KB is the least (units: 512MiB, 2GiB)")
        elif size > _MOST_KB:
            self.wrong(key, f"{value!r} is more than any host has")
        else:
            return size
        return default

    def items(self, key: str) -> list[tuple[str, Any]]:
        """The entries of a list, each with its path. One entry may stand without a list."""
        value = self.given(key)
        if value is None:
            return []
        entries = value if isinstance(value, (list, tuple)) else [value]
        return [(f"{self.at(key)}[{position}]", entry) for position, entry in enumerate(entries)]

    def words(self, key: str, *, separators: str, default: tuple[str, ...], width: int) -> tuple[str, ...]:
        """Names in a list, or in one text separated by any of ``separators``; without repeats, in order."""
        value = self.given(key)
        if value is None:
            return default
        entries = re.split(f"[{re.escape(separators)}]", value) if isinstance(value, str) else value
        if not isinstance(entries, (list, tuple)):
            entries = [entries]
        words: dict[str, None] = {}
        for entry in entries:
            word = str(entry).strip() if isinstance(entry, (str, int)) and not isinstance(entry, bool) else None
            if word is None:
                self.wrong(key, f"expected names, found {_kind(entry)}")
            elif not word:
                continue
            elif " " in word:
                self.wrong(key, f"{word!r} contains a space, which OpenCue ignores; write {word.replace(' ', '')!r}")
            elif not _NAME.match(word):
                self.wrong(key, f"{word!r} may contain only {NAME_CHARACTERS}")
            elif len(word) > width:
                self.wrong(key, f"{word!r} has {len(word)} characters; {width} is the most OpenCue stores")
            else:
                words[word] = None
        return tuple(words)

    def environment(self, key: str) -> dict[str, str]:
        """Variables and their values; numbers are taken as text."""
        value = self.given(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.wrong(key, f"expected a mapping of variables, found {_kind(value)}")
            return {}
        variables = {}
        for name, word in value.items():
            problem = _variable_problem(name, word)
            if problem:
                self.wrong(f"{key}.{name}", problem)
            else:
                variables[str(name)] = str(word)
        return variables


def _variable_problem(name: object, value: object) -> str | None:
    if not isinstance(name, str) or not _VARIABLE.match(name):
        return "is not the name of a variable; it has no spaces and no '='"
    if name in RESERVED_VARIABLES:
        return "is set by the scheduler; use another name"
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return f"expected text, found {_kind(value)}; put the value in quotes"
    if "\0" in str(value):
        return "contains a NUL character"
    longest = max(len(name), len(str(value)))
    if longest > ENVIRONMENT_WIDTH:
        return f"has {longest} characters; {ENVIRONMENT_WIDTH} is the most OpenCue stores"
    return None


def _kind(value: object) -> str:
    kinds = {type(None): "nothing", bool: "true or false", str: "text", list: "a list", dict: "a mapping"}
    kinds |= {int: "a whole number", float: "a number"}
    return kinds.get(type(value), type(value).__name__)


# The layers of a job file and what they wait for.

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


MAX_LAYERS = 2000
"""Layers a job may have, as in OpenCue."""

MAX_FRAMES = 100_000
"""Frames a job may have, as in OpenCue."""

_ABSOLUTE_PATH = re.compile(r"^(/|\\\\|[A-Za-z]:[\\/])")


class InvalidJobSpec(InvalidInput):
    """A job file with problems; ``problems`` are sentences that start with the path of the field."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job file that has been checked. None: what the show, folder or facility says.

    Caps are centicores and GPUs as the database holds them; unlimited is -1.
    """

    show: str
    shot: str
    user: str
    name: str
    layers: tuple[LayerSpec, ...]
    depends: tuple[DependSpec, ...]
    environment: Mapping[str, str]
    uid: int | None
    priority: int
    facility: str | None
    folder: str | None
    dept: str | None
    os: str | None
    paused: bool
    max_retries: int
    autoeat: bool
    log_dir: str | None
    min_cores_centicores: int | None
    max_cores_centicores: int | None
    min_gpus: int | None
    max_gpus: int | None

    @property
    def full_name(self) -> str:
        """``job.str_name`` as OpenCue builds it: ``show-shot-user_name``, in lower case."""
        return _full_name(self.show, self.shot, self.user, self.name)

    @property
    def frame_count(self) -> int:
        return sum(len(layer.frame_numbers) for layer in self.layers)

    @classmethod
    def parse(cls, data: object, *, default_user: str | None = None) -> JobSpec:
        """Reads a job file that YAML or JSON has made a mapping of. Raises InvalidJobSpec with every problem in it."""
        problems: list[str] = []
        spec = _read_job(Fields(data, "", problems), default_user)
        if spec.layers:
            _check_together(spec, problems)
        if problems:
            raise InvalidJobSpec(problems)
        return spec


def _full_name(show: str, shot: str, user: str, name: str) -> str:
    prefix = f"{show}-{shot}-{user}_"
    return (name if name.startswith(prefix) else prefix + name).lower()


def _uid(fields: Fields) -> int | None:
    uid = fields.optional_integer("uid", least=0)
    if uid == 0:
        fields.wrong("uid", "0 is root, as whom RQD runs nothing; leave it out or name a user's")
    return uid


def _read_job(fields: Fields, default_user: str | None) -> JobSpec:
    problems = fields.problems
    depends = [read_job_depend(entry, path, problems) for path, entry in fields.items("depends")]
    min_cores, max_cores = fields.optional_centicores("min_cores"), _core_cap(fields)
    min_gpus, max_gpus = fields.optional_integer("min_gpus", least=0), _gpu_cap(fields)
    spec = JobSpec(
        show=fields.name("show", width=SHOW_NAME_WIDTH, required=True) or "",
        shot=fields.name("shot", width=SHOT_NAME_WIDTH, required=True) or "",
        user=fields.name("user", width=USER_NAME_WIDTH, default=default_user, required=True) or "",
        name=fields.name("name", width=JOB_NAME_WIDTH, required=True) or "",
        layers=_read_layers(fields),
        depends=tuple(dict.fromkeys(filter(None, depends))),
        environment=fields.environment("env"),
        uid=_uid(fields),
        priority=fields.integer("priority", default=1, least=-INT_MAX),
        facility=fields.text("facility", width=FACILITY_NAME_WIDTH),
        folder=fields.text("folder", width=FOLDER_NAME_WIDTH),
        dept=fields.text("dept", width=DEPT_NAME_WIDTH),
        os=fields.name("os", width=JOB_OS_WIDTH),
        paused=fields.flag("paused", default=False),
        max_retries=fields.integer("max_retries", default=3, least=0, most=2**15 - 1),
        autoeat=fields.flag("autoeat", default=False),
        log_dir=_log_dir(fields),
        min_cores_centicores=min_cores,
        max_cores_centicores=max_cores,
        min_gpus=min_gpus,
        max_gpus=max_gpus,
    )
    if min_cores is not None and min_cores < 0:
        fields.wrong("min_cores", "may not be negative")
    if min_cores is not None and max_cores is not None and 0 < max_cores < min_cores:
        fields.wrong("max_cores", "is less than min_cores")
    if min_gpus is not None and max_gpus is not None and 0 < max_gpus < min_gpus:
        fields.wrong("max_gpus", "is less than min_gpus")
    fields.refuse_unknown()
    return spec


def _core_cap(fields: Fields) -> int | None:
    cap = fields.optional_centicores("max_cores")
    if cap is None or cap >= CENTICORES_PER_CORE:
        return cap
    if cap > 0:
        fields.wrong("max_cores", "is less than one core, so no frame could ever run; 0 or -1 is unlimited")
    return UNLIMITED


def _gpu_cap(fields: Fields) -> int | None:
    cap = fields.optional_integer("max_gpus", least=-INT_MAX)
    return UNLIMITED if cap is not None and cap <= 0 else cap


def _log_dir(fields: Fields) -> str | None:
    log_dir = fields.text("log_dir", width=LOG_DIR_WIDTH)
    if log_dir is not None and not _ABSOLUTE_PATH.match(log_dir):
        fields.wrong("log_dir", f"{log_dir!r} is not an absolute path; RQD writes there from any directory")
    return log_dir


def _read_layers(fields: Fields) -> tuple[LayerSpec, ...]:
    if isinstance(fields.given("layers"), Mapping):
        fields.wrong("layers", "expected a list of layers, found a mapping")
        return ()
    entries = fields.items("layers")
    if not entries:
        fields.wrong("layers", "a job needs at least one layer")
    elif len(entries) > MAX_LAYERS:
        fields.wrong("layers", f"has {len(entries)} layers; {MAX_LAYERS} is the most a job may have")
        return ()
    return tuple(read_layer(entry, path, fields.problems) for path, entry in entries)


def _check_together(spec: JobSpec, problems: list[str]) -> None:
    """What only shows when the job is seen as a whole. Fields that did not read are empty and left out."""
    for name, times in Counter(layer.name for layer in spec.layers if layer.name).items():
        if times > 1:
            problems.append(f"layers: {times} layers are called {name!r}; a layer's name must be unique in its job")
    if spec.frame_count > MAX_FRAMES:
        problems.append(f"layers: the job has {spec.frame_count} frames; {MAX_FRAMES} is the most it may have")
    if spec.name and len(spec.full_name) > JOB_NAME_WIDTH:
        problems.append(
            f"name: the job's full name {spec.full_name[:40]!r}... has {len(spec.full_name)} characters; "
            f"{JOB_NAME_WIDTH} is the most OpenCue stores"
        )
    for position, layer in enumerate(spec.layers):
        _check_caps(spec, layer, f"layers[{position}]", problems)
    everything = [("depends", spec.depends)]
    everything += [(f"layers[{position}].depends", layer.depends) for position, layer in enumerate(spec.layers)]
    for path, depends in everything:
        if any(depend.on_job is not None and depend.on_job.lower() == spec.full_name for depend in depends):
            problems.append(f"{path}: names this job; leave 'job' out to depend on a layer of it")
    check_layer_depends(spec.layers, problems)


def _check_caps(spec: JobSpec, layer: LayerSpec, path: str, problems: list[str]) -> None:
    cores, gpus = spec.max_cores_centicores, spec.max_gpus
    if cores is not None and 0 < cores // CENTICORES_PER_CORE < layer.least_cores:
        problems.append(
            f"{path}.cores: a frame takes at least {layer.least_cores} cores, more than the job's max_cores "
            f"({cores / CENTICORES_PER_CORE:g}); no frame could ever run"
        )
    if gpus is not None and 0 < gpus < layer.gpus:
        problems.append(f"{path}.gpus: {layer.gpus} is more than the job's max_gpus ({gpus}); no frame could ever run")
