"""Calls of the accounting scripts: what their headers ask for, built in one place (tests compare the two)."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from opencue_sched.accounting.entries import Booking, EntryState
from opencue_sched.accounting.keys import BOOTSTRAP_LEASE, EPOCH, LEDGER_KEYS, SEQ
from opencue_sched.lua_scripts import ScriptCall

MAX_IDS_PER_CALL = 250
NOT_READY = "not_ready"
UNSEEDED = "unseeded"
TOMBSTONED = "tombstoned"

Mode: TypeAlias = Literal["check", "force"]
Phase: TypeAlias = Literal["before", "after"]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Change:
    """One difference to apply: the entry as it was seen (``expected_seq`` None: absent), and as it should be.

    ``entry`` None removes it; ``state`` counts only with an entry.
    """

    proc_id: str
    expected_seq: int | None
    entry: str | None
    state: EntryState = EntryState.CONFIRMED


def book_call(epoch: str, mode: Mode, booking: Booking, owner: str) -> ScriptCall:
    return ScriptCall("book", LEDGER_KEYS, (epoch, mode, booking.proc_id, owner, *booking.packed().split("|")))


def rollback_call(epoch: str, booking: Booking, owner: str) -> ScriptCall:
    return book_call(epoch, "force", booking.negated(), owner)


def settle_calls(epoch: str, bookings: Sequence[Booking], owner: str) -> list[ScriptCall]:
    return [
        ScriptCall("settle", LEDGER_KEYS, (epoch, owner, *(text for b in part for text in (b.proc_id, b.packed()))))
        for part in chunks(bookings)
    ]


def release_calls(epoch: str, proc_ids: Sequence[str]) -> list[ScriptCall]:
    return [ScriptCall("release", LEDGER_KEYS, (epoch, *part)) for part in chunks(proc_ids)]


def reconcile_calls(epoch: str, changes: Sequence[Change], owner: str) -> list[ScriptCall]:
    return [
        ScriptCall("reconcile", LEDGER_KEYS, (epoch, owner, *(text for c in part for text in _change(c))))
        for part in chunks(changes)
    ]


def _change(change: Change) -> tuple[str, str, str, str]:
    return (
        change.proc_id,
        "" if change.expected_seq is None else str(change.expected_seq),
        "" if change.entry is None else change.state.value,
        change.entry or "",
    )


def caps_calls(epoch: str, version_us: int, rows: Sequence[tuple[str, Sequence[str]]]) -> list[ScriptCall]:
    """``rows``: vertex key and its fields, each name before its value."""
    return [
        ScriptCall("caps", LEDGER_KEYS, (epoch, version_us, *(text for row in part for text in _caps(row))))
        for part in chunks(rows)
    ]


def _caps(row: tuple[str, Sequence[str]]) -> tuple[str, ...]:
    key, fields = row
    return (key, str(len(fields)), *fields)


def inventory_calls(epoch: str, vertex_keys: Sequence[str]) -> list[ScriptCall]:
    return [ScriptCall("inventory", LEDGER_KEYS, (epoch, *part)) for part in chunks(vertex_keys)]


def adjust_calls(epoch: str, amounts: Sequence[tuple[str, int, int]], *, read_at: int) -> list[ScriptCall]:
    """One correction. ``amounts``: vertex key, cores (or frames) and GPUs to add; ``read_at``: the sequence number at
    which the first of them was read."""
    name = uuid.uuid4().hex
    return [
        ScriptCall(
            "adjust", LEDGER_KEYS, (epoch, name, number, read_at, *(field for amount in part for field in amount))
        )
        for number, part in enumerate(chunks(amounts))
    ]


def reclaim_calls(epoch: str, vertex_keys: Sequence[str]) -> list[ScriptCall]:
    return [ScriptCall("reclaim", LEDGER_KEYS, (epoch, *part)) for part in chunks(vertex_keys)]


def reseed_cas_calls(epoch: str, seq: int, values: Sequence[tuple[str, int, int]]) -> list[ScriptCall]:
    """``values``: vertex key, cores and GPUs as they were at ``seq``."""
    return [
        ScriptCall("reseed_cas", LEDGER_KEYS, (epoch, seq, *(field for value in part for field in value)))
        for part in chunks(values)
    ]


def foreign_calls(epoch: str, phase: Phase, grace_seconds: float, vertex_keys: Sequence[str]) -> list[ScriptCall]:
    return [ScriptCall("foreign", LEDGER_KEYS, (epoch, phase, grace_seconds, *part)) for part in chunks(vertex_keys)]


def audit_begin_call(epoch: str, token: str, life_ms: int) -> ScriptCall:
    return ScriptCall("audit_begin", LEDGER_KEYS, (epoch, token, life_ms))


def epoch_fill_call(lease: str, filling: str, run_id: str, *, close_open: bool) -> ScriptCall:
    return ScriptCall("epoch_fill", (EPOCH, BOOTSTRAP_LEASE), (lease, filling, run_id, int(close_open)))


def wipe_calls(filling: str, keys: Sequence[str]) -> list[ScriptCall]:
    return [ScriptCall("wipe", LEDGER_KEYS, (filling, *part)) for part in chunks(keys)]


def epoch_open_call(filling: str, opened: str) -> ScriptCall:
    return ScriptCall("epoch_open", (EPOCH, SEQ), (filling, opened))


def token_drop_call(keys: Sequence[str], token: str) -> ScriptCall:
    return ScriptCall("token_drop", tuple(keys), (token,))


def token_extend_call(key: str, token: str, life_ms: int) -> ScriptCall:
    return ScriptCall("token_extend", (key,), (token, life_ms))


def chunks(items: Sequence[_T], size: int = MAX_IDS_PER_CALL) -> list[Sequence[_T]]:
    """``items`` in pieces a script may take: bounded work, and Lua's unpack has a limit too."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def refused_for(answer: Sequence[Any]) -> str | None:
    """The table (or reason) of a refusal, None for a success."""
    return None if int(answer[0]) == 1 else str(answer[1])
