"""A pytest plugin: how tests are shared out among the processes of pytest-xdist.

    pytest -p tests.side_by_side --numprocesses 6 --dist loadgroup tests

A file of unit or integration tests goes to whichever process is free, in the order given. So does a test of whole
processes, except that its cases, and all tests of a file whose fleet takes long to start, stay together. (The marks
that --dist loadgroup goes by have no effect with pytest 9.) Of these what takes longest comes first, so that in the end
no process works alone; and they are spread over the others, because they wait as long as the others compute.
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
    "test_coordination_leader.py",
    "test_every_cluster_of_a_joint_pass_comes_back_by_itself_wherever_it_dies",
    "test_demo.py",
    "test_decisions.py",
    "test_wheel.py",
    "test_preloaded_queues_drain_from_the_most_specific_and_first_in_first_out",
    "test_celery_commands.py",
    "test_no_accident_strands_a_cluster_beyond_three_seconds",
    "test_fleets_of_different_facilities_do_not_disturb_each_other",
    "test_fleet.py",
    "test_pass_steps.py",
    "test_dashboards.py",
    "test_coordination_leader_steps.py",
    "test_shards.py",
    "test_a_killed_instance_is_gone_within_15_seconds_and_its_messages_go_to_its_group",
    "test_a_duplicate_instance_is_refused_with_a_clear_error",
    "test_a_worker_killed_in_mid_pass_is_followed_by_another",
    "test_duty_steps.py",
    "test_coordination_board.py",
    "test_farm_page.py",
    "test_redis_urls.py",
    "test_release_feeds.py",
    "test_real_rqd.py",
)


class Together(LoadScopeScheduling):
    """The scope of a test is what it stays together with."""

    def _split_scope(self, nodeid: str) -> str:
        return _scope(nodeid)

    def _reschedule(self, node: WorkerController) -> None:
        """One more than it runs is all that a process is given ahead: it begins none without knowing the next."""
        if not self.workqueue or self._pending_of(self.assigned_work[node]) <= 1:
            super()._reschedule(node)


def _of_processes(nodeid: str) -> bool:
    return nodeid.startswith(("tests/e2e/", "tests/chaos/"))


def _scope(nodeid: str) -> str:
    file, _, _ = nodeid.partition("::")
    alone = _of_processes(nodeid) and PurePath(file).name not in SHARING_A_FLEET
    return nodeid.partition("[")[0] if alone else file


def _rank(item: pytest.Item) -> int:
    names = (item.path.name, item.name.partition("[")[0])
    return min((LONGEST_FIRST.index(name) for name in names if name in LONGEST_FIRST), default=len(LONGEST_FIRST))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Both kinds begin at once and end at once."""
    place: dict[str, float] = {}
    slow = sorted((item for item in items if _of_processes(item.nodeid)), key=_rank)
    for kind in (slow, [item for item in items if not _of_processes(item.nodeid)]):
        scopes = dict.fromkeys(_scope(item.nodeid) for item in kind)
        place |= {scope: number / len(scopes) for number, scope in enumerate(scopes)}
    items.sort(key=lambda item: place[_scope(item.nodeid)])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Together | None:
    if config.getvalue("dist") != "loadgroup":
        return None
    config.option.loadscopereorder = False  # by their number
    return Together(config, log)
