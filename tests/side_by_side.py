"""A pytest plugin: how tests of whole processes are shared out among the processes of pytest-xdist.

    pytest -p tests.side_by_side --numprocesses 3 --dist loadgroup tests/e2e tests/chaos

Each goes to whichever process is free, except that the cases of one test, and all tests of a file whose fleet takes
long to start, stay together. (The marks that --dist loadgroup goes by have no effect with pytest 9.)
"""

from __future__ import annotations

from pathlib import PurePath

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

SHARING_A_FLEET = {
    "test_celery_commands.py",
    "test_coordination_leader.py",
    "test_real_rqd.py",
    "test_stores.py",
    "test_wheel.py",
}


class Together(LoadScopeScheduling):
    """The scope of a test is what it stays together with; those of many tests are handed out first."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, _ = nodeid.partition("::")
        return file if PurePath(file).name in SHARING_A_FLEET else nodeid.partition("[")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Together | None:
    return Together(config, log) if config.getvalue("dist") == "loadgroup" else None
