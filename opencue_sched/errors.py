"""The errors a booking can end with. ``retriable``: another host may do; otherwise the layer is skipped this pass."""

from __future__ import annotations


class SchedulerError(Exception):
    """Base of every error raised on purpose by this package."""


class BookingError(SchedulerError):
    """A planned proc that did not become a running frame.

    ``table`` names the cap of a CapExceeded, as book.lua does. ``outcome_unknown``: a COMMIT or a launch may have
    happened all the same.
    """

    retriable = False
    reason = "booking"

    def __init__(
        self,
        message: str,
        *,
        proc_id: str = "",
        host: str = "",
        layer_id: str = "",
        table: str = "",
        outcome_unknown: bool = False,
    ) -> None:
        super().__init__(message)
        self.proc_id = proc_id
        self.host = host
        self.layer_id = layer_id
        self.table = table
        self.outcome_unknown = outcome_unknown


class HostLocked(BookingError):
    """Another transaction holds the host row; the host is invalidated in the cache."""

    retriable = True
    reason = "host_locked"


class HostExhausted(BookingError):
    """The host row has less idle than the cache believed, or is no longer UP, OPEN and in its allocation."""

    retriable = True
    reason = "host_exhausted"


class AllocationOverBurst(BookingError):
    """The subscription's burst is reached."""

    reason = "allocation_over_burst"


class CapExceeded(BookingError):
    """A folder, job or licence cap is reached."""

    reason = "cap_exceeded"


class CapChanging(BookingError):
    """Another transaction is changing a cap of the frame's; it is booked under the new one, when that is committed."""

    reason = "cap_changing"


class FrameLost(BookingError):
    """Somebody else started, changed, paused or took over the frame between gather and commit."""

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
    """A newer leader was elected: what a task of an older one would still have changed is refused."""


class InvalidInput(SchedulerError):
    """Something a person or another program sent does not make sense; the message names the field."""


class WrongConfiguration(InvalidInput):
    """The settings cannot be read: starting again would not help."""


class WrongSchema(WrongConfiguration):
    """The database has no OpenCue schema, one of a Cuebot older than V45, or our objects of an older revision."""
