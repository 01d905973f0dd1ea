"""A pytest plugin: how tests are shared out among the processes of pytest-xdist.

    pytest -p tests.side_by_side --numprocesses 8 --dist loadgroup tests

A file of unit or integration tests goes to whichever process is free. So does a test of whole processes, except that
its cases, and all tests of a file whose fleet or browser takes long to start, stay together. (The marks that --dist
loadgroup goes by have no effect with pytest 9.) Of both what takes longest comes first, so that in the end no process
works alone; and the latter are spread over the others, because they wait as long as the others compute.
What is played on a second PostgreSQL (tests/second_postgres.py) comes after all others, so that each process stops the
first one and starts the second but once.

What the processes have forked (benchmarks/warm_start.py) comes from one process, which loads it once for all of them.

How long a test of whole processes takes is what it took in the last run, which pytest's cache keeps. What has never run
there may take any time and so comes before the rest, in a fresh clone all of it: what is marked as long, by the seconds
that the mark says, and then what has the most tests. By these alone all other files are put in order: those of one
package, which wait or compute alike, are not all played at once then.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import PurePath

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from benchmarks import warm_start
from tests.second_postgres import SECOND

SHARING_A_FLEET = {
    "test_celery_commands.py",
    "test_coordination_leader.py",
    "test_farm_page.py",
    "test_real_rqd.py",
    "test_stores.py",
    "test_wheel.py",
}
SECONDS_IN_CACHE = "side_by_side/seconds_of_tests"
SECONDS_OF_TESTS = pytest.StashKey[dict[str, float]]()
"""Seconds that each test of whole processes took when it last ran, by its id."""

WARM_SERVER = "side_by_side/warm_server"
NAME_OF_WARM_SERVER = pytest.StashKey[str]()
"""The process that forks for all processes of this run."""


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
    scope = nodeid.partition("[")[0] if alone else file
    return f"{scope} {SECOND}" if _on_second(nodeid) else scope


def _on_second(scope: str) -> bool:
    """Whether the test, or the tests that stay together, are played on the second PostgreSQL."""
    return SECOND in scope


def _expected_seconds(tests: list[pytest.Item], seconds_of_tests: dict[str, float]) -> float:
    """Seconds that tests which stay together took; infinite when none of them has run."""
    known = [seconds_of_tests[test.nodeid] for test in tests if test.nodeid in seconds_of_tests]
    return sum(known) if known else math.inf


def _stated_seconds(tests: list[pytest.Item]) -> float:
    """Seconds that tests which stay together take by what they are marked with."""
    marks = [mark for test in tests if (mark := test.get_closest_marker("long"))]
    return sum(float(mark.args[0]) for mark in marks)


def pytest_configure(config: pytest.Config) -> None:
    # A process of pytest-xdist gets them from the one that started it: all must come to the same order.
    workerinput = getattr(config, "workerinput", None)
    cache = getattr(config, "cache", None)
    if workerinput is not None:
        seconds = workerinput[SECONDS_IN_CACHE]
        warm_start.share(workerinput[WARM_SERVER])
    else:
        seconds = cache.get(SECONDS_IN_CACHE, {}) if cache else {}
    config.stash[SECONDS_OF_TESTS] = seconds
    config.pluginmanager.register(_Timekeeper(), "timekeeper")


def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    servers = contextlib.ExitStack()
    config.add_cleanup(servers.close)
    config.stash[NAME_OF_WARM_SERVER] = servers.enter_context(warm_start.shared_server())


def pytest_configure_node(node: WorkerController) -> None:
    node.workerinput[SECONDS_IN_CACHE] = node.config.stash[SECONDS_OF_TESTS]
    node.workerinput[WARM_SERVER] = node.config.stash[NAME_OF_WARM_SERVER]


class _Timekeeper:
    """Adds up what each test of whole processes takes in this run, and writes it into pytest's cache at the end."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if _of_processes(report.nodeid):
            self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        cache = getattr(session.config, "cache", None)
        if self._seconds and cache and not hasattr(session.config, "workerinput"):
            # Beside what another run, of other tests, has written since this one began.
            cache.set(SECONDS_IN_CACHE, {**cache.get(SECONDS_IN_CACHE, {}), **self._seconds})


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Both kinds begin at once and end at once; then comes what is played on the second PostgreSQL, the slow first."""
    seconds_of_tests = config.stash[SECONDS_OF_TESTS]
    scopes: dict[str, list[pytest.Item]] = {}
    for test in items:
        scopes.setdefault(_scope(test.nodeid), []).append(test)
    longest_first = sorted(
        scopes,
        key=lambda scope: (
            -_expected_seconds(scopes[scope], seconds_of_tests),
            -_stated_seconds(scopes[scope]),
            -len(scopes[scope]),
        ),
    )
    place: dict[str, float] = {}
    for of_processes in (True, False):
        kind = [scope for scope in longest_first if _of_processes(scope) is of_processes and not _on_second(scope)]
        place |= {scope: number / len(kind) for number, scope in enumerate(kind)}
    place |= {scope: number for number, scope in enumerate(_with_short_ones_between(longest_first), start=1)}
    items.sort(key=lambda test: place[_scope(test.nodeid)])


def _with_short_ones_between(longest_first: Sequence[str]) -> list[str]:
    """What is played on the second PostgreSQL. A process is given the next before it begins one: what is of whole
    processes is followed by one of the shortest."""
    slow = [scope for scope in longest_first if _on_second(scope) and _of_processes(scope)]
    others = [scope for scope in longest_first if _on_second(scope) and not _of_processes(scope)]
    order = [*others[-len(slow) :], *others[: -len(slow)]] if slow else others
    for number, scope in enumerate(slow):
        order.insert(2 * number, scope)
    return order


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Together | None:
    if config.getvalue("dist") != "loadgroup":
        return None
    config.option.loadscopereorder = False  # by their number
    return Together(config, log)
