"""The job file that ``opencue-sched submit`` takes (docs/job-file.md), checked completely before anything is stored.

The keys of a file are the fields of the models, and most are the columns that store.submit writes. A field that is left
empty counts as left out. Cores become centicores and sizes KB.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    StringConstraints,
    ValidationError,
    model_validator,
)

from opencue_sched.domain import names, units
from opencue_sched.domain.clusters import join_tags
from opencue_sched.domain.depends import ChunkedRange, DependType, frame_pairs, waiting_circle
from opencue_sched.domain.frame_command import RESERVED_VARIABLES, TOKENS, log_path, unknown_tokens
from opencue_sched.domain.frame_range import FrameRange
from opencue_sched.domain.jobs import MEMORY_FLOOR_KB
from opencue_sched.domain.moments import moment_of
from opencue_sched.domain.names import near
from opencue_sched.domain.units import CENTICORES_PER_CORE, INT_MAX, UNLIMITED, booked_cores
from opencue_sched.text_file import InvalidFile, WrittenNumber

MAX_LAYERS = 2000
"""Layers a job may have, as in OpenCue."""
MAX_FRAMES = 100_000
"""Frames a job may have, as in OpenCue."""

_SIZE = re.compile(r"^\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([KMGT])(?:i?B)?\s*$", re.IGNORECASE)
_KB_PER_UNIT = {"K": 1, "M": 1024, "G": 1024**2, "T": 1024**3}
_VARIABLE = re.compile(r"[^\s=\x00-\x1f\x7f-\x9f]+\Z")
_ABSOLUTE_PATH = re.compile(r"(/|\\\\|[A-Za-z]:[\\/])[^\x00-\x1f\x7f-\x9f]*\Z")
_SEPARATORS = re.compile(r"[/\\]")
_SHELL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_JOB_NAME_WIDTH = 255
"""Width of the column of job names."""
_LONGEST_TEXT = 4000
"""Width of the columns of commands, ranges, tags and log directories."""
_LONGEST_FILE_NAME_BYTES = 255
"""The longest name of a file or directory that file systems take."""
_JOB_ID_CHARACTERS = 36
"""Characters of a job's id, which its log directory has in its name."""
_EARLIER_RUN = ".999"
"""RQD gives the log of an earlier run of a frame its number."""
_LONGEST = 500
"""Characters of a path, and of what is said of it: a value may have millions."""
_SAID = {"extra_forbidden": "unknown key", "model_type": "expected a mapping of keys", "missing": "is missing"}


# What the values of keys may be. Numbers are numbers and texts are texts, but a whole number may stand for a text. The
# lengths are the widths of OpenCue's columns.


def _text(value: Any) -> Any:
    """A whole number as the text that it may stand for; any other value as it is."""
    return str(value) if type(value) is int else value


def _name(value: str) -> str:
    if not names.NAME.match(value):
        raise ValueError(f"{value!r} may contain only {names.NAME_CHARACTERS}")
    return value


def _listed(value: Any) -> Any:
    """One entry may stand without a list."""
    return value if isinstance(value, list) else [value]


def _depends_by(key: str) -> BeforeValidator:
    """A text alone stands for this key."""
    return BeforeValidator(
        lambda value: [{key: entry} if isinstance(entry, str) else entry for entry in _listed(value)]
    )


def _words(value: Any) -> Any:
    """Names in a list, or in one text between commas or bars."""
    words = re.split("[,|]", value) if isinstance(value, str) else _listed(value)
    return [word for word in words if not isinstance(word, str) or word.strip()]


def _stored(join: Callable[[list[str]], str], most: int) -> AfterValidator:
    """A check that the words, joined as they are stored, take no more than ``most`` characters."""

    def check(words: list[str]) -> list[str]:
        if (needed := len(join(words))) > most:
            raise ValueError(f"need {needed} characters; {most} is the most OpenCue stores")
        return words

    return AfterValidator(check)


