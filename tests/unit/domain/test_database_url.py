"""Database URLs: what is read of them, what SQLAlchemy makes of what is written, and what is shown."""

from __future__ import annotations

import pytest
from sqlalchemy import create_engine, make_url

from opencue_sched.domain.database_url import read_database_url
from opencue_sched.errors import InvalidInput
from opencue_sched.settings import Settings

TWO = {"host": "h1,h2", "port": "5432,5433", "user": "u", "password": "p", "dbname": "db"}
SOCKET = {"host": "/run/postgresql", "user": "u", "password": "p", "dbname": "db"}


def connects_with(url: str) -> dict[str, str]:
    """What the driver would be called with."""
    written = read_database_url(url).for_sqlalchemy
    _, named = create_engine(written).dialect.create_connect_args(make_url(written))
    return {option: str(value) for option, value in named.items()}


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("postgresql://u:p@h1:5432,h2:5433/db", TWO),
        ("postgresql://u:p@/db?host=h1,h2&port=5432,5433", TWO),
        ("postgresql://u:p@/db?host=h1:5432&host=h2:5433", TWO),
        (
            "postgresql://u:p@h1:5432,h2:5433/db?target_session_attrs=read-write",
            {**TWO, "target_session_attrs": "read-write"},
        ),
        ("postgresql://u:p@h1,h2/db", {**TWO, "port": ","}),
        ("postgresql://u:p@h1,h2/db?port=5433", {**TWO, "port": "5433,5433"}),
        ("postgresql://u:p@h1:5432,[::1]:5433/db", {**TWO, "host": "h1,::1"}),
        ("postgresql://u:p@%2Frun%2Fpostgresql/db", SOCKET),
        ("postgresql://u:p@%2Frun%2Fpostgresql:5433/db", {**SOCKET, "port": "5433"}),
        ("postgresql:///db?host=/run/postgresql&user=u&password=p", SOCKET),
        ("postgresql://h/db?user=u&password=p%26%40+", {"host": "h", "user": "u", "password": "p&@+", "dbname": "db"}),
        (
            "postgresql://u:p%25%3F%23@h:5/d%20b",
            {**SOCKET, "host": "h", "port": "5", "password": "p%?#", "dbname": "d b"},
        ),
        (
            "postgresql://h/db?options=-csearch_path%3Dfarm",
            {"host": "h", "dbname": "db", "options": "-csearch_path=farm"},
        ),
        ("postgresql://h?dbname=what%3F", {"host": "h", "dbname": "what?"}),
    ],
)
def test_a_url_means_what_it_means_to_libpq(url: str, named: dict[str, str]) -> None:
    assert connects_with(url) == named


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:hush@h:5433/db", "postgresql+psycopg2://u:***@h:5433/db"),
        ("postgresql://h/db?user=u&password=hush", "postgresql+psycopg2://u:***@h/db"),
        ("postgresql://u@h/db?sslpassword=hush", "postgresql+psycopg2://u@h/db"),
        ("postgresql://u@h/db?scram_client_key=hush&options=-c%20my.secret%3Dhush", "postgresql+psycopg2://u@h/db"),
        ("postgresql://u:hush@h1:5432,h2/db", "postgresql+psycopg2://u:***@h1:5432,h2/db"),
        ("postgresql://u:hush@%2Frun%2Fpostgresql/db", "postgresql+psycopg2://u:***@/run/postgresql/db"),
        ("postgresql:///db", "postgresql+psycopg2:///db"),
    ],
)
def test_no_secret_is_shown_wherever_it_stands(url: str, shown: str) -> None:
    settings = Settings(database_url=url)
    assert settings.database_shown == shown
    assert "hush" not in repr(settings) + repr(read_database_url(url))


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:ab@hush@h/db",
        "postgresql://u:12/hush@h/db",
        "postgresql://u:ab/hush@h/db",
        "postgresql://u@h/db?password",
        "postgresql://u@h/db?hush",
        "postgresql://u:p@h1:1,h2:hush/db",
        "postgresql://u:p@h1:65536/db",
        "postgresql://u:p@h1,h2,h3/db?port=1,2",
        "postgresql://u:p@h:1:2/db",
    ],
)
def test_half_a_password_is_neither_taken_for_a_host_nor_shown(url: str) -> None:
    with pytest.raises(InvalidInput, match="%40") as refused:
        read_database_url(url)
    assert "hush" not in str(refused.value)


def test_several_hosts_may_stand_in_the_settings_of_the_section() -> None:
    settings = Settings(database={"db_host": "h1,h2", "db_port": 5433, "db_pass": "hush"})
    assert settings.database_shown == "postgresql+psycopg2://cuebot:***@h1:5433,h2:5433/cuebot"
