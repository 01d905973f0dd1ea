"""A PostgreSQL server that has the uuid-ossp extension, which the embedded one has not.

OPENCUE_SCHED_COMPAT_DATABASE_URL names one (with a user who may create databases and extensions). Otherwise the newest
PostgreSQL that Debian's packages installed here is started on a free port with a data directory of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from opencue_sched.embedded.servers.processes import ServiceFailed
from opencue_sched.embedded.servers.services import EmbeddedPostgres

_INSTALLATIONS = Path("/usr/lib/postgresql")


def debian_programs() -> Path | None:
    """The directory with the programs of the newest PostgreSQL that Debian's packages installed here."""
    versions = [path for path in _INSTALLATIONS.glob("*/bin") if (path / "initdb").is_file()]
    return max(versions, key=lambda path: int(path.parent.name), default=None)


def wanted_programs() -> Path:
    """The same for a test: without them it fails in CI, and is skipped elsewhere."""
    programs = debian_programs()
    if programs is None and not os.environ.get("CI"):
        pytest.skip("Debian's PostgreSQL is not installed: apt-get install postgresql")
    assert programs is not None, "CI needs Debian's PostgreSQL: apt-get install postgresql"
    return programs


@contextmanager
def compat_server() -> Iterator[str]:
    """URL of a maintenance database on a server with uuid-ossp, as long as the context lasts."""
    given = os.environ.get("OPENCUE_SCHED_COMPAT_DATABASE_URL")
    if given:
        yield given
        return
    programs = debian_programs()
    if programs is None:
        raise ServiceFailed(
            "no PostgreSQL with uuid-ossp: set OPENCUE_SCHED_COMPAT_DATABASE_URL, or install Debian's postgresql"
        )
    with EmbeddedPostgres(programs=programs) as server:
        yield server.url.replace("+psycopg2", "")
