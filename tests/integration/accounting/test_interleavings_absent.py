"""Absent from a snapshot is not gone: what was booked after the mark is not judged by a snapshot of before.

Played by production code, and by the same without its rule: whatever the snapshot lacks is taken away, without a look
at the mark, nor at the age.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from opencue_sched.accounting import differences
from tests.integration.accounting.interleaved import BOOK, BOOKED, BURST, SNAPSHOT, Side, finish, until
from tests.integration.accounting.interleaved_ours import Ours
from tests.kit.mutants import changed_code

Play = Callable[..., Side]


JUDGED_BY_MARK_AND_AGE = "if in_flight or changed_since_mark:"


@pytest.fixture(params=[True, False], ids=["ours", "absent is gone"])
def ruled(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the rule is there. Without it production code is broken on purpose: the control."""
    with changed_code(differences, {} if request.param else {JUDGED_BY_MARK_AND_AGE: "if False:"}):
        yield bool(request.param)


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
