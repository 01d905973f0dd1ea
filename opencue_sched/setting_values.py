"""What a value of a setting may look like: durations, lists, mappings and the URLs of the two stores.

The refusals name no value that may hold a password; who shows them names the variable.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_settings import NoDecode

from opencue_sched.domain.errors import InvalidInput
from opencue_sched.domain.redis_url import check_redis_url

_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?\s*$")
_SECONDS = {"ms": 0.001, None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_POSTGRESQL = re.compile(r"^postgres(ql)?(\+\w+)?://")


def as_seconds(value: Any) -> Any:
    """``"2m"`` as 120.0; what is no text is left as it is. Raises ValueError."""
    if isinstance(value, str):
        match = _DURATION.match(value)
        if match is None:
            raise ValueError(f"{value!r} is not a duration; write 30, '30s', '2m' or '3h'")
        return float(match.group(1)) * _SECONDS[match.group(2)]
    return value


def json_value(value: Any) -> Any:
    """A mapping, or a list in brackets, from the environment. Raises ValueError."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"{value!r} is not JSON ({error})") from error


def _words(value: Any) -> Any:
    if isinstance(value, str) and not value.lstrip().startswith("["):
        return tuple(word for part in value.split(",") if (word := part.strip()))
    return json_value(value)


def with_driver(database_url: str) -> str:
    """The URL with the driver named that we use, whichever it names."""
    return _POSTGRESQL.sub("postgresql+psycopg2://", database_url)


def _database_url(value: SecretStr) -> SecretStr:
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    url = value.get_secret_value()
    if not _POSTGRESQL.match(url):
        raise ValueError("database_url is not a PostgreSQL URL: postgresql://user:password@host:port/name")
    try:
        make_url(url)
    except (ArgumentError, ValueError):
        # Not even as the cause: SQLAlchemy shows what it could not read, which may be part of a password.
        raise ValueError(
            "database_url cannot be read: postgresql://user:password@host:port/name, with / @ and : in the password "
            "as %2F %40 and %3A, and a port that is a number"
        ) from None
    return value


def _redis_url(value: SecretStr) -> SecretStr:
    try:
        check_redis_url(value.get_secret_value())
    except InvalidInput as error:
        raise ValueError(str(error)) from None
    return value


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


_NAME = r"^[a-z0-9][a-z0-9_.-]{0,62}$"
Name = Annotated[str, Field(pattern=_NAME)]
"""Part of a queue's name; the grammar is that of coordination/names.py."""
HostlikeName = Annotated[str, Field(pattern=_NAME), BeforeValidator(_lower)]
"""As Name, but of what may be a host's name, in which upper case means nothing."""
FacilityName = Annotated[str, Field(pattern=_NAME.replace("a-z", "A-Za-z"))]
"""As its row has it; in lower case it is a group's name."""
Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_words)]
Texts = Annotated[dict[str, str], NoDecode, BeforeValidator(json_value)]
Seconds = Annotated[float, BeforeValidator(as_seconds), Field(gt=0)]
DatabaseUrl = Annotated[SecretStr, AfterValidator(_database_url)]
RedisUrl = Annotated[SecretStr, AfterValidator(_redis_url)]
