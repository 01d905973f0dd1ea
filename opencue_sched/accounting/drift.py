"""Which counters a pass found off, and put right: by kind of vertex and cause, for people and their metrics."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping

from opencue_sched.accounting.differences import Cause
from opencue_sched.accounting.entries import amounts
from opencue_sched.accounting.inventory import Stock, count_by_kind
from opencue_sched.accounting.keys import VertexKind
from opencue_sched.accounting.scripts import Change

Drift = Mapping[tuple[VertexKind, Cause], int]
"""How many vertices of a kind were off for a cause."""


def drift_of_entries(
    stock: Stock, changes: Iterable[Change], cause_of: Mapping[str, Cause], *, without: Collection[str] = ()
) -> dict[tuple[VertexKind, Cause], int]:
    """Vertices whose counters these changes of entries move, ``without`` those of some procs.

    A vertex counts once for each cause. An entry that only becomes confirmed moves none.
    """
    touched: dict[Cause, set[str]] = defaultdict(set)
    for change in changes:
        if change.proc_id in without:
            continue
        known = stock.records.get(change.proc_id)
        before = set() if known is None else set(amounts(known.entry))
        after = set() if change.entry is None else set(amounts(change.entry))
        touched[cause_of[change.proc_id]] |= {key for key, _, _ in before ^ after}
    return {(kind, cause): count for cause, keys in touched.items() for kind, count in count_by_kind(keys).items()}


def by_kind(drift: Drift) -> dict[str, int]:
    """The same without causes, by the kind's name in the keys."""
    sums: Counter[str] = Counter()
    for (kind, _), count in drift.items():
        sums[kind.value] += count
    return dict(sums)
