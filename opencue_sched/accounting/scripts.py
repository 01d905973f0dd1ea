"""Calls of the accounting scripts: what their headers ask for, built in one place (tests compare the two)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

from opencue_sched.accounting.connection import Epoch
from opencue_sched.accounting.keys import EPOCH, LEDGER_KEYS, SEQ, Booking, EntryState, most_vertices
from opencue_sched.lua_scripts import ScriptCall

MAX_IDS_PER_CALL = 250
WORK_PER_CALL = 400
"""What one call may do, in commands of Redis (a field of a command that takes many counts as one): some half a
millisecond of the processor, for which everybody else waits; so little that a busy system seldom puts Redis off the
processor in the midst of it. lua/includes/moves.lua has the same number."""

NOT_READY = "not_ready"
UNSEEDED = "unseeded"
ERROR = "error"

Mode: TypeAlias = Literal["check", "force"]
Phase: TypeAlias = Literal["before", "after"]
_T = TypeVar("_T")
_Fields = TypeVar("_Fields", bound=Sequence[str | int])

# What the scripts do, at most. With an id: read and write its record, look for a tombstone, log the change, and take
# texts apart. With a vertex of it: move cores and GPUs; in a dual store also the ledger's own, and note the time.
_WORK_OF_AN_ID = 6
_WORK_OF_A_VERTEX, _WORK_OF_A_DUAL_VERTEX = 2, 6
_USUAL_VERTICES = 6


@dataclass(frozen=True, slots=True)
class Change:
    """One difference to apply: the entry as it was seen (``expected_seq`` None: absent, or nobody can read it), and as
    it should be.

    ``entry`` None removes it; ``state`` counts only with an entry. ``before`` is the entry as it was seen: how much
    work it is to take it out.
    """

    proc_id: str
    expected_seq: int | None
    entry: str | None
    state: EntryState = EntryState.CONFIRMED
    before: str | None = field(default=None, compare=False)


def book_call(epoch: str, mode: Mode, booking: Booking, owner: str) -> ScriptCall:
    return ScriptCall("book", LEDGER_KEYS, (epoch, mode, booking.proc_id, owner, *booking.packed().split("|")))


def rollback_call(epoch: str, booking: Booking, owner: str) -> ScriptCall:
    return book_call(epoch, "force", booking.negated(), owner)


def settle_calls(epoch: str, bookings: Sequence[Booking], owner: str) -> list[ScriptCall]:
    """Confirm entries, or add them."""
    of_a_vertex = _work_of_a_vertex(epoch)
    rows = [(booking.proc_id, "any", EntryState.CONFIRMED.value, booking.packed()) for booking in bookings]
    return _calls("reconcile", (epoch, owner), rows, lambda row: _WORK_OF_AN_ID + of_a_vertex * most_vertices(row[3]))


def release_calls(epoch: str, proc_ids: Sequence[str]) -> list[ScriptCall]:
    """Only the ledger knows the vertices: the answers name the ids for which there was too much to do in one call."""
    usual = _WORK_OF_AN_ID + _work_of_a_vertex(epoch) * _USUAL_VERTICES
    return _calls("release", (epoch,), [(proc_id,) for proc_id in proc_ids], usual)


def reconcile_calls(epoch: str, changes: Sequence[Change], owner: str) -> list[ScriptCall]:
    of_a_vertex = _work_of_a_vertex(epoch)

    def work(change: Change) -> int:
        if change.before == change.entry:
            return _WORK_OF_AN_ID
        return _WORK_OF_AN_ID + of_a_vertex * (most_vertices(change.before or "") + most_vertices(change.entry or ""))

    return [
        ScriptCall("reconcile", LEDGER_KEYS, (epoch, owner, *(text for change in part for text in _row(change))))
        for part in portions(changes, work)
    ]


def _row(change: Change) -> tuple[str, str, str, str]:
    expected = "" if change.expected_seq is None else str(change.expected_seq)
    return change.proc_id, expected, change.state.value if change.entry is not None else "", change.entry or ""


def _work_of_a_vertex(epoch: str) -> int:
    return _WORK_OF_A_DUAL_VERTEX if Epoch(epoch).dual else _WORK_OF_A_VERTEX


def caps_calls(epoch: str, version: str, rows: Sequence[tuple[str, Sequence[str]]]) -> list[ScriptCall]:
    """``rows``: vertex key and its fields, each name before its value. To make a hash is more work than to find one."""
    calls = []
    for part in portions(rows, lambda row: 8 + len(row[1])):
        texts = [text for key, fields in part for text in (key, json.dumps(fields))]
        calls.append(ScriptCall("caps", LEDGER_KEYS, (epoch, version, *texts)))
    return calls


def inventory_calls(epoch: str, vertex_keys: Sequence[str]) -> list[ScriptCall]:
    return _calls("inventory", (epoch,), [(key,) for key in vertex_keys], 3)


def adjust_calls(epoch: str, token: str, amounts: Sequence[tuple[str, int, int]]) -> list[ScriptCall]:
    """The correction of the consistency check that has this token. ``amounts``: vertex key, cores (or frames) and GPUs
    to add."""
    return [
        ScriptCall("adjust", LEDGER_KEYS, (epoch, token, number, *(field for amount in part for field in amount)))
        for number, part in enumerate(portions(amounts, lambda _: 4), start=1)
    ]


def free_calls(epoch: str, vertex_keys: Sequence[str], *, idle: bool) -> list[ScriptCall]:
    """``idle``: only those that count nothing."""
    return _calls("free", (epoch, "idle" if idle else "all"), [(key,) for key in vertex_keys], 6)


def reseed_cas_calls(epoch: str, seq: int, values: Sequence[tuple[str, int, int]]) -> list[ScriptCall]:
    """``values``: vertex key, cores and GPUs as they were at ``seq``. Each call compares and swaps by itself."""
    return _calls("reseed_cas", (epoch, seq), values, 7)


def foreign_calls(epoch: str, phase: Phase, grace_seconds: float, vertex_keys: Sequence[str]) -> list[ScriptCall]:
    return _calls("foreign", (epoch, phase, grace_seconds), [(key,) for key in vertex_keys], 12)


def epoch_set_call(seen: str, wanted: str) -> ScriptCall:
    return ScriptCall("epoch_set", (EPOCH, SEQ), (seen, wanted))


def _calls(
    name: str, fixed: Sequence[str | float], rows: Sequence[_Fields], work: int | Callable[[_Fields], int]
) -> list[ScriptCall]:
    """Calls that take the ``fixed`` arguments, and then as many rows as make bounded work."""
    of_a_row = work if callable(work) else lambda _: work
    return [
        ScriptCall(name, LEDGER_KEYS, (*fixed, *(field for row in part for field in row)))
        for part in portions(rows, of_a_row)
    ]


def portions(items: Sequence[_T], work: Callable[[_T], int]) -> list[Sequence[_T]]:
    """``items`` in pieces a script may take: of bounded work (or a single item), and Lua's unpack has a limit too."""
    found: list[Sequence[_T]] = []
    start, sum_of_work = 0, 0
    for i, item in enumerate(items):
        more = work(item)
        if i > start and (sum_of_work + more > WORK_PER_CALL or i - start == MAX_IDS_PER_CALL):
            found.append(items[start:i])
            start, sum_of_work = i, 0
        sum_of_work += more
    if start < len(items):
        found.append(items[start:])
    return found


def chunks(items: Sequence[_T], size: int) -> list[Sequence[_T]]:
    """``items`` in pieces of ``size``."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def refused_for(answer: Sequence[Any] | Exception) -> str | None:
    """The table (or reason) of a refusal, None for a success."""
    if isinstance(answer, Exception):
        return ERROR
    return None if int(answer[0]) == 1 else str(answer[1])
