"""Waiting for workers to hear what PostgreSQL notifies."""

from __future__ import annotations

from sqlalchemy import Engine, text

from tests.kit.polling import eventually

_LISTENERS = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND application_name = 'opencue-sched-listener'
      AND state = 'idle' AND query LIKE 'LISTEN%'
    """


def eventually_listen(engine: Engine, listeners: int = 1) -> None:
    """Return when so many listeners have subscribed to their channels."""

    def there() -> bool:
        with engine.connect() as connection:
            return int(connection.execute(text(_LISTENERS)).scalar_one()) == listeners

    eventually(there, 20, f"{listeners} that listen")
