"""The database engine of a process. Create it after a fork, never before."""

from __future__ import annotations

from sqlalchemy import Engine, create_engine

from opencue_sched.settings import Settings


def make_engine(settings: Settings, *, application_name: str = "opencue-sched", pool_size: int | None = None) -> Engine:
    """An engine whose connections have a connect time-out, a statement time-out and keep-alives.

    READ COMMITTED is the default isolation; a caller that needs another says so per connection.
    """
    database = settings.database
    return create_engine(
        settings.sqlalchemy_url,
        pool_size=pool_size or database.pool_size,
        max_overflow=0,
        pool_pre_ping=True,
        pool_recycle=3600,
        pool_timeout=database.connect_timeout,
        connect_args={
            "connect_timeout": max(1, round(database.connect_timeout)),
            "application_name": application_name,
            "options": f"-c statement_timeout={int(database.statement_timeout * 1000)} -c timezone=UTC",
            "keepalives": 1,
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
        },
    )
