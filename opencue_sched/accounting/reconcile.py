"""One pass of reconciliation by difference of ids: mark, snapshot, stock, differences, apply."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import structlog
from sqlalchemy import Engine

from opencue_sched.accounting import keys
from opencue_sched.accounting.caps import load_caps
from opencue_sched.accounting.differences import Cause, Differences, Scope, find_differences
from opencue_sched.accounting.entries import amounts
from opencue_sched.accounting.inventory import Stock, take_stock
from opencue_sched.accounting.ledger import Applied, Ledger, Mark
from opencue_sched.accounting.scripts import Change
from opencue_sched.accounting.sightings import Sightings
from opencue_sched.accounting.snapshot import Snapshot, fresh_additions, may_still_commit, read_snapshot

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass read, found and applied."""

    mark: Mark
    snapshot: Snapshot
    stock: Stock
    found: Differences
    applied: Applied

    @property
    def changes(self) -> Sequence[Change]:
        return self.found.changes

    def entries_now(self) -> dict[str, str]:
        """The ledger after the changes, provided that nobody else changed it meanwhile."""
        entries = {proc_id: record.entry for proc_id, record in self.stock.records.items()}
        for change in self.changes:
            if change.proc_id in self.applied.passed_over:
                continue
            if change.entry is None:
                entries.pop(change.proc_id, None)
            else:
                entries[change.proc_id] = change.entry
        return entries


def reconcile(
    engine: Engine, ledger: Ledger, only: frozenset[str] | None, *, age_seconds: float, sightings: Sightings
) -> Pass:
    """Bring the ledger to what the proc table says, as far as it can be said for certain now."""
    marked_at = sightings.clock()
    mark = ledger.mark()
    ledger.drop_misfits(mark, sightings.key)
    stalled = may_still_commit(engine, age_seconds)
    snapshot = read_snapshot(engine, only)
    stock = take_stock(ledger, mark.epoch)
    if ledger.catch_up(max((mark.seq, *(record.changed_seq for record in stock.records.values())))):
        # The mark may be too low, or numbers of before it given again after it: what was read under them is read anew.
        return reconcile(engine, ledger, only, age_seconds=age_seconds, sightings=sightings)
    old = sightings.too_old(stock.records.values(), mark, marked_at, age_seconds=age_seconds)
    too_old = frozenset[str]() if stalled else old
    scope = Scope(snapshot.managed, only)
    found = find_differences(mark.seq, snapshot.entries, stock.records.values(), too_old=too_old, scope=scope)
    found.add_missing(fresh_additions(engine, found.absent))
    if only is None and stock.unreadable:
        log.error("ledger_entries_not_understood", entries=len(stock.unreadable), procs=stock.unreadable[:20])
        found.add_unreadable(stock.unreadable)
    _lend_before_retiring(engine, ledger, stock, found)
    return Pass(mark, snapshot, stock, found, ledger.apply(found.changes, epoch=mark.epoch))


def renew_entries(ledger: Ledger, show_ids: Collection[str]) -> None:
    """Give the entries of these shows new sequence numbers, so that no pass that has read them can touch them.

    For shows that are managed again: one that saw them unmanaged would retire entries that are needed by now.
    """
    changes = [
        Change(record.proc_id, record.changed_seq, record.entry, record.state, before=record.entry)
        for record in ledger.records()
        if record.show_id in show_ids
    ]
    ledger.apply(changes, epoch=ledger.epoch())


def _lend_before_retiring(engine: Engine, ledger: Ledger, stock: Stock, found: Differences) -> None:
    """Count the frames of shows that are not managed any more as foreign before their entries go.

    The other way round somebody who read the limits while the show was managed could book its licences again.
    """
    retired = [proc_id for proc_id, cause in found.cause_of.items() if cause is Cause.RETIRED]
    moved = (key for proc_id in retired for key, _, _ in amounts(stock.records[proc_id].entry))
    limits = {key for key in moved if key.startswith(keys.LIMIT_PREFIX)}
    if limits:
        load_caps(engine, ledger, sorted(limits))