def _centicores(value: Any) -> int:
    """Cores, as a number that may have a fraction, in centicores."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("expected a number of cores")
    return units.centicores_of(value)


def _core_cap(centicores: int) -> int:
    """A cap in centicores; 0 and less become UNLIMITED. Raises ValueError for less than one core."""
    if 0 < centicores < CENTICORES_PER_CORE:
        raise ValueError("is less than one core, so no frame could ever run; 0 or -1 is unlimited")
    return centicores if centicores > 0 else UNLIMITED


def _size_kb(value: Any) -> Any:
    """A size such as ``512MiB``, ``2G`` or ``1.5GB`` in KB; a whole number is KB. All units are powers of 1024."""
    if type(value) is int:
        return value
    if not isinstance(value, str):  # nor is it shown: aliases may make a list without end of it
        raise ValueError("expected a size, such as 512MiB, or a number of KB")
    match = _SIZE.match(value)
    if match is None:
        raise ValueError(f"{value!r} is not a size; write 512MiB, 2GiB or a number of KB")
    return round(float(match.group(1)) * _KB_PER_UNIT[match.group(2).upper()])


def _printable(value: str) -> str:
    if odd := _CONTROL.search(value):
        raise ValueError(f"has the character U+{ord(odd[0]):04X}")
    return value


def _command(command: str) -> str:
    """A command whose tokens are all known and whose characters can be printed. Raises ValueError."""
    if unknown := unknown_tokens(command):
        raise ValueError(", ".join(f"uses the unknown token {token}{near(token.upper(), TOKENS)}" for token in unknown))
    return _printable(command)


def _range(value: Any) -> FrameRange:
    """A frame range from a text or a whole number. Raises ValueError."""
    text = _text(value)
    if not isinstance(text, str) or len(text) > _LONGEST_TEXT:
        raise ValueError(f"expected a frame range of at most {_LONGEST_TEXT} characters")
    return FrameRange.parse(text)


def _variable(name: str) -> str:
    """The name of a variable that a job may set. Raises ValueError."""
    if not _VARIABLE.match(name):
        raise ValueError("is not the name of a variable; it has no spaces and no '='")
    if name in RESERVED_VARIABLES:
        raise ValueError("is set by the scheduler; use another name")
    return name


def _absolute(path: str) -> str:
    """A path that is absolute on Linux or Windows, without '..', of names that a file system takes. Raises
    ValueError."""
    if not _ABSOLUTE_PATH.match(path):
        raise ValueError(f"{path!r} is not an absolute path; RQD writes there from any directory")
    directories = _SEPARATORS.split(path)
    if ".." in directories:
        raise ValueError(f"{path!r} has '..' in it")
    longest = max(len(directory.encode()) for directory in directories)
    if longest > _LONGEST_FILE_NAME_BYTES:
        raise ValueError(f"one of its directories has {_name_of(longest)}")
    return path


def _name_of(length: int) -> str:
    return f"a name of {length} bytes; {_LONGEST_FILE_NAME_BYTES} is the most a file system takes"


def _moment(value: Any) -> datetime:
    """The moment that a text names, as of now, in local time unless it says another. Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError("expected a moment, such as 2026-12-24 18:00")
    return moment_of(value, datetime.now().astimezone())


_AS_TEXT = BeforeValidator(_text)
_NAME = AfterValidator(_name)
_WORDS = BeforeValidator(_words)
_ONCE = AfterValidator(lambda words: list(dict.fromkeys(words)))
_JobName = Annotated[str, Field(max_length=_JOB_NAME_WIDTH), _AS_TEXT, _NAME]
# With the number before it, it makes the name of a frame, which may have 256 characters.
_LayerName = Annotated[str, Field(max_length=244), _AS_TEXT, _NAME]
_Tag = Annotated[str, Field(max_length=45), _AS_TEXT, _NAME]
_Tags = Annotated[list[_Tag], Field(min_length=1), _WORDS, _ONCE, _stored(join_tags, _LONGEST_TEXT)]
_Limit = Annotated[str, Field(max_length=255), _AS_TEXT, _NAME]
_Int = Annotated[int, Field(ge=-INT_MAX, le=INT_MAX)]
_Count = Annotated[int, Field(ge=0, le=INT_MAX)]
_Centicores = Annotated[int, BeforeValidator(_centicores)]
_RAW = StringConstraints(strip_whitespace=False, min_length=0, max_length=2048)
_Variable = Annotated[str, _RAW, AfterValidator(_variable)]
_NUMBER_AS_TEXT = BeforeValidator(lambda value: str(value) if type(value) in (int, WrittenNumber) else value)
_Environment = dict[_Variable, Annotated[str, _RAW, _NUMBER_AS_TEXT, AfterValidator(_printable)]]


