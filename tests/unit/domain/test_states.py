"""What exit statuses mean, and what of a log a terminal may be given."""

from __future__ import annotations

import pytest

from opencue_sched.domain.frame_command import log_path
from opencue_sched.domain.states import ExitStatus, exit_meaning
from opencue_sched.insight.frame_logs import harmless


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (1, "its command failed"),
        (127, "not found"),
        (128, "its command failed"),
        (134, "signal 6 (SIGABRT)"),
        (139, "signal 11 (SIGSEGV)"),
        (255, "its command failed"),
        (299, "taken back"),
        (-9, "its command failed"),
        (2**31 - 1, "its command failed"),
    ],
)
def test_an_exit_status_has_a_meaning(status: int, said: str) -> None:
    assert said in exit_meaning(status)


def test_every_status_of_opencue_has_words_of_its_own() -> None:
    words = [exit_meaning(status) for status in ExitStatus]
    assert len(set(words)) == len(words)
    assert not any("its command failed" in each for each in words)


@pytest.mark.parametrize("root", ["/shots/a", "/shots/a/"])
def test_a_log_is_where_rqd_writes_it(root: str) -> None:
    assert log_path(root, "show-shot-user_comp", "0001-render") == "/shots/a/show-shot-user_comp.0001-render.rqlog"


@pytest.mark.parametrize("code", [*range(9), *range(11, 32), *range(127, 160), 0x2028, 0x202E, 0x2066])
def test_no_control_reaches_a_terminal(code: int) -> None:
    assert chr(code) not in harmless(f"a{chr(code)}b\u00fc\tc\n") or code == 10
    assert harmless(f"a{chr(code)}b\u00fc\tc\n").endswith("b\u00fc\tc\n")
