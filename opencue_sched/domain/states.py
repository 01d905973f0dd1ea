"""OpenCue's enumerations: states of frames, jobs and hosts, thread modes, exit statuses and what they mean."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from enum import IntEnum, StrEnum


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
    """What an exit status says of how a frame ended.

    It may be one of OpenCue's own, one of a shell's (126, 127), or 128 and the number of a signal.
    """
    return _EXIT_MEANINGS.get(status) or signal_words(status - 128) or "its command failed"


def signal_words(number: int) -> str:
    """``killed by signal 11 (SIGSEGV)``; empty for a number that is no signal's."""
    try:
        return f"killed by signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return ""


STATUSES_NOT_OF_A_HOST = frozenset(ExitStatus) - {ExitStatus.FAILED_LAUNCH}
"""Exit statuses that say nothing of the host that a frame ran on. FAILED_LAUNCH does: the RQD of that host failed."""
SIGNALS_OF_A_CRASH = frozenset({signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV})
"""Signals that mean a crash of the process itself. A process that any other signal ends was killed."""

STATUSES_NOT_COUNTED_AS_RETRY = frozenset(ExitStatus) - {
    ExitStatus.SUCCESS,
    ExitStatus.MEMORY_FAILURE,
    ExitStatus.DOCKER_OOM,
}
"""A frame that starts again after one of these exit statuses keeps its retry count, as with Cuebot."""