class _Keys(BaseModel):
    """A mapping of a file."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        arbitrary_types_allowed=True,
        str_strip_whitespace=True,
        str_min_length=1,
    )

    @model_validator(mode="before")
    @classmethod
    def _given(cls, data: Any) -> Any:
        """The mapping without those of our keys that have no value, as if they were left out; any other value as it
        is."""
        if isinstance(data, Mapping):
            return {str(key): value for key, value in data.items() if value is not None or key not in cls.model_fields}
        return data


class Depend(_Keys):
    """What a layer waits for: another layer of its job (without ``job``), or another job, its layer or frame. A job
    waits for other jobs, and gives no type."""

    job: _JobName | None = None
    layer: _LayerName | None = None
    frame: _Int | None = None
    type: Literal["layer", "any_frame", "frame_by_frame", "previous_frame"] | None = None

    def kind(self, waiting: object | None) -> DependType:
        """What makes a layer, or (None) the job, wait."""
        if self.type in ("frame_by_frame", "previous_frame"):
            return DependType(self.type.upper())
        on = "FRAME" if self.frame is not None else "JOB" if self.layer is None else "LAYER"
        return DependType(f"{'JOB' if waiting is None else 'LAYER'}_ON_{on}")

    @model_validator(mode="after")
    def _complete(self) -> Depend:
        """Refuse what names nothing to wait for, a frame without its layer, and a type where there is no whole
        layer."""
        if self.job is None and self.layer is None:
            raise ValueError("names neither a layer nor a job")
        if self.frame is not None and self.layer is None:
            raise ValueError("a frame needs the layer it belongs to")
        if self.type is not None and (self.layer is None or self.frame is not None):
            raise ValueError("type goes with a layer, not with a job alone or with a frame")
        return self


def _of_job(depend: Depend) -> Depend:
    """What a job, not a layer, waits for: another job, and no type. Raises ValueError."""
    if depend.job is None or depend.type is not None:
        raise ValueError("names no job" if depend.job is None else "type goes with what a layer waits for")
    return depend


class LayerSpec(_Keys):
    """One layer. Cores are centicores with OpenCue's meaning of 0 and negative values; times are minutes."""

    name: _LayerName
    command: Annotated[str, Field(max_length=_LONGEST_TEXT), _AS_TEXT, AfterValidator(_command)]
    range: Annotated[FrameRange, PlainValidator(_range), PlainSerializer(lambda frames: frames.text)]
    type: Annotated[
        Literal["RENDER", "PRE", "UTIL"], BeforeValidator(lambda name: name.upper() if isinstance(name, str) else name)
    ] = "RENDER"
    chunk: Annotated[int, Field(ge=1, le=INT_MAX)] = 1
    cores: _Centicores = CENTICORES_PER_CORE
    max_cores: Annotated[_Centicores, Field(ge=0)] = 0
    threadable: bool = True
    memory: Annotated[int, BeforeValidator(_size_kb), Field(ge=MEMORY_FLOOR_KB, le=units.MOST_KB)] = 4 * 1024**2
    optimize: bool = True
    gpus: _Count = 0
    gpu_memory: Annotated[int, BeforeValidator(_size_kb), Field(ge=0, le=units.MOST_KB)] = 0
    tags: _Tags = ["general"]
    services: Annotated[list[Annotated[str, _AS_TEXT, _NAME]], _WORDS, _ONCE, _stored(",".join, 128)] = ["default"]
    limits: Annotated[list[_Limit], _WORDS, _ONCE] = []
    timeout: _Count = 0
    timeout_llu: _Count = 0
    start_after: Annotated[datetime, BeforeValidator(_moment)] | None = None
    env: _Environment = {}
    depends: Annotated[list[Depend], _depends_by("layer")] = []

    @property
    def frames(self) -> ChunkedRange:
        """The layer's frames, in dispatch order."""
        return ChunkedRange(self.range, self.chunk)

    @property
    def threads(self) -> bool:
        """``layer.b_threadable``. As in Cuebot, less than one core does not thread."""
        return self.threadable and not 0 < self.cores < CENTICORES_PER_CORE

    @property
    def least_cores(self) -> int:
        """The whole cores every frame takes at least, on any host."""
        return booked_cores(self.cores) if self.threads and self.cores > 0 else 1


