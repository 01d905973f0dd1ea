"""A worker that cannot start says by its exit status whether starting it again can help."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NoReturn

import psycopg2
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from sqlalchemy.exc import OperationalError

from opencue_sched.errors import InvalidInput, NotReady


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NotReady("the store was lost, or taken over, while its filler waited"), 75),
        (RedisConnectionError("Connection closed by server."), 75),
        (OperationalError("SELECT 1", {}, psycopg2.OperationalError("server closed the connection unexpectedly")), 75),
        (InvalidInput("accounting.release_feed differs from the running fleet's"), 78),
    ],
    ids=["lost while it was filled", "Redis lost", "PostgreSQL lost", "wrong configuration"],
)
def test_only_a_wrong_configuration_is_told_as_one(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opencue_sched import celery

    def fails(*_: object, **__: object) -> NoReturn:
        raise error

    def exits(code: int) -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setattr(celery.os, "_exit", exits)
    step = celery.ProcessStep.__new__(celery.ProcessStep)
    app = SimpleNamespace(process=SimpleNamespace(start=fails))
    with pytest.raises(SystemExit) as ended:
        step.start(SimpleNamespace(app=app, hostname="w@h", concurrency=1))
    assert ended.value.code == status
