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

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opencue_sched.domain.errors import InvalidInput
from opencue_sched.domain.layer_spec import DependSpec, LayerSpec, check_layer_depends, read_job_depend, read_layer
from opencue_sched.domain.names import (
    DEPT_NAME_WIDTH,
    FACILITY_NAME_WIDTH,
    FOLDER_NAME_WIDTH,
    JOB_NAME_WIDTH,
    JOB_OS_WIDTH,
    LOG_DIR_WIDTH,
    SHOT_NAME_WIDTH,
    SHOW_NAME_WIDTH,
    USER_NAME_WIDTH,
)
from opencue_sched.domain.spec_fields import INT_MAX, Fields
from opencue_sched.domain.units import CENTICORES_PER_CORE, UNLIMITED

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
