"""OpenCue's units, names and enumerations, and the jobs, layers, frames, hosts and bookings as a dispatch pass sees
them.

The one place where centicores (PostgreSQL) and whole cores (Redis, placement) meet. What is booked rounds up, what may
be booked rounds down, so every rounding error under-books (Redis accounting reference, "the unit invariant"; design
section 4).
"""

from __future__ import annotations

import difflib
import re
import signal
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum

from opencue_sched.domain.cluster import Cluster
from opencue_sched.errors import InvalidInput

INT_MAX = 2**31 - 1
"""The most OpenCue's integer columns hold. A layer that asks for more centicores or GPUs, or a host that has more, is a
mistake: no cap holds as much."""
CENTICORES_PER_CORE = 100
KB_PER_GIB = 1024**2
UNLIMITED = -1
MOST_KB = 2**50
"""2^60 bytes: no machine has as much memory."""
FRAMES_TO_RAISE_A_LAYER = 3
"""So many frames of a layer needed more memory before the layer asks for more."""
MEMORY_FLOOR_KB = 262_144
"""The least memory a layer asks for, and the margin the optimizer leaves above the most that was used."""


def centicores_of(cores: float) -> int:
    """Cores as people write them, which may have a fraction, in centicores. Raises InvalidInput for what is no such."""
    if not abs(cores) <= INT_MAX / CENTICORES_PER_CORE:  # nor is NaN
        raise InvalidInput(f"{cores} is not a number of cores")
    if cores != 0 and round(cores * CENTICORES_PER_CORE) == 0:
        raise InvalidInput(f"{cores} is less than a hundredth of a core, the least OpenCue counts")
    return round(cores * CENTICORES_PER_CORE)


