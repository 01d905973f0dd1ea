"""The listener reaches the database at whatever address the engine reaches it."""

from __future__ import annotations

import pytest
from psycopg2.extensions import make_dsn, parse_dsn
from pydantic import SecretStr

from opencue_sched.settings import Settings
from opencue_sched.worker.events import database_address


@pytest.mark.parametrize(
    ("written", "meant"),
    [("pa/ss", "pa/ss"), ("p?a=ss", "p?a=ss"), ("p#ss word", "p#ss word"), ("p%40ss", "p@ss"), ("it's", "it's")],
)
def test_a_password_that_sqlalchemy_understands_is_understood_here(written: str, meant: str) -> None:
    """PostgreSQL's own library ends the address at such characters when they are not percent-encoded."""
    settings = Settings(database_url=SecretStr(f"postgresql://cuebot:{written}@db.example:5433/farm?sslmode=require"))
    assert parse_dsn(make_dsn(**database_address(settings.sqlalchemy_url))) == {
        "user": "cuebot",
        "password": meant,
        "host": "db.example",
        "port": "5433",
        "dbname": "farm",
        "sslmode": "require",
    }


def test_a_socket_and_several_hosts_are_reached_too() -> None:
    assert database_address("postgresql+psycopg2://cuebot@/farm?host=/run/postgresql") == {
        "user": "cuebot",
        "host": "/run/postgresql",
        "dbname": "farm",
    }
    several = database_address("postgresql+psycopg2://cuebot@/farm?host=one:5432&host=two:5433")
    assert (several["host"], several["port"]) == ("one,two", "5432,5433")