class JobSpec(_Keys):
    """A job file. None: what the show, folder or facility says. Cores are centicores; an unlimited cap is -1."""

    show: Annotated[str, Field(max_length=512), _AS_TEXT, _NAME]
    shot: Annotated[str, Field(max_length=64), _AS_TEXT, _NAME]
    user: Annotated[str, Field(max_length=32), _AS_TEXT, _NAME]
    name: _JobName
    layers: Annotated[list[LayerSpec], Field(min_length=1, max_length=MAX_LAYERS)]
    depends: Annotated[list[Annotated[Depend, AfterValidator(_of_job)]], _depends_by("job")] = []
    env: _Environment = {}
    # RQD refuses a frame with uid 0.
    uid: Annotated[int, Field(ge=1, le=INT_MAX)] | None = None
    priority: _Int = 1
    facility: Annotated[str, Field(max_length=36), _AS_TEXT] | None = None
    folder: Annotated[str, Field(max_length=names.FOLDER_NAME_WIDTH), _AS_TEXT] | None = None
    dept: Annotated[str, Field(max_length=36), _AS_TEXT] | None = None
    os: Annotated[str, Field(max_length=12), _AS_TEXT, _NAME] | None = None
    paused: bool = False
    max_retries: Annotated[int, Field(ge=0, le=2**15 - 1)] = 3
    autoeat: bool = False
    log_dir: Annotated[str, Field(max_length=_LONGEST_TEXT), _AS_TEXT, AfterValidator(_absolute)] | None = None
    min_cores: Annotated[_Centicores, Field(ge=0)] | None = None
    max_cores: Annotated[_Centicores, AfterValidator(_core_cap)] | None = None
    min_gpus: _Count | None = None
    max_gpus: Annotated[_Int, AfterValidator(lambda gpus: gpus if gpus > 0 else UNLIMITED)] | None = None

    @property
    def full_name(self) -> str:
        """``job.str_name`` as OpenCue builds it: ``show-shot-user_name``, in lower case."""
        prefix = f"{self.show}-{self.shot}-{self.user}_"
        return (self.name if self.name.startswith(prefix) else prefix + self.name).lower()

    @property
    def frame_count(self) -> int:
        """How many frames the job has."""
        return sum(len(layer.frames.numbers) for layer in self.layers)

    @classmethod
    def parse(cls, data: object, *, default_user: str | None = None) -> JobSpec:
        """Reads what a job file says (text_file.py).

        Raises InvalidFile with the problems of all fields or, when each is right, of all that do not go together.
        """
        if isinstance(data, Mapping) and data.get("user") is None and default_user is not None:
            data = {**data, "user": default_user}
        try:
            spec = cls.model_validate(data)
        except ValidationError as error:
            raise InvalidFile(*map(_problem, error.errors(include_url=False))) from error
        if problems := list(_problems_together(spec)):
            raise InvalidFile(*problems)
        return spec


_WHOLE = "job file"
"""Path of a problem that is none of one field."""


def _problem(error: Any) -> str:
    """``layers[0].range: problem`` of a problem that pydantic found."""
    parts = [part for part in error["loc"] if part != "[key]"]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{ascii(part)[1:-1]}" for part in parts)
    said = _SAID.get(error["type"], error["msg"].removeprefix("Value error, "))
    if error["type"] == "extra_forbidden":
        key = str(error["loc"][-1])
        said += near(key, {*JobSpec.model_fields, *LayerSpec.model_fields, *Depend.model_fields} - {key})
    return f"{path.lstrip('.')[:_LONGEST] or _WHOLE}: {said[:_LONGEST]}"


def layer_fields(given: Mapping[str, object]) -> dict[str, Any]:
    """Some fields of a layer, as a job file has them, in the units of LayerSpec. Raises InvalidFile."""
    try:
        spec = LayerSpec.model_validate({"name": "any", "command": "any", "range": "1", **given})
    except ValidationError as error:
        raise InvalidFile(*map(_problem, error.errors(include_url=False))) from error
    return spec.model_dump(include=set(given))


