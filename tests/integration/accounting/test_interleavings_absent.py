"""Absent from a snapshot is not gone: what was booked after the mark is not judged by a snapshot of before.

Played by production code, and by the same without its rule: whatever the snapshot lacks is taken away.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from opencue_sched.accounting import differences
from opencue_sched.accounting.keys import Record
from opencue_sched.accounting.ledger import Cause, Change
from tests.integration.accounting.interleaved import BOOK, BOOKED, BURST, SNAPSHOT, Side, finish, until
from tests.integration.accounting.interleaved_ours import Ours

Play = Callable[..., Side]


def _absent_is_gone(record: Record, actual: str | None, mark_seq: int, too_old: bool) -> Change | None:
    """The rule of a naive recompute: no look at the mark, nor at the age."""
    if actual is not None:
        return None
    return Change(record.proc_id, record.changed_seq, None, cause=Cause.MISSED_RELEASE)


@pytest.fixture(params=[True, False], ids=["ours", "absent is gone"])
def ruled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the rule is there. Without it production code is broken on purpose: the control."""
    if not request.param:
        monkeypatch.setattr(differences, "_judge", _absent_is_gone)
    return bool(request.param)


def test_a_booking_in_flight_is_not_in_the_snapshot_yet(play: Play, ruled: bool) -> None:
    side = play(Ours)
    side.run(BURST - 1)
    side.submit()
    worker = until(side.worker(), BOOKED)
    finish(side.recompute())
    assert side.counted() == (BURST if ruled else BURST - 1)
    finish(worker)
    assert side.running() == BURST


def test_what_was_committed_and_settled_after_the_snapshot_is_not_in_it(play: Play, ruled: bool) -> None:
    side = play(Ours)
    side.run(BURST - 1)
    side.submit()
    side.sql("UPDATE job_resource SET int_priority = 0")  # whoever comes next takes the frame of the next job
    other = until(side.worker(), BOOK)
    side.submit()
    stalled = until(side.recompute(), SNAPSHOT)
    finish(side.worker())
    finish(stalled)
    assert side.figures() == ((BURST, BURST) if ruled else (BURST, BURST - 1)), "running, and counted"
    finish(other)
    assert side.running() == (BURST if ruled else BURST + 1), "the room was lent again"
