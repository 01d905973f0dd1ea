"""What can go wrong with a job on a board. Names and meanings are TaskFlow's; ClaimLost and BoardClosed are ours."""

from __future__ import annotations

from opencue_sched.domain.errors import SchedulerError


class BoardError(SchedulerError):
    """Base of the errors of a board."""


class JobFailure(BoardError):
    """A job cannot be posted, read or changed; also when the store does not answer."""


class UnclaimableJob(JobFailure):
    """Somebody has the job. ``owner`` says who."""

    def __init__(self, message: str, *, owner: str = "") -> None:
        super().__init__(message)
        self.owner = owner


class ClaimLost(JobFailure):
    """The claim this handle had ran out and the job was claimed again, by whomever: nothing was written."""


class BoardClosed(JobFailure):
    """The board is not connected (any more)."""


class NotFound(BoardError):
    """There is no such job, or nobody has claimed it. Not a JobFailure."""
