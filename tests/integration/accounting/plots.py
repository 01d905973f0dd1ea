"""Short stories that games of the model-based test are rich in, because chance alone seldom tells them.

Each is a few moves in the order in which a rule of the protocol matters; what comes before, after and beside it is the
game's. At each ``yield`` the machine looks whether all is well: at once when something was booked, before caps change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.integration.accounting.machine import Accounting
    from tests.integration.accounting.stepping import Actor

ALL = 99
BEFORE, AFTER = "before COMMIT", "after COMMIT"
"""Where an actor stops: on either side of its next COMMIT. A snapshot ends with one too."""

Plot = Callable[["Accounting", dict[str, Any]], Iterator[None]]


def booked_during_a_recompute(game: Accounting, how: dict[str, Any]) -> Iterator[None]:
    """The snapshot is taken, then a proc is booked, committed and settled, then the ledger is read."""
    game.recompute(None, AFTER)
    recompute = game.newest("recompute")
    game.book(**how, steps=ALL)
    yield
    game.go_on(recompute)
    yield


def in_flight_during_a_recompute(game: Accounting, how: dict[str, Any]) -> Iterator[None]:
    """A whole recompute passes while a booking is about to be committed."""
    game.book(**how, steps=BEFORE)
    yield
    game.recompute(None, ALL)
    yield


def clock_set_forward(game: Accounting, how: dict[str, Any]) -> Iterator[None]:
    """Redis TIME makes a booking old that is about to be committed."""
    game.book(**how, steps=BEFORE)
    yield
    game.disaster("clock", 0)
    yield
    game.recompute(None, ALL)
    yield


def recompute_that_stalls(game: Accounting, how: dict[str, Any]) -> Iterator[None]:
    """A booking is committed after the snapshot and grows old, unsettled, before the ledger is read."""
    game.book(**how, steps=BEFORE)
    yield
    booker = game.newest("booker")
    game.recompute(None, ALL)
    game.recompute(None, AFTER)
    recompute = game.newest("recompute")
    game.go_on(booker, AFTER)
    yield
    game.tick(stalled=True)
    game.go_on(recompute)
    yield


def released_before_it_settles(game: Accounting, how: dict[str, Any]) -> Iterator[None]:
    """Procs end, and are released, between their COMMIT and their settling."""
    game.book(**how, steps=AFTER)
    yield
    booker = game.newest("booker")
    for _ in range(2):
        game.end_a_proc(0, told=True)
    yield
    game.go_on(booker)
    yield


def released_twice(game: Accounting, how: dict[str, Any]) -> Iterator[None]:
    """A proc ends, and we are told so twice."""
    game.book(**how, steps=ALL)
    yield
    game.end_a_proc(0, told=False)
    for fate in ("again", "once"):
        if game.releases:
            game.release(len(game.releases) - 1, fate)
            yield


def stopped_before_its_commit(game: Accounting, how: dict[str, Any]) -> Iterator[None]:
    """A booker stops between its look at the clock and its COMMIT until its booking is given up, and goes on then.

    Somebody else takes the room before it can settle.
    """
    game.book(**how, steps=BEFORE)
    yield
    booker = game.newest("booker")
    game.recompute(None, ALL)
    game.tick(stalled=True)
    game.recompute(None, ALL)
    yield
    game.go_on(booker, AFTER)
    game.book(**how, steps=2)
    yield
    game.go_on(booker)
    yield


def committed_without_an_answer(game: Accounting, how: dict[str, Any]) -> Iterator[None]:
    """A booker loses its connection in COMMIT, which happens."""
    game.book(**how, steps=BEFORE)
    yield
    booker = game.newest("booker")
    if booker is not None:
        booker.deaf = True
    game.go_on(booker)
    yield


def commit_that_hangs(game: Accounting, how: dict[str, Any]) -> Iterator[None]:
    """PostgreSQL does not finish a COMMIT for longer than an age. Some bookers do not live to see that it does."""
    booker = _hanging(game, how)
    yield
    game.recompute(None, ALL)
    game.tick(stalled=False)
    game.recompute(None, ALL)
    yield
    game.go_on(booker)
    yield


def lost_while_a_commit_hangs(game: Accounting, how: dict[str, Any]) -> Iterator[None]:
    """Redis loses everything meanwhile, and is filled."""
    booker = _hanging(game, how)
    yield
    game.disaster("lost", 0)
    game.bootstrap(ALL)
    game.tick(stalled=False)
    yield
    game.go_on(booker)
    game.tick(stalled=False)
    yield


def _hanging(game: Accounting, how: dict[str, Any]) -> Actor | None:
    game.book(**how, steps=BEFORE)
    booker = game.newest("booker")
    if not game.disk.slow:
        game.disaster("disk", 0)
    game.go_on(booker, AFTER)
    if booker is not None and how["many"] == 2:
        booker.kill()
    return booker


def lost_before_its_commit(game: Accounting, how: dict[str, Any]) -> Iterator[None]:
    """Redis loses everything while a booking is about to be committed, and is filled."""
    yield from _lost(game, how, BEFORE)


def lost_before_its_insert(game: Accounting, how: dict[str, Any]) -> Iterator[None]:
    """The same before its transaction has begun: it will be refused for its age, and rolled back."""
    yield from _lost(game, how, 2)


def _lost(game: Accounting, how: dict[str, Any], steps: int | str) -> Iterator[None]:
    game.book(**how, steps=steps)
    yield
    booker = game.newest("booker")
    game.disaster("lost", 0)
    game.bootstrap(ALL)
    yield
    game.tick(stalled=False)
    yield
    game.go_on(booker)
    yield


def filler_that_dies(game: Accounting, how: dict[str, Any]) -> Iterator[None]:
    """The same, and whoever is to fill it dies while it waits. Another goes on."""
    game.book(**how, steps=BEFORE)
    yield
    booker = game.newest("booker")
    game.disaster("lost", 0)
    game.bootstrap(ALL)
    filler = game.newest("filler")
    if filler is not None:
        filler.kill()
    game.lease_ends()
    game.bootstrap(ALL)
    yield
    game.go_on(booker)
    yield


def decremented_before_its_entry_goes(game: Accounting, how: dict[str, Any]) -> Iterator[None]:
    """A Cuebot ends a proc and publishes that, and the next recompute drops its entry."""
    game.book(**how, steps=ALL)
    yield
    game.end_a_proc(0, told=True, tagged=False)
    game.recompute(None, ALL)
    yield


def decremented_after_its_entry_went(game: Accounting, how: dict[str, Any]) -> Iterator[None]:
    """What it publishes comes late, but within the grace."""
    game.book(**how, steps=ALL)
    yield
    game.end_a_proc(0, told=False, tagged=False)
    game.recompute(None, ALL)
    game.recompute(None, ALL)
    if game.releases:
        game.release(len(game.releases) - 1, "once")
    yield


def ended_during_a_recompute(game: Accounting, how: dict[str, Any]) -> Iterator[None]:
    """A Cuebot ends a proc, and publishes that, somewhere in the midst of a recompute."""
    game.book(**how, steps=ALL)
    yield
    game.recompute(None, AFTER)
    recompute = game.newest("recompute")
    game.go_on(recompute, 3 * how["job"] + how["many"])
    game.end_a_proc(0, told=True, tagged=False)
    yield
    game.go_on(recompute)
    yield


def ended_while_another_takes_stock(game: Accounting, how: dict[str, Any]) -> Iterator[None]:
    """A Cuebot ends a proc, its decrement is lost, and a recompute passes in the midst of another consistency check."""
    game.book(**how, steps=ALL)
    yield
    game.recompute(None, AFTER)
    recompute = game.newest("recompute")
    game.go_on(recompute, until="redis HSCAN")
    game.end_a_proc(0, told=False, tagged=False)
    game.recompute(None, ALL)
    yield
    game.go_on(recompute)
    yield


def booked_before_a_swap(game: Accounting, how: dict[str, Any]) -> Iterator[None]:
    """Ledger and counters are read, then a proc is booked, committed and settled, then the counters are swapped."""
    game.recompute(None, AFTER)
    recompute = game.newest("recompute")
    game.go_on(recompute, until="redis LRANGE")
    game.book(**how, steps=ALL)
    yield
    game.go_on(recompute)
    yield


def decremented_for_nothing(game: Accounting, how: dict[str, Any]) -> Iterator[None]:
    """It publishes one end twice, and another not at all."""
    game.book(**how, steps=ALL)
    yield
    for fate in ("again", "once", "lost"):
        if fate != "once":
            game.end_a_proc(0, told=False, tagged=False)
        if game.releases:
            game.release(len(game.releases) - 1, fate)
    yield


def overtaken_filler(game: Accounting, how: dict[str, Any]) -> Iterator[None]:
    """A filler pauses when it has looked what there is to wipe, and another fills and opens the store meanwhile."""
    game.book(**how, steps=ALL)
    yield
    game.tick(stalled=False)
    game.disaster("stale", 0)
    game.bootstrap(ALL)
    slow = game.newest("filler")
    game.tick(stalled=True)
    game.go_on(slow, until="redis SCAN")
    game.go_on(slow, during="redis SCAN")
    game.bootstrap(ALL)
    game.tick(stalled=False)  # the lease ends
    game.tick(stalled=False)  # and the other has waited
    yield
    game.go_on(slow)
    yield


def booked_on_another_machine(game: Accounting, how: dict[str, Any]) -> Iterator[None]:
    """Something is booked on one host, and then on the other."""
    for host in (0, 1):
        game.book(**{**how, "host": host}, steps=ALL)
        yield


def ended_beside_another(game: Accounting, how: dict[str, Any]) -> Iterator[None]:
    """One of two procs on a machine ends."""
    for _ in range(2):
        game.book(**{**how, "cores": 1}, steps=ALL)
        yield
    game.end_a_proc(0, told=True)
    yield


def artists_take_the_seats(game: Accounting, how: dict[str, Any]) -> Iterator[None]:
    """A licence server reports as many artists as may hold a limit, or more, and more is booked where frames run. Where
    the schema has no reports, the limit is lowered to none."""
    game.book(**how, steps=ALL)
    yield
    if game.farm.has_reports:
        game.report(1, 2, set(), announced=True, steps=ALL)
    else:
        game.change_cap("seats", 0, 0, announced=True, steps=ALL)
    yield
    game.book(**how, steps=ALL)
    yield


PLOTS: dict[str, Plot] = {
    plot.__name__: plot
    for plot in (
        booked_during_a_recompute,
        in_flight_during_a_recompute,
        clock_set_forward,
        recompute_that_stalls,
        released_before_it_settles,
        released_twice,
        stopped_before_its_commit,
        committed_without_an_answer,
        commit_that_hangs,
        lost_while_a_commit_hangs,
        lost_before_its_commit,
        lost_before_its_insert,
        filler_that_dies,
        overtaken_filler,
        booked_on_another_machine,
        ended_beside_another,
        artists_take_the_seats,
    )
}
DUAL_PLOTS: dict[str, Plot] = {
    plot.__name__: plot
    for plot in (
        decremented_before_its_entry_goes,
        decremented_after_its_entry_went,
        ended_during_a_recompute,
        ended_while_another_takes_stock,
        decremented_for_nothing,
        booked_before_a_swap,
        booked_during_a_recompute,
        in_flight_during_a_recompute,
        lost_before_its_commit,
    )
}
"""Of games of a dual store."""
