"""Waiting for workers to hear what PostgreSQL notifies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine, create_engine, text

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


_END_OTHERS = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
    """


@contextmanager
def nobody_hears(connection: Connection) -> Iterator[None]:
    """The database takes no connection, and has ended all but this one: to workers it is away."""
    url = connection.engine.url
    admin = create_engine(url.set(database="postgres"), isolation_level="AUTOCOMMIT")
    with admin.connect() as session:
        session.execute(text(f'ALTER DATABASE "{url.database}" ALLOW_CONNECTIONS false'))
        try:
            eventually(lambda: not connection.execute(text(_END_OTHERS)).all(), 20, "no other session")
            yield
        finally:
            session.execute(text(f'ALTER DATABASE "{url.database}" ALLOW_CONNECTIONS true'))
    admin.dispose()
