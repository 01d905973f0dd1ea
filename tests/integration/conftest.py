"""A database that knows when each transaction was committed, and tests that are not for a Cuebot's schema."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine

from opencue_sched.clients.postgres import OURS, ask
from opencue_sched.embedded.servers.services import EmbeddedPostgres
from opencue_sched.store.schema import read_origin, upgrade


@pytest.fixture(autouse=True)
def _without_cuebot(request: pytest.FixtureRequest) -> None:
    """Skip a test that is marked without_cuebot where the schema is a Cuebot's: with `make compat` alone."""
    marker = request.node.get_closest_marker("without_cuebot")
    if marker is not None and ask(request.getfixturevalue("engine"), read_origin) == "cuebot":
        assert "OPENCUE_SCHED_TEST_TEMPLATE" in os.environ, "a schema of our own migrations says that a Cuebot made it"
        pytest.skip(f"a Cuebot's schema: {marker.args[0]}")


@pytest.fixture(scope="module")
def engine_with_commit_times() -> Iterator[Engine]:
    """A migrated database of a server that keeps commit timestamps, as those of the benchmarks do."""
    with EmbeddedPostgres(configuration={"track_commit_timestamp": "on"}, in_memory=True) as server:
        upgrade(server.url)
        engine = create_engine(server.url, connect_args={"application_name": f"{OURS}-test"})
        yield engine
        engine.dispose()
