"""A database that knows when each transaction was committed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine

from opencue_sched.embedded.services import EmbeddedPostgres
from opencue_sched.store.schema import upgrade


@pytest.fixture(scope="module")
def engine_with_commit_times() -> Iterator[Engine]:
    """A migrated database of a server that keeps commit timestamps, as those of the benchmarks do."""
    with EmbeddedPostgres(configuration={"track_commit_timestamp": "on"}, in_memory=True) as server:
        upgrade(server.url)
        engine = create_engine(server.url)
        yield engine
        engine.dispose()
