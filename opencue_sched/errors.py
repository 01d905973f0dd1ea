"""Every error that this package raises on purpose: lost bookings first, then what stops more than one booking."""

from __future__ import annotations


class SchedulerError(Exception):
    """Base of every error raised on purpose by this package."""


class BookingError(SchedulerError):
    """A planned proc that did not become a running frame.

    ``reason`` names the loss in logs, verdicts and metrics. ``retriable``: the host is at fault, and another may take
    the frame. ``outcome_unknown``: a COMMIT or a launch may have happened all the same.
    """

    retriable = False
    reason = "booking"

    def __init__(self, message: str, *, outcome_unknown: bool = False) -> None:
        super().__init__(message)
        self.outcome_unknown = outcome_unknown


class HostLocked(BookingError):
    """Another transaction has locked the host row."""

    retriable = True
    reason = "host_locked"


class HostExhausted(BookingError):
    """The host row has less idle than the cache believed, or is no longer UP, OPEN and in its allocation."""

    retriable = True
    reason = "host_exhausted"


class HostHeld(BookingError):
    """The host drains for a wide frame of another layer, and the backfill rule does not let this frame on it."""

    retriable = True
    reason = "host_held"


class AllocationOverBurst(BookingError):
    """The subscription's burst is reached."""

    reason = "allocation_over_burst"


class CapExceeded(BookingError):
    """A folder, job or licence cap is reached."""

    reason = "cap_exceeded"


class CapChanging(BookingError):
    """Another transaction is changing one of the frame's caps; a later pass books the frame under the new one."""

    reason = "cap_changing"


class FrameLost(BookingError):
    """Another process started, changed, paused or took over the frame between gather and commit."""

    reason = "frame_lost"


class DatabaseFailure(BookingError):
    """PostgreSQL refused or did not answer."""

    reason = "database_failure"


class RqdFailure(BookingError):
    """RQD refused or did not answer."""

    retriable = True
    reason = "rqd_failure"


class NotReady(SchedulerError):
    """The Redis store is empty, restarted or failed over: nothing may be booked before it is bootstrapped again."""


class FencedOff(SchedulerError):
    """A newer leader was elected: Redis refuses what a task that an older leader sent would change."""


class InvalidInput(SchedulerError):
    """A value from a person or another program does not make sense; the message names its field."""


class WrongConfiguration(InvalidInput):
    """The settings cannot be used as they are: starting again would not help."""


class WrongSchema(WrongConfiguration):
    """The database has no OpenCue schema, one of a Cuebot older than V45, or our objects of an older revision."""
