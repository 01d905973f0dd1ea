"""Database users that own nothing."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

from pydantic import SecretStr
from sqlalchemy import Connection, Engine, make_url, text

from opencue_sched.settings import Settings
from opencue_sched.store.privileges import CHANGED, CHANGES, READ, READ_ON_OUR_SCHEMA


@contextmanager
def database_user(engine: Engine) -> Iterator[str]:
    """The name, and password, of a user that may nothing."""
    name = f"limited_{secrets.token_hex(4)}"
    run_all(engine, f"CREATE ROLE {name} LOGIN PASSWORD '{name}'")
    yield name
    run_all(engine, f"DROP OWNED BY {name}", f"DROP ROLE {name}")


def as_user(settings: Settings, user: str) -> Settings:
    """These settings, with that user in the database's URL."""
    url = make_url(settings.sqlalchemy_url).set(username=user, password=user)
    return settings.model_copy(update={"database_url": SecretStr(url.render_as_string(hide_password=False))})


def grant_what_doctor_asks_for(engine: Engine, user: str) -> None:
    """Just these privileges, and no others."""
    with engine.connect() as connection:
        read = _there(connection, READ, READ_ON_OUR_SCHEMA)
        changed = _there(connection, CHANGED)
    run_all(
        engine,
        f"GRANT SELECT ON {', '.join(read)} TO {user}",
        f"GRANT {', '.join(CHANGES)} ON {', '.join(changed)} TO {user}",
    )


def _there(connection: Connection, *tables: Sequence[str]) -> list[str]:
    """Those of the tables that this schema has: one of a Cuebot's may lack some."""
    asked = text("SELECT to_regclass(:name)")
    return [name for name in chain(*tables) if connection.scalar(asked, {"name": name})]


def run_all(engine: Engine, *statements: str) -> None:
    """Run statements as the owner, in one transaction."""
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