def booked_cores(reserved_centicores: int) -> int:
    """Cores one proc occupies: rounded up, so that half a core never counts as none."""
    return -(-reserved_centicores // CENTICORES_PER_CORE)


def idle_cores(idle_centicores: int) -> int:
    """Whole cores that can still be booked on a host: rounded down, never negative."""
    return max(0, idle_centicores // CENTICORES_PER_CORE)


def cap_cores(cap_centicores: int) -> int | float:
    """A cap as the counters hold it, in cores.

    The sentinels (0 and negative) pass through unchanged. A positive cap below one core becomes that fraction
    rather than 0, because 0 means "unlimited" to a folder or a job; the fraction refuses every booking.
    """
    if cap_centicores <= 0:
        return cap_centicores
    return cap_centicores // CENTICORES_PER_CORE or cap_centicores / CENTICORES_PER_CORE


def enforced(cap: float | None) -> float | None:
    """A folder's or job's cap of cores or GPUs; None without one (NULL, 0 or negative)."""
    return cap if cap and cap > 0 else None


def memory_text(kilobytes: float) -> str:
    """KB as GiB, or as MiB below one."""
    gib = kilobytes / KB_PER_GIB
    return f"{gib * 1024:.0f}M" if abs(gib) < 1 else f"{gib:.1f}G"


def duration_text(seconds: float) -> str:
    """``45s``, ``12m``, ``3h 20m``, ``2d 4h``: how people are told of all durations."""
    if seconds < 100:
        return f"{max(0, int(seconds))}s"
    hours, minutes = divmod(int(seconds) // 60, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    return f"{hours}h {minutes}m" if hours else f"{minutes}m"


FOLDER_NAME_WIDTH = 36

NAME = re.compile(r"(?!\.+\Z)[A-Za-z0-9_.-]+\Z")
"""A name that ends up in paths and commands."""
NAME_CHARACTERS = "letters, digits, '_', '-' and '.'"


def counted(number: float | None, noun: str, plural: str | None = None) -> str:
    """``1 frame``, ``2 frames``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def near(word: str, words: Iterable[str]) -> str:
    """``; did you mean x?`` for a mistyped word, or nothing."""
    close = difflib.get_close_matches(word[:64], list(words), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def frame_name(number: int, layer_name: str) -> str:
    """The name of a frame: ``0012-render``, and ``-012-render`` for frame -12 (Java's and Python's ``%04d`` agree)."""
    return f"{number:04d}-{layer_name}"


def os_names(text: str | None) -> tuple[str, ...]:
    """``host_stat.str_os`` as the list Cuebot reads it as: separated by commas, spaces around them ignored."""
    return tuple(name for name in (part.strip() for part in (text or "").split(",")) if name)


class FrameState(StrEnum):
    WAITING = "WAITING"
    SETUP = "SETUP"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    DEPEND = "DEPEND"
    DEAD = "DEAD"
    EATEN = "EATEN"
    CHECKPOINT = "CHECKPOINT"


class JobState(StrEnum):
    PENDING = "PENDING"
    FINISHED = "FINISHED"
    STARTUP = "STARTUP"
    SHUTDOWN = "SHUTDOWN"
    POSTED = "POSTED"


class HardwareState(StrEnum):
    UP = "UP"
    DOWN = "DOWN"
    REBOOTING = "REBOOTING"
    REBOOT_WHEN_IDLE = "REBOOT_WHEN_IDLE"
    REPAIR = "REPAIR"


class LockState(StrEnum):
    OPEN = "OPEN"
    LOCKED = "LOCKED"
    NIMBY_LOCKED = "NIMBY_LOCKED"


class ThreadMode(IntEnum):
    """``host.int_thread_mode``."""

    AUTO = 0
    ALL = 1
    VARIABLE = 2


class ExitStatus(IntEnum):
    """Exit statuses with a meaning of their own in OpenCue."""

    NONE = -1
    SUCCESS = 0
    MEMORY_FAILURE = 33
    DOCKER_OOM = 137
    FAILED_LAUNCH = 256
    SKIP_RETRY = 286
    FRAME_CLEARED = 299
    FRAME_ORPHAN = 301
    FAILED_KILL = 302
    DOWN_HOST = 399


_EXIT_MEANINGS: Mapping[int, str] = {
    ExitStatus.NONE: "no run of it has ended",
    ExitStatus.SUCCESS: "it succeeded",
    ExitStatus.MEMORY_FAILURE: "it used more memory than there was",
    126: "its command cannot be executed",
    127: "its command was not found",
    ExitStatus.DOCKER_OOM: "killed by signal 9 (SIGKILL), as a container is that uses too much memory",
    ExitStatus.FAILED_LAUNCH: "RQD could not start it",
    ExitStatus.SKIP_RETRY: "it asked to be run again",
    ExitStatus.FRAME_CLEARED: "it was taken back from its host, by a person or the scheduler",
    ExitStatus.FRAME_ORPHAN: "its host no longer knew of it",
    ExitStatus.FAILED_KILL: "it could not be killed",
    ExitStatus.DOWN_HOST: "its host went down",
}


def exit_meaning(status: int) -> str:
    """What a frame's exit status says of its end: OpenCue's own ones, a shell's, and 128 with a signal."""
    return _EXIT_MEANINGS.get(status) or signal_words(status - 128) or "its command failed"


def signal_words(number: int) -> str:
    """``killed by signal 11 (SIGSEGV)``; empty for what is no signal."""
    try:
        return f"killed by signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return ""


STATUSES_NOT_COUNTED_AS_RETRY = frozenset(ExitStatus) - {
    ExitStatus.SUCCESS,
    ExitStatus.MEMORY_FAILURE,
    ExitStatus.DOCKER_OOM,
}
"""A frame that starts again after one of these exit statuses keeps its retry count, as with Cuebot."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """What one frame takes from one host, or needs of one, or what is idle on it. Whole cores; memory in KB."""

    cores: int
    memory_kb: int
    gpus: int = 0
    gpu_memory_kb: int = 0

    def covers(self, other: Reservation) -> bool:
        """Whether this is at least ``other`` in everything."""
        return (
            self.cores >= other.cores
            and self.memory_kb >= other.memory_kb
            and self.gpus >= other.gpus
            and self.gpu_memory_kb >= other.gpu_memory_kb
        )


@dataclass(frozen=True, slots=True)
class Vertices:
    """What one booking counts under: its subscription (show, allocation), folder, job, layer, department and limits."""

    show_id: str
    alloc_id: str
    folder_id: str
    job_id: str
    layer_id: str
    dept_id: str
    limit_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Hold:
    """A host that drains for a frame of ``layer_id``, which needs this much of it. Cores, KB.

    ``until`` and ``free_at`` (when so much is expected idle; None: nobody knows) are epoch seconds of the database.
    ``owner`` names the layer for people.
    """

    layer_id: str
    job_id: str
    cores: int
    memory_kb: int
    gpus: int
    until: float
    free_at: float | None = None
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """A host with what it has idle.

    ``idle_memory_kb`` and ``idle_gpu_memory_kb`` are already the lesser of what is unreserved and what the machine
    reports free. ``tags`` are normalised (spaces removed). ``os_names`` is host_stat.str_os split on commas.
    ``running`` counts the frames on it by layer id, ``recent`` are layers that ran on it last, the latest first.
    """

    id: str
    name: str
    facility_id: str
    alloc_id: str
    tags: frozenset[str]
    os_names: tuple[str, ...]
    thread_mode: ThreadMode
    total_centicores: int
    idle_centicores: int
    total_memory_kb: int
    idle_memory_kb: int
    total_gpus: int = 0
    idle_gpus: int = 0
    total_gpu_memory_kb: int = 0
    idle_gpu_memory_kb: int = 0
    running: Mapping[str, int] = field(default_factory=dict, hash=False)
    recent: tuple[str, ...] = ()
    hold: Hold | None = None

    @property
    def idle_cores(self) -> int:
        """Whole cores that can be booked."""
        return idle_cores(self.idle_centicores)

    @property
    def total_cores(self) -> int:
        return idle_cores(self.total_centicores)

    def idle(self) -> Host:
        """The same host with nothing on it."""
        return replace(
            self,
            idle_centicores=self.total_centicores,
            idle_memory_kb=self.total_memory_kb,
            idle_gpus=self.total_gpus,
            idle_gpu_memory_kb=self.total_gpu_memory_kb,
        )

    def less(self, taken: Reservation, layer_id: str = "") -> Host:
        """The same host after ``taken`` has been booked on it, for a frame of the layer if one is named."""
        running = self.running
        if layer_id:
            running = {**running, layer_id: running.get(layer_id, 0) + 1}
        return replace(
            self,
            running=running,
            idle_centicores=self.idle_centicores - taken.cores * CENTICORES_PER_CORE,
            idle_memory_kb=self.idle_memory_kb - taken.memory_kb,
            idle_gpus=self.idle_gpus - taken.gpus,
            idle_gpu_memory_kb=self.idle_gpu_memory_kb - taken.gpu_memory_kb,
        )


@dataclass(frozen=True, slots=True)
class Frame:
    """A WAITING frame. ``version`` is frame.int_version, which may be NULL.

    ``waited_seconds``: from when it last became eligible to run until it was gathered, by the database's clock; None
    where the database has no such time. ``memory_kb``: what it asks for by itself, where that may be more than its
    layer does.
    """

    id: str
    name: str
    number: int
    version: int | None
    waited_seconds: float | None = None
    memory_kb: int | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer with waiting frames, in dispatch order, at most the pass's limit of them.

    ``cores_min_centicores`` and ``cores_max_centicores`` are raw: zero, negative and fractional values keep OpenCue's
    meaning (see domain.frames). ``waiting_frames`` counts all waiting frames, not only those in ``frames``.
    ``kind`` is the same for all layers that need the same of a host, as far as the rows of layer and job say.
    ``run_seconds`` is the mean run time of its frames that succeeded; None while none has.
    """

    id: str
    name: str
    command: str
    frame_range: str
    chunk_size: int
    cores_min_centicores: int
    cores_max_centicores: int
    memory_min_kb: int
    gpus_min: int
    gpu_memory_min_kb: int
    tags: frozenset[str]
    services: tuple[str, ...]
    threadable: bool
    waiting_frames: int
    frames: tuple[Frame, ...]
    limit_ids: tuple[str, ...] = ()
    kind: str = ""
    run_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A pending job with its bookable layers in dispatch order."""

    id: str
    name: str
    show_id: str
    show_name: str
    folder_id: str
    dept_id: str
    shot: str
    user: str
    uid: int | None
    log_dir: str
    os_name: str | None
    loki_url: str | None
    layers: tuple[Layer, ...]


@dataclass(frozen=True, slots=True)
class Headroom:
    """A cap and what is booked under it, in whole cores or units. ``cap`` None is unlimited; ``name`` is for people."""

    cap: float | None
    booked: int
    name: str = ""

    @property
    def left(self) -> float:
        """How much more may be booked; infinity without a cap, never negative."""
        return float("inf") if self.cap is None else max(0.0, self.cap - self.booked)


@dataclass(frozen=True, slots=True)
class Caps:
    """Cores and GPUs of one vertex."""

    cores: Headroom
    gpus: Headroom


def cores_left(subscribed: Mapping[tuple[str, str], Caps]) -> defaultdict[str, dict[str, float]]:
    """The cores that subscriptions have left, by show and then by allocation id; of any other show none."""
    left: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for (show_id, alloc_id), caps in subscribed.items():
        left[show_id][alloc_id] = caps.cores.left
    return left


@dataclass(frozen=True, slots=True)
class Work:
    """The jobs of one cluster, in the order in which they should be served."""

    cluster: Cluster
    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything the planner may know about the work of one pass (hosts come from the host pool).

    ``subscriptions`` maps (show id, alloc id) (an allocation that is absent may not be booked), and ``sizes`` the same
    to the subscription's size in cores; ``caps`` (of folders and jobs) and ``limits`` map ids (absent: unlimited).
    ``now`` is when it was read, in epoch seconds of the database.
    """

    work: tuple[Work, ...]
    subscriptions: Mapping[tuple[str, str], Caps]
    caps: Mapping[str, Caps]
    limits: Mapping[str, Headroom] = field(default_factory=dict)
    sizes: Mapping[tuple[str, str], float] = field(default_factory=dict)
    now: float = 0.0


@dataclass(frozen=True, slots=True)
class PlannedProc:
    """One frame on one host. ``proc_id`` is generated here, before anything is booked."""

    proc_id: str
    job: Job
    layer: Layer
    frame: Frame
    host: Host
    reservation: Reservation
    vertices: Vertices