def depend_of(given: Mapping[str, object], *, of_layer: bool) -> Depend:
    """What a layer, or a job, waits for, by the fields that a job file has for that. Raises InvalidFile."""
    try:
        depend = Depend.model_validate(dict(given))
    except ValidationError as error:
        problems = [_problem(problem).removeprefix(f"{_WHOLE}: ") for problem in error.errors(include_url=False)]
        raise InvalidFile(*problems) from error
    if depend.type is not None and not of_layer:
        raise InvalidFile("type goes with what a layer waits for")
    return depend


# What only shows when fields are seen together.


def _problems_together(spec: JobSpec) -> Iterator[str]:
    """What is wrong between the fields of a job, a line each that begins with the field's path."""
    for name, times in Counter(layer.name for layer in spec.layers).items():
        if times > 1:
            yield f"layers: {times} layers are called {name!r}; a layer's name must be unique in its job"
    if spec.frame_count > MAX_FRAMES:
        yield f"layers: the job has {spec.frame_count} frames; {MAX_FRAMES} is the most it may have"
        return
    if len(spec.full_name) > _JOB_NAME_WIDTH:
        yield f"name: the job's full name has {len(spec.full_name)} characters; {_JOB_NAME_WIDTH} is the most"
    else:
        yield from _log_names_too_long(spec)
    for position, capped in enumerate(spec.layers):
        if 0 < capped.max_cores < capped.cores:
            yield f"layers[{position}].max_cores: is less than cores"
    # Layers waited for that are not there or hold nothing back, and layers that wait for themselves in the end.
    by_name = {layer.name: layer for layer in spec.layers}
    edges: list[tuple[str, str, tuple[tuple[int, int], ...] | None]] = []
    for path, layer, depend in depends_of(spec):
        if layer is None or depend.job is not None:
            continue
        name, kind = depend.layer or "", depend.kind(layer)
        on = by_name.get(name)
        if on is None:
            yield f"{path}: the job has no layer {name!r}{near(name, by_name.keys() - {layer.name})}"
            continue
        if depend.frame is not None and depend.frame not in on.frames.numbers:
            yield f"{path}: {depend.frame} is not the number of a frame of layer {on.name!r} ({on.range.text})"
        pairs = frame_pairs(kind, layer.frames, on.frames) if kind.composite else None
        if pairs == ():
            yield f"{path}: layers {layer.name!r} and {on.name!r} have no frame in common"
        edges.append((layer.name, on.name, pairs))
    if circle := waiting_circle({name: layer.frames for name, layer in by_name.items()}, edges):
        yield f"layers: wait for one another for ever: {' -> '.join(circle)}"


def _log_names_too_long(spec: JobSpec) -> Iterator[str]:
    """The fields that make the names of the job's logs, which are ASCII, longer than a file system takes: its frames
    would die without a log."""
    length = len(f"{spec.full_name}--") + _JOB_ID_CHARACTERS
    if spec.log_dir is None and length > _LONGEST_FILE_NAME_BYTES:
        yield f"name: the directory of the job's logs, <job>--<id>, has {_name_of(length)}"
    for position, layer in enumerate(spec.layers):
        frames = [names.frame_name(number, layer.name) for number in layer.frames.numbers]
        file = log_path("", spec.full_name, max(frames, key=len)).lstrip("/")
        if (length := len(file + _EARLIER_RUN)) > _LONGEST_FILE_NAME_BYTES:
            words = f"layers[{position}].name: its log files, <job>.<frame>.rqlog.<run>, have names"
            yield f"{words} {_name_of(length).removeprefix('a name ')}"


def shell_drops(variables: Iterable[str]) -> list[str]:
    """The names of variables that no shell takes for its own: some shells do not hand these on to the commands they
    run."""
    return sorted(name for name in variables if not _SHELL_NAME.match(name))


def depends_of(spec: JobSpec) -> Iterator[tuple[str, LayerSpec | None, Depend]]:
    """Every dependency: the path of its field, the layer that waits (None: the job), and itself."""
    for number, of_job in enumerate(spec.depends):
        yield f"depends[{number}]", None, of_job
    for position, layer in enumerate(spec.layers):
        for number, of_layer in enumerate(layer.depends):
            yield f"layers[{position}].depends[{number}]", layer, of_layer
