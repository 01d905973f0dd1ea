"""How Alembic runs here: one connection, one lock, and only on a database it may touch.

The version table is our own (``opencue_sched_version``): a database made by Cuebot keeps its Flyway history untouched.
"""

from __future__ import annotations

import sys
from logging.config import fileConfig

from alembic import context
from pydantic import ValidationError
from sqlalchemy import Connection, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

from opencue_sched.clients.postgres import engine_at
from opencue_sched.clients.postgres_sessions import OWN_SESSIONS, SHARED, sessions_of
from opencue_sched.errors import SchedulerError, TakesNoWrites, WrongConfiguration
from opencue_sched.insight.health import describe_failure, does_not_answer
from opencue_sched.settings import get_settings, setting_problems
from opencue_sched.store.schema import (
    VERSION_TABLE,
    announce_start_times,
    check_writable,
    explained,
    migration_lock,
    newly_possible,
    refuse_limits_of_one_name,
    refuse_too_old,
)

EXIT_FAILED = 1
EXIT_AWAY = 75
EXIT_CONFIG = 78

config = context.config
if config.config_file_name is not None and config.get_section("loggers"):
    fileConfig(config.config_file_name, disable_existing_loggers=False)


def _migrate(connection: Connection) -> None:
    check_writable(connection)
    refuse_too_old(connection)
    if config.attributes.get("upgrades"):
        # Here as well as in its revision: those before it may be committed by then.
        refuse_limits_of_one_name(connection)
    connection.commit()
    context.configure(connection=connection, version_table=VERSION_TABLE)
    with context.begin_transaction():
        context.run_migrations()
    if newly_possible(connection):
        announce_start_times(connection)
        connection.commit()
    if not context.get_context().get_current_heads():
        connection.execute(text(f"DROP TABLE IF EXISTS {VERSION_TABLE}"))
        connection.commit()


def run() -> None:
    """Migrate the database of ``config.attributes["url"]``, or of the settings when Alembic's own command runs."""
    if context.is_offline_mode():
        raise SystemExit("these migrations look at the database before they change it: --sql cannot work")
    url = config.attributes.get("url") or get_settings().sqlalchemy_url
    engine = engine_at(url, application_name="opencue-sched-migrate", poolclass=NullPool)
    with explained(), engine.connect() as connection:
        if not sessions_of(engine).own:
            raise WrongConfiguration(f"{SHARED}, nor a lock of the migration's held: {OWN_SESSIONS}")
        with migration_lock(connection):
            _migrate(connection)


def run_for_alembic() -> None:
    """As ``run``; what an operator can do something about ends Alembic's own command with a line each."""
    try:
        run()
    except ValidationError as error:
        _end(EXIT_CONFIG, *setting_problems(error))
    except WrongConfiguration as error:
        _end(EXIT_CONFIG, str(error))
    except TakesNoWrites as error:
        _end(EXIT_AWAY, str(error))
    except SchedulerError as error:
        _end(EXIT_FAILED, str(error))
    except OperationalError as error:
        _end(EXIT_AWAY if does_not_answer(error) else EXIT_CONFIG, describe_failure(error, get_settings()))


def _end(status: int, *reasons: str) -> None:
    for reason in reasons:
        print(f"error: {reason}", file=sys.stderr)  # noqa: T201 - Alembic's command has no other voice
    raise SystemExit(status)


if "url" in config.attributes:
    run()
else:
    run_for_alembic()
