"""A Redis that answers but takes no write is known by every spelling servers and redis-py have for it."""

from __future__ import annotations

import pytest
from redis.exceptions import MasterDownError, OutOfMemoryError, ReadOnlyError, ResponseError

from opencue_sched.accounting.ledger import answering
from opencue_sched.clients.store_errors import takes_no_write
from opencue_sched.errors import NotReady

IN_SCRIPT_62 = "Error running script (call to f_0a9f): @user_script:1: @user_script: 1: "


@pytest.mark.parametrize(
    "error",
    [
        ResponseError(f"{IN_SCRIPT_62}-READONLY You can't write against a read only replica."),
        ReadOnlyError("You can't write against a read only replica. script: 0a9f, on @user_script:1."),
        ResponseError(f"{IN_SCRIPT_62}-OOM command not allowed when used memory > 'maxmemory'."),
        OutOfMemoryError("command not allowed when used memory > 'maxmemory'. script: 0a9f, on @user_script:1."),
        MasterDownError("Link with MASTER is down and replica-serve-stale-data is set to 'no'."),
        ResponseError("MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist"),
        ResponseError("NOREPLICAS Not enough good replicas to write."),
        ResponseError("BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE."),
    ],
    ids=lambda error: f"{type(error).__name__}:{str(error)[:12]}",
)
def test_it_is_not_ready(error: ResponseError) -> None:
    assert takes_no_write(error)
    with pytest.raises(NotReady), answering():
        raise error


def test_an_error_of_ours_stays_one() -> None:
    error = ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")
    assert not takes_no_write(error)
    with pytest.raises(ResponseError, match="WRONGTYPE"), answering():
        raise error
