"""The thread that follows Cuebot's hints outlives whatever a hint leads to."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from structlog.testing import capture_logs

from opencue_sched.operate.release_hints import ReleaseHints


def test_an_unexpected_error_is_told_and_everything_looked_at_once_more():
    looked: list[int] = []
    again = threading.Event()

    def look() -> None:
        looked.append(1)
        if len(looked) == 1:
            raise KeyError("nobody thought of this")
        again.set()

    gate = SimpleNamespace(lease=1, next_look=0.01, renew=lambda: 1, resign=lambda: None)
    hints = ReleaseHints(gate, reconcile=lambda _: None, load_caps=lambda _: None, look_at_all=look)
    with capture_logs() as said:
        hints.start()
        assert again.wait(10)
        hints.stop()
    assert [(line["event"], line["log_level"]) for line in said] == [("hints_left_for_later", "error")]
