"""What the protocol does (every rule on) and what may happen around it. A mutant is a protocol with a rule off."""

from __future__ import annotations

from dataclasses import dataclass

DEADLINE = 1
"""Ticks after its booking from which PostgreSQL refuses a COMMIT (accounting.commit_deadline)."""

AGE = 2
"""Ticks after which an entry in flight is too old (accounting.in_flight_age). Ages are not counted any further."""

MACHINES = 2
"""Hosts on which a frame may start, where a limit counts them. Sets of machines are sums of 1 << machine."""

ARTIST = 1 << MACHINES
"""A machine that is none of these."""

REPORTS = {"nobody": 0, "an artist": ARTIST, "machine 1": 1}
"""What a licence server may say."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of docs/accounting.md, one by one.

    ``tombstones``: a released id never comes back. ``carries_in_flight``: what is in flight and young stays, whatever
    the snapshot says. ``judges_by_mark``: so does what was confirmed after the mark. ``age_at_mark``: "too old" is
    judged at the mark, not when the change is applied. ``two_sightings``: and by the boot clock too.
    ``resolves_in_flight``: what is too old is removed, or confirmed, at all.
    ``idempotent_release`` and ``exact_rollback``: without an entry no counter moves. ``unknown_stays``: a COMMIT
    without answer is not rolled back. ``server_deadline``: a late COMMIT is refused. ``asks_for_commits``: nothing is
    too old whose COMMIT the server has taken and not ended; ``asks_first``: which it is asked before the snapshot is
    taken. ``bootstrap_waits``: an age, between closing the store and the snapshot it is filled from;
    ``filler_asks``: and until no COMMIT hangs. ``successor_waits``: whoever goes on where a filler has died waits what
    is left of it; ``wait_of_this_loss``: nothing that was waited before the store was open last counts;
    ``waits_by_boot_clock``: nor what Redis TIME says. ``fenced_wipe``: a filler that was overtaken in a pause cannot
    wipe what its successor filled.

    Of a limit that counts machines: ``goes_with_last``: a machine goes with the last of its frames, not with any.
    ``holders_alone``: at the maximum only machines that hold it may start a frame; ``stops_above``: and above it not
    all of these. ``holds_when_settled``: a machine holds it by frames that are confirmed; by those in flight alone,
    which may have been booked under other terms, it counts and does not hold. ``same_terms``: no COMMIT of what was
    decided under another report than the last.
    """

    tombstones: bool = True
    carries_in_flight: bool = True
    judges_by_mark: bool = True
    age_at_mark: bool = True
    two_sightings: bool = True
    resolves_in_flight: bool = True
    idempotent_release: bool = True
    exact_rollback: bool = True
    unknown_stays: bool = True
    server_deadline: bool = True
    asks_for_commits: bool = True
    asks_first: bool = True
    bootstrap_waits: bool = True
    filler_asks: bool = True
    successor_waits: bool = True
    wait_of_this_loss: bool = True
    waits_by_boot_clock: bool = True
    fenced_wipe: bool = True
    goes_with_last: bool = True
    holders_alone: bool = True
    stops_above: bool = True
    holds_when_settled: bool = True
    same_terms: bool = True

    @property
    def spares_new_entries(self) -> bool:
        """Whether an entry that changed after the mark is certainly left alone: then reading it can be left out."""
        return self.carries_in_flight and self.judges_by_mark and self.age_at_mark


@dataclass(frozen=True, slots=True)
class Scope:
    """How much happens in one search: bookers, the cap they share (a booking takes 1), and how often what goes wrong.

    A booker that is done starts again with a new id, for ever. ``crashes`` of bookers (a reconciler or a filler may
    stop at any time, any number of times); ``flushes`` of Redis; ``jumps`` forward of Redis TIME; ``pauses`` of a
    filler that goes on later; ``foreign`` procs that somebody else inserts without booking; ``hangs``: COMMITs that
    PostgreSQL takes in time and ends whenever it likes. ``late_copies``: a script
    call may be executed a second time at any later moment of the same epoch, or at such a moment only. ``forgets``:
    a tombstone may expire while calls are still late. ``seats``: so many of MACHINES may hold a limit that counts
    them, beside the cap, which counts frames; 0: there is no such limit. ``reports`` of its licence server; what has
    been reported Redis learns of at any later moment.
    """

    bookers: int = 2
    cap: int = 1
    reconcilers: int = 1
    crashes: int = 1
    flushes: int = 1
    jumps: int = 0
    pauses: int = 0
    foreign: int = 0
    hangs: int = 0
    late_copies: bool = True
    forgets: bool = False
    seats: int = 0
    reports: int = 0
