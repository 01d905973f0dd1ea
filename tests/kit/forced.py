"""Entries in a ledger that no cap was asked about."""

from __future__ import annotations

from collections.abc import Sequence

from opencue_sched.accounting.keys import Booking
from opencue_sched.accounting.ledger import Ledger, book_call


def force(ledger: Ledger, bookings: Sequence[Booking]) -> None:
    """Book without looking at caps. Tombstoned ids stay out. Raises NotReady."""
    ledger.call_under([book_call(ledger.epoch().text, "force", it, ledger.owner) for it in bookings])
