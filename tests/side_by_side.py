"""A pytest plugin: how tests of whole processes are shared out among the processes of pytest-xdist.

    pytest -p tests.side_by_side --numprocesses 4 --dist loadgroup tests/e2e tests/chaos

Each goes to whichever process is free, except that the cases of one test, and all tests of a file whose fleet takes
long to start, stay together. (The marks that --dist loadgroup goes by have no effect with pytest 9.) What takes longest
comes first, so that in the end no process works alone.
"""

from __future__ import annotations

from pathlib import PurePath

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

SHARING_A_FLEET = {
    "test_celery_commands.py",
    "test_coordination_leader.py",
    "test_real_rqd.py",
    "test_stores.py",
    "test_wheel.py",
}
# Files and tests, by how long they take.
LONGEST_FIRST = (
    "test_chaos_under_load.py",
    "test_stores.py",
    "test_celery_commands.py",
    "test_decisions.py",
    "test_demo.py",
    "test_coordination_leader.py",
    "test_wheel.py",
    "test_coordination_leader_steps.py",
    "test_pass_steps.py",
    "test_preloaded_queues_drain_from_the_most_specific_and_first_in_first_out",
    "test_fleets_of_different_facilities_do_not_disturb_each_other",
    "test_real_rqd.py",
    "test_farm_page.py",
    "test_a_worker_killed_in_mid_pass_is_followed_by_another",
    "test_fleet.py",
    "test_no_accident_strands_a_cluster_beyond_three_seconds",
)


class Together(LoadScopeScheduling):
    """The scope of a test is what it stays together with."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, _ = nodeid.partition("::")
        return file if PurePath(file).name in SHARING_A_FLEET else nodeid.partition("[")[0]

    def _reschedule(self, node: WorkerController) -> None:
        """One more than it runs is all that a process is given ahead: it begins none without knowing the next."""
        if not self.workqueue or self._pending_of(self.assigned_work[node]) <= 1:
            super()._reschedule(node)


def _rank(item: pytest.Item) -> int:
    names = (item.path.name, item.name.partition("[")[0])
    return min((LONGEST_FIRST.index(name) for name in names if name in LONGEST_FIRST), default=len(LONGEST_FIRST))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_rank)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Together | None:
    if config.getvalue("dist") != "loadgroup":
        return None
    config.option.loadscopereorder = False  # by their number
    return Together(config, log)
