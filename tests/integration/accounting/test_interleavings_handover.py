"""A whole recompute beside our own hand-over of a show, around the COMMIT from which on everybody sees the new flag.

Before it the entries of what runs are in the ledger already, and a recompute that still sees the show unmanaged takes
them for left over. Played at every moment where it matters by production code, and by a hand-over that does not give
its entries new sequence numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import text

from opencue_sched.accounting import show_handover
from opencue_sched.accounting.imported_shows import imported_shows
from opencue_sched.accounting.recompute import read_snapshot
from tests.integration.accounting.interleaved import COMMIT, JUDGED, SNAPSHOT, Side, finish, until
from tests.integration.accounting.interleaved_ours import Ours, SharedLicence
from tests.integration.accounting.stepping import Actor
from tests.kit.mutants import changed_code

MARKED = "sql SELECT pk_show, CAST(xmin AS text) AS ve"
"""What a recompute does when it has its mark: ask who is managed."""

START, VISIBLE, RENEWED = "start", "redis SCAN", "redis MULTI"
"""Moments of a hand-over beside its COMMIT: nothing is done; everybody sees its flag; its entries have new numbers."""

MOMENTS = (START, COMMIT, VISIBLE, RENEWED, SNAPSHOT, JUDGED)


@pytest.fixture(params=[True, False], ids=["ours", "numbers stay"])
def renewing(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether entries get new numbers. Without them production code is broken on purpose: the control."""
    with changed_code(show_handover, {} if request.param else {"renew_entries(self._ledger, show_id)": "pass"}):
        yield bool(request.param)


@pytest.mark.parametrize("moment", [MARKED, SNAPSHOT, JUDGED], ids=["mark", SNAPSHOT, JUDGED])
def test_a_recompute_around_the_commit_of_a_hand_over(play: Callable[..., Side], moment: str, renewing: bool) -> None:
    """It comes to ``moment`` at one point of the hand-over, and to its end at another.

    The show was ours before: a Cuebot took it, and nobody has retired its entries.
    """
    side = play(Ours)
    assert isinstance(side, Ours)
    shared = side.share_a_licence(managed=True)
    wrong = next(filter(None, (_wrong(side, shared, *pair, moment=moment) for pair in _pairs())), "")
    # One that asks who is managed when the flag is there sees it; any other can take the entries away for good.
    assert bool(wrong) == (not renewing and moment != MARKED), wrong


def _pairs() -> Iterator[tuple[str, str | None]]:
    """Where a recompute begins and ends: None is after the hand-over."""
    for i, begun in enumerate(MOMENTS[:3]):
        for ended in (*MOMENTS[i + 1 :], None):
            yield begun, ended


def _wrong(side: Ours, shared: SharedLicence, begun: str, ended: str | None, *, moment: str) -> str:
    """What is wrong: the licence is lent to somebody else; or in the end not all that runs is in the ledger."""
    where = f"recompute from {begun} to {ended}"
    with side.engine.begin() as cuebot:
        cuebot.execute(text("UPDATE show SET b_scheduler_managed = false WHERE pk_show = :show"), {"show": shared.show})
    flip = side.flip(shared.show, managed=True)
    to(flip, begun)
    recompute = until(side.recompute(), moment)
    if ended is not None:
        to(flip, ended)
        finish(recompute)
    while flip.step():
        if shared.taken_again(load=False):
            return f"{where}: lent again when the flip was at {flip.boundary}"
    finish(recompute)
    assert shared.show in imported_shows(side.client)
    running = read_snapshot(side.engine)[1]
    if {record.proc_id: record.entry for record in side.ledger.records()} != dict(running):
        return f"{where}: not counted in the end"
    if shared.taken_again(load=True):
        return f"{where}: lent again in the end"
    return ""


def to(flip: Actor, moment: str) -> None:
    """Up to this moment of it; ``VISIBLE`` and ``RENEWED`` are the first of their kind after the COMMIT."""
    if moment == START:
        return
    if moment in (RENEWED, SNAPSHOT, JUDGED) and flip.boundary in (START, COMMIT):
        to(flip, VISIBLE)
    until(flip, moment)
