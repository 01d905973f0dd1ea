"""What exit statuses mean, and what of a log a terminal may be given."""

from __future__ import annotations

import pytest

from opencue_sched.domain.frame_command import log_path
from opencue_sched.domain.states import ExitStatus, exit_meaning
from opencue_sched.insight.frame_logs import harmless


@pytest.mark.parametrize(
    ("status", "signal"),
    [(134, "6 (SIGABRT)"), (139, "11 (SIGSEGV)")],
)
def test_a_status_of_a_shell_names_the_signal(status: int, signal: str) -> None:
    assert signal in exit_meaning(status)


@pytest.mark.parametrize("status", [1, 128, 255, -9, 2**31 - 1])
def test_a_status_that_says_nothing_more_is_a_failure(status: int) -> None:
    assert exit_meaning(status) == exit_meaning(2)


@pytest.mark.parametrize("status", [127, 299])
def test_a_status_that_says_more_has_words_of_its_own(status: int) -> None:
    assert exit_meaning(status) != exit_meaning(2)


def test_every_status_of_opencue_has_words_of_its_own() -> None:
    words = [exit_meaning(status) for status in ExitStatus]
    assert len(set(words)) == len(words)
    assert exit_meaning(2) not in words


@pytest.mark.parametrize("root", ["/shots/a", "/shots/a/"])
def test_a_log_is_where_rqd_writes_it(root: str) -> None:
    assert log_path(root, "show-shot-user_comp", "0001-render") == "/shots/a/show-shot-user_comp.0001-render.rqlog"


@pytest.mark.parametrize("code", [*range(9), *range(11, 32), *range(127, 160), 0x2028, 0x202E, 0x2066])
def test_no_control_reaches_a_terminal(code: int) -> None:
    assert chr(code) not in harmless(f"a{chr(code)}b\u00fc\tc\n") or code == 10
    assert harmless(f"a{chr(code)}b\u00fc\tc\n").endswith("b\u00fc\tc\n")
