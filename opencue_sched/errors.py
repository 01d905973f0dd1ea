"""Every error that this package raises on purpose: lost bookings first, then what stops more than one booking."""

from __future__ import annotations

import re
from typing import ClassVar


class SchedulerError(Exception):
    """Base of every error raised on purpose by this package."""


class BookingError(SchedulerError):
    """A planned proc that did not become a running frame.

    ``reason`` names the loss in logs, verdicts and metrics: the class's name, in lower case with underscores.
    ``retriable``: the host is at fault, and another may take the frame. ``outcome_unknown``: a COMMIT or a launch may
    have happened all the same.
    """

    retriable = False
    reason: ClassVar[str]

    def __init__(self, message: str, *, outcome_unknown: bool = False) -> None:
        super().__init__(message)
        self.outcome_unknown = outcome_unknown

    def __init_subclass__(cls) -> None:
        cls.reason = re.sub(r"\B(?=[A-Z])", "_", cls.__name__).lower()


class HostLocked(BookingError):
    """Another transaction has locked the host row."""

    retriable = True


class HostExhausted(BookingError):
    """The host row has less idle than the cache believed, or is no longer UP, OPEN and in its allocation."""

    retriable = True


class HostHeld(BookingError):
    """The host drains for a wide frame of another layer, and the backfill rule does not let this frame on it."""

    retriable = True


class AllocationOverBurst(BookingError):
    """The subscription's burst is reached."""


class CapExceeded(BookingError):
    """A cap of a folder or job, or a limit, is reached."""


class CapChanging(BookingError):
    """Another transaction is changing one of the frame's caps; a later pass books the frame under the new one."""


class FrameLost(BookingError):
    """Another process started, changed, paused or took over the frame after the plan had read it."""


class LayerChanged(BookingError):
    """The layer or its job asks for something else, or counts under something else, than the plan knew: whoever planned
    it has to read it again."""


class DatabaseFailure(BookingError):
    """PostgreSQL refused or did not answer."""


class RqdFailure(BookingError):
    """RQD refused or did not answer."""

    retriable = True


class NotReady(SchedulerError):
    """The Redis store is empty, restarted or failed over: nothing may be booked before it is bootstrapped again."""


class StoreDamaged(NotReady):
    """A key that everything is counted by is of another type, or a number that cannot be used: the store is lost."""


class StoreAway(SchedulerError):
    """A store does not answer a process that cannot begin without it: starting again later may help."""


class TakesNoWrites(StoreAway):
    """PostgreSQL answers, but is a standby or read only: it may take writes later, or another server does now."""


class FencedOff(SchedulerError):
    """A newer leader was elected: Redis refuses what a task that an older leader sent would change."""


class InvalidInput(SchedulerError, ValueError):
    """A value from a person or another program does not make sense; the message names its field.

    A ValueError, so that a validator of pydantic's may raise it.
    """


class WrongConfiguration(InvalidInput):
    """The settings cannot be used as they are: starting again would not help."""


class StoreUnusable(WrongConfiguration):
    """A store answers and is not one to work on: a Redis that is too old, a cluster or loses keys without a sound, or
    either store where our user may not do what is needed. The message says what to set."""


class WrongSchema(WrongConfiguration):
    """The database has no OpenCue schema, one of a Cuebot older than V45, or our objects of an older revision."""
