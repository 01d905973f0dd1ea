"""The words OpenCue stores as text or small integers, as enumerations."""

from __future__ import annotations

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


class TagType(StrEnum):
    """``host_tag.str_tag_type``, as Cuebot writes it."""

    MANUAL = "MANUAL"
    HARDWARE = "HARDWARE"
    ALLOC = "ALLOC"
    HOSTNAME = "HOSTNAME"


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
