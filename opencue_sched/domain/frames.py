"""Frames of a layer: their numbers in a range, the command and environment RQD gets for one, what it takes of a host.

Grammar of a range (OpenCue's FrameSet), comma-joined, numbers may be negative:

========== ==================================================== =======================
``n``      one frame                                            ``-3``
``a-b``    both ends and all between, descending when b < a     ``1-5``, ``5-1``
``a-bxs``  every s-th from a; s negative when descending        ``1-10x3``, ``10-1x-3``
``a-bys``  the others: those ``a-bxs`` leaves out               ``1-10y3``
``a-b:s``  all, interleaved: every s-th, then s/2, ... then 1   ``1-10:5``
========== ==================================================== =======================

A number given twice counts once, where it came first. OpenCue creates its frames that way, but cuts chunks from the
list with the repeats in it, which leaves frames out of ``1-5,3-8`` in chunks of 4; here both use the same list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import chain

from opencue_sched.domain.farm import (
    CENTICORES_PER_CORE,
    INT_MAX,
    Host,
    Job,
    Layer,
    PlannedProc,
    Reservation,
    ThreadMode,
    booked_cores,
)
from opencue_sched.errors import InvalidInput

MAX_NUMBERS = 1_000_000
"""Numbers one range may have. Ten times the frames OpenCue allows a job, since a chunk makes one frame of many."""

_PIECE = re.compile(r"^(-?[0-9]{1,10})(?:-(-?[0-9]{1,10})(?:([xy:])(-?[0-9]{1,10}))?)?$")
_FORMS = "write n, a-b, a-bxs, a-bys or a-b:s"


@dataclass(frozen=True)
class FrameRange:
    """The frames of a range. ``text`` is the range without spaces; ``numbers`` are unique, in rendering order."""

    text: str
    numbers: tuple[int, ...]

    @staticmethod
    @lru_cache(maxsize=32)
    def parse(text: str) -> FrameRange:
        """Reads a range; spaces around its pieces are ignored. Cached: a pass reads a few ranges for all its frames.

        Raises InvalidInput naming the piece that does not parse, or when there are more than MAX_NUMBERS. They are
        counted before anything is expanded, so ``1-2000000000`` costs nothing.
        """
        names = [piece.strip() for piece in text.split(",")]
        pieces = [_piece(name, text) for name in names]
        if sum(len(span) for span, _ in pieces) > MAX_NUMBERS:
            raise InvalidInput(f"frame range {text[:60]!r} makes more than {MAX_NUMBERS} frames")
        numbers = dict.fromkeys(chain.from_iterable(numbers for _, numbers in pieces))
        if not numbers:
            raise InvalidInput(f"frame range {text[:60]!r} has no frames")
        return FrameRange(",".join(names), tuple(numbers))

    def chunk(self, number: int, chunk_size: int) -> list[int]:
        """The numbers the frame ``number`` renders: itself and those after it in the range, ``chunk_size`` at most."""
        start = self._positions.get(number)
        if start is None:
            raise InvalidInput(f"frame {number} is not in the frame range {self.text}")
        return list(self.numbers[start : start + chunk_size])

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {number: position for position, number in enumerate(self.numbers)}


@lru_cache(maxsize=1024)
def check_frame_range(text: str) -> None:
    """Raises InvalidInput naming the piece that does not parse. Costs the same for a range of a million numbers."""
    for piece in text.split(","):
        _piece(piece.strip(), text)


def frame_spec(numbers: Iterable[int]) -> str:
    """A range that parses to exactly ``numbers`` in their order: ``1-5,10-20x2,30`` (``#FRAMESPEC#``)."""
    frames: Sequence[int] = tuple(numbers)
    pieces: list[str] = []
    start = 0
    while start < len(frames):
        step = frames[start + 1] - frames[start] if start + 1 < len(frames) else 0
        end = start
        while step != 0 and end + 1 < len(frames) and frames[end + 1] - frames[end] == step:
            end += 1
        if end - start >= 2 or step == 1:
            pieces.append(f"{frames[start]}-{frames[end]}" + ("" if step == 1 else f"x{step}"))
        else:
            pieces.append(str(frames[start]))
            end = start
        start = end + 1
    return ",".join(pieces)


def _piece(piece: str, text: str) -> tuple[range, Iterable[int]]:
    """The numbers between a piece's ends (of the step for ``x``, otherwise every one), and its numbers in order, some
    repeated where it is interleaved. Nothing is expanded yet."""
    match = _PIECE.match(piece)
    if match is None:
        raise _unreadable(text, piece, f"does not parse; {_FORMS}")
    start = int(match[1])
    end = int(match[2] or start)
    direction = 1 if end >= start else -1
    kind, step = match[3], int(match[4] or direction)
    if not all(-INT_MAX - 1 <= number <= INT_MAX for number in (start, end, step)):
        raise _unreadable(text, piece, "has a number that is too large")
    if step * direction <= 0:
        raise _unreadable(text, piece, f"has the step {step}, which does not lead from {start} to {end}")

    def every(step: int) -> range:
        return range(start, end + direction, step)

    span = every(step if kind == "x" else direction)
    if kind == "y":
        stepped = every(step)
        return span, (number for number in span if number not in stepped)
    if kind == ":":
        halvings = [step]
        while abs(halvings[-1]) > 1:
            halvings.append(int(halvings[-1] / 2))
        return span, chain.from_iterable(map(every, halvings))
    return span, span


def _unreadable(text: str, piece: str, problem: str) -> InvalidInput:
    return InvalidInput(f"frame range {text[:60]!r}: {piece[:60]!r} {problem}")


# A frame's command line, environment and memory limits. Values are put in as they are: what a layer or job is called
# never changes the command around it, whereas OpenCue's substitution gives ``$`` and backslashes in names a meaning of
# their own.

_WORDS: Mapping[str, Callable[[PlannedProc, Sequence[int]], str]] = {
    "#ZFRAME#": lambda _, numbers: f"{numbers[0]:04d}",
    "#IFRAME#": lambda _, numbers: str(numbers[0]),
    "#FRAME_START#": lambda _, numbers: str(numbers[0]),
    "#FRAME_END#": lambda _, numbers: str(numbers[-1]),
    "#FRAME_CHUNK#": lambda planned, _: str(planned.layer.chunk_size),
    "#LAYER#": lambda planned, _: planned.layer.name,
    "#JOB#": lambda planned, _: planned.job.name,
    "#FRAMESPEC#": lambda _, numbers: frame_spec(numbers),
    "#FRAME#": lambda planned, _: planned.frame.name,
}
"""The tokens in the order in which OpenCue replaces them, and what each becomes for a planned frame and the numbers of
its chunk, in rendering order."""

TOKENS: tuple[str, ...] = tuple(_WORDS)

_KNOWN_TOKEN = re.compile("|".join(TOKENS))
_TOKEN = re.compile(r"#[A-Za-z][A-Za-z0-9_]*#")
"""What looks like a token, whether it is one or not."""


def unknown_tokens(command: str) -> tuple[str, ...]:
    """What looks like a token but is none, each once, in order: ``#FRAMES#``, ``#frame#``."""
    return tuple(dict.fromkeys(_TOKEN.findall(_KNOWN_TOKEN.sub("\0", command))))


def command_line(planned: PlannedProc) -> str:
    """The command RQD runs for a planned frame: every token replaced, in OpenCue's order; unknown ones stay.

    Raises InvalidInput when its layer's range or chunk size makes no sense.
    """
    layer, command = planned.layer, planned.layer.command
    numbers = FrameRange.parse(layer.frame_range).chunk(planned.frame.number, layer.chunk_size)
    for token, word in _WORDS.items():
        if token in command:
            command = command.replace(token, word(planned, numbers))
    return command


def log_path(log_dir: str, job: str, frame: str) -> str:
    """The file that RQD writes a frame's output to; it moves that of an earlier run to the same name with a number."""
    return f"{log_dir.rstrip('/')}/{job}.{frame}.rqlog"


_VARIABLES: Mapping[str, Callable[[PlannedProc], str]] = {
    "CUE3": lambda _: "1",
    "CUE_THREADS": lambda it: str(max(1, it.reservation.cores)),
    "CUE_MEMORY": lambda it: str(it.reservation.memory_kb),
    "CUE_GPUS": lambda it: str(it.reservation.gpus),
    "CUE_GPU_MEMORY": lambda it: str(it.reservation.gpu_memory_kb),
    "CUE_LOG_PATH": lambda it: it.job.log_dir,
    "CUE_RANGE": lambda it: it.layer.frame_range,
    "CUE_CHUNK": lambda it: str(it.layer.chunk_size),
    "CUE_IFRAME": lambda it: str(it.frame.number),
    "CUE_LAYER": lambda it: it.layer.name,
    "CUE_JOB": lambda it: it.job.name,
    "CUE_FRAME": lambda it: it.frame.name,
    "CUE_SHOW": lambda it: it.job.show_name,
    "CUE_SHOT": lambda it: it.job.shot,
    "CUE_USER": lambda it: it.job.user,
    "CUE_JOB_ID": lambda it: it.job.id,
    "CUE_LAYER_ID": lambda it: it.layer.id,
    "CUE_FRAME_ID": lambda it: it.frame.id,
    "CUE_THREADABLE": lambda it: "1" if it.layer.threadable else "0",
}
"""The variables OpenCue sets. Memory is in the KB the database holds, threads are whole cores."""

RESERVED_VARIABLES: frozenset[str] = frozenset(_VARIABLES)
"""A job's or layer's own value of these would never reach its frames."""


def environment(
    planned: PlannedProc, job_environment: Mapping[str, str], layer_environment: Mapping[str, str]
) -> dict[str, str]:
    """The environment of a planned frame: the job's, overridden by the layer's, overridden by OpenCue's variables."""
    return {**job_environment, **layer_environment, **{name: read(planned) for name, read in _VARIABLES.items()}}


def memory_limit(memory_kb: int, factor: float) -> int:
    """RunFrame's soft or hard limit, in KB, of a frame that reserves ``memory_kb``: truncated as in Cuebot.

    A limit below the reservation would kill frames that use what they were given, so it never goes below it.
    """
    return max(memory_kb, int(memory_kb * factor))


# What one frame of a layer takes on one host, or why the host cannot take it.
#
# Source of the rules: OpenCue's resource arithmetic (Cuebot's behaviour where Cuebot and the Rust scheduler differ) and
# the scheduler reference ("Resource Calculation"). Where they are silent or wrong (docs/upstream-traps.md):
#
# - A minimum of a fraction of a core rounds **up**; 50 centicores are one core. Truncated to 0 they would mean "the
#   whole host". As in Cuebot, a minimum below one core never threads, so it takes exactly one.
# - Zero is every core of the host and a negative minimum is all but that many. Both are taken exactly: no thread mode
#   or memory rule adds cores that the layer asked to leave alone. All but a fraction leaves a whole core.
# - ``int_cores_max`` is the layer's own bound on one frame, rounded like the minimum so that a minimum equal to the
#   maximum stays so. It wins over the minimum, as in Cuebot.
# - Memory is compared and reserved in the KB of the database.
# - Tags, caps of shows, folders and licences, and the host's state are checked elsewhere.

MEM_RESERVED_MIN_KB = 250 * 1024
"""A proc reserves no less, as with Cuebot (its ``mem_reserved_min``): a frame without an estimate needs some."""
VARIABLE_MODE_LEAST_CORES = 2
"""A threaded frame on a host in ThreadMode.VARIABLE gets at least this many cores."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the arithmetic depends on: ``queue.memory_stranded_threshold`` in KB, and ``queue.selfish_services``."""

    memory_stranded_threshold_kb: int
    selfish_services: frozenset[str] = frozenset()


class Dimension(StrEnum):
    """Why a host takes no frame of a layer: what it, or the job's cap, is short of.

    JOB_CORES speaks of this host only: a layer that wants whole hosts may fit the job's cap on a smaller one. It is
    given only when the host itself would have taken the frame.
    """

    OS = "os"
    THREAD_MODE = "thread_mode"
    CORES = "cores"
    MEMORY = "memory"
    GPUS = "gpus"
    GPU_MEMORY = "gpu_memory"
    JOB_CORES = "job_cores"


@dataclass(frozen=True, slots=True)
class Search:
    """All that decides which hosts a layer can use, caps and admission apart; every frame of it takes the ``need`` at
    least, whatever the host."""

    tags: tuple[str, ...]
    os_name: str | None
    need: Reservation
    threadable: bool
    cores_min_centicores: int
    cores_max_centicores: int

    @classmethod
    def of(cls, job: Job, layer: Layer, need: Reservation, tags: tuple[str, ...]) -> Search:
        return cls(tags, job.os_name, need, layer.threadable, layer.cores_min_centicores, layer.cores_max_centicores)


@dataclass(frozen=True, slots=True)
class Demand:
    """Frames that wait, of layers that can use the same hosts of a facility, in allocations of which their show may
    take more."""

    facility_id: str
    search: Search
    alloc_ids: frozenset[str]
    frames: int

    def need_on(self, host: Host) -> Reservation | None:
        """The least that a frame takes of the host when nothing else runs on it; None: it never takes one."""
        search, need = self.search, self.search.need
        least = least_cores(search, host)
        could_take = (
            host.facility_id == self.facility_id
            and host.alloc_id in self.alloc_ids
            and not host.tags.isdisjoint(search.tags)
            and (not search.os_name or search.os_name in host.os_names)
            and (search.threadable or host.thread_mode is not ThreadMode.ALL)
            and 1 <= least <= host.total_cores
            and need.memory_kb <= host.total_memory_kb
            and need.gpus <= host.total_gpus
            and need.gpu_memory_kb <= host.total_gpu_memory_kb
        )
        return replace(need, cores=least) if could_take else None


def minimum_cores(layer: Layer | Search, host: Host) -> int:
    """The layer's minimum in whole cores of this host. Not positive when it asks to leave more than the host has."""
    if _takes_one_core(layer):
        return 1
    if layer.cores_min_centicores > 0:
        return booked_cores(layer.cores_min_centicores)
    return (host.total_centicores + layer.cores_min_centicores) // CENTICORES_PER_CORE


def smallest_need(layer: Layer) -> Reservation:
    """A lower bound of every reservation of the layer, for a search that does not know the host yet.

    A zero or negative minimum depends on the host, so it is bounded by one core and :func:`reserve` refuses the hosts
    that are too busy. The bound is always positive: as an index key a negative minimum would find no host, and
    compared with what a job has left it would slip past the at-cap test.
    """
    if _takes_one_core(layer) or layer.cores_min_centicores <= 0:
        cores = 1
    else:
        cores = _at_most_the_layers_maximum(layer, booked_cores(layer.cores_min_centicores))
    return Reservation(
        cores=cores,
        memory_kb=max(layer.memory_min_kb, MEM_RESERVED_MIN_KB),
        gpus=max(layer.gpus_min, 0),
        gpu_memory_kb=max(layer.gpu_memory_min_kb, 0),
    )


def reserve(
    layer: Layer, host: Host, rules: Rules, *, os_name: str | None, job_cores_left: float
) -> Reservation | Dimension:
    """What a frame of ``layer`` takes on ``host`` now, or the first dimension it is short of.

    A job without an OS runs anywhere; the host's is a list, as Cuebot reads it. ``job_cores_left`` is what the job's
    cap still allows, in cores; infinity without a cap. A reservation never exceeds it: otherwise a threaded frame grabs
    a whole host and a small job cap rejects it for ever. Nor does it shrink below the layer's minimum, to fit neither
    the cap nor the idle cores; a thread mode's floor gives way to the cap, not to the idle cores.
    """
    if os_name and os_name not in host.os_names:
        return Dimension.OS
    if host.thread_mode is ThreadMode.ALL and not layer.threadable:
        return Dimension.THREAD_MODE
    need = smallest_need(layer)
    least = least_cores(layer, host)
    if least < 1 or least > host.idle_cores:
        return Dimension.CORES
    if need.memory_kb > host.idle_memory_kb:
        return Dimension.MEMORY
    if need.gpus > host.idle_gpus:
        return Dimension.GPUS
    if need.gpu_memory_kb > host.idle_gpu_memory_kb:
        return Dimension.GPU_MEMORY
    if fewest_cores(layer, host) > job_cores_left:
        return Dimension.JOB_CORES
    cores = max(least, min(_wanted_cores(layer, host, rules, need.memory_kb, least), host.idle_cores))
    if cores > job_cores_left:
        cores = int(job_cores_left)
    return Reservation(cores, need.memory_kb, need.gpus, need.gpu_memory_kb)


def _takes_one_core(layer: Layer | Search) -> bool:
    return not layer.threadable or 0 < layer.cores_min_centicores < CENTICORES_PER_CORE


def _at_most_the_layers_maximum(layer: Layer | Search, cores: int) -> int:
    return min(cores, booked_cores(layer.cores_max_centicores)) if layer.cores_max_centicores > 0 else cores


def fewest_cores(layer: Layer | Search, host: Host) -> int:
    """The layer's own minimum on this host, which no cap makes smaller."""
    return _at_most_the_layers_maximum(layer, minimum_cores(layer, host))


def least_cores(layer: Layer | Search, host: Host) -> int:
    """The fewest cores a frame runs with on this host: its minimum, the thread mode's floor, the layer's maximum. Not
    positive: it never runs here."""
    least = minimum_cores(layer, host)
    if _takes_one_core(layer):
        return least
    if host.thread_mode is ThreadMode.VARIABLE and layer.cores_min_centicores > 0:
        least = max(least, VARIABLE_MODE_LEAST_CORES)
    return _at_most_the_layers_maximum(layer, least)


def _wanted_cores(layer: Layer, host: Host, rules: Rules, memory_kb: int, least: int) -> int:
    """The cores the thread mode, the services and the memory ask for; the caller fits them to what is there."""
    if _takes_one_core(layer) or layer.cores_min_centicores <= 0:
        return least
    if host.thread_mode is ThreadMode.ALL:
        wanted = host.idle_cores
    elif host.thread_mode is ThreadMode.VARIABLE and minimum_cores(layer, host) <= VARIABLE_MODE_LEAST_CORES:
        wanted = VARIABLE_MODE_LEAST_CORES
    elif (
        not rules.selfish_services.isdisjoint(layer.services)
        or host.idle_memory_kb - memory_kb <= rules.memory_stranded_threshold_kb
    ):
        # A selfish service, or no memory is left for anyone else to use the other cores.
        wanted = host.idle_cores
    else:
        # The cores whose even share of the host's memory the frame takes, rounded down.
        share_kb = round(host.total_memory_kb / max(1, host.total_cores))
        wanted = memory_kb // share_kb if share_kb > 0 else 0
    return _at_most_the_layers_maximum(layer, wanted)
