"""Keeps counters right in a store into which another program publishes plain decrements (see "Another program's
decrements" in docs/accounting.md).

This is the reference's reseed contract: a recompute reads ``acct:seq``, then PostgreSQL, and ends with a
compare-and-swap in which the counters become what the ledger says, if nothing moved meanwhile. Where something always
moves, the recompute is not skipped: it corrects only those differences between counters and ledger that no decrement
under way can explain any more (lua/foreign.lua).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from opencue_sched.accounting import keys
from opencue_sched.accounting.consistency import ConsistencyCheck, vertex_keys
from opencue_sched.accounting.differences import Pass
from opencue_sched.accounting.epoch import Epoch
from opencue_sched.accounting.keys import amounts
from opencue_sched.accounting.ledger import Cause, Ledger, Phase, answering, id_calls, reseed_cas_calls
from opencue_sched.clients.lua_scripts import chunks

PUBLISH_GRACE_SECONDS = 30.0
"""How long after an entry was dropped another program's decrement for it may still come."""
_KEYS_PER_ROUND_TRIP = 2000
"""How many vertices one round trip names."""


def reseed_booked(ledger: Ledger, one_pass: Callable[[], Pass], *, max_retries: int) -> tuple[Pass, int]:
    """Reconcile (``one_pass``) and swap, and again up to ``max_retries`` times until the swap succeeds.

    Returns the last pass, and the cores of procs that were found gone and whose decrement had not come.
    """
    epoch = ledger.mark().epoch  # the store may have been filled since it was learnt
    _dissolve(ledger, epoch, "before", _stored(ledger))
    unpublished = 0
    for _ in range(1 + max_retries):
        done = one_pass()
        unpublished += _unpublished_cores(ledger, done)
        if swap_counters(ledger, done):
            return done, unpublished
    _dissolve(ledger, done.mark.epoch, "after", _stored(ledger, done.check))
    return done, unpublished


def _unpublished_cores(ledger: Ledger, done: Pass) -> int:
    """The cores that a pass dropped with entries of vanished procs, and that still stand in the counters of their jobs:
    they would not, had a decrement been published. Bookings made meanwhile move both sides alike."""
    dropped: Counter[str] = Counter()
    for change in done.changes:
        if change.cause is Cause.MISSED_RELEASE and change.proc_id not in done.passed_over:
            of_job = [part for part in amounts(done.check.records[change.proc_id].entry) if _is_job(part[0])]
            dropped.update({key: cores for key, cores, _ in of_job})
    if not dropped:
        return 0
    with answering(ledger.client):
        pipe = ledger.client.pipeline(transaction=False)
        for key in dropped:
            pipe.hmget(key, "int_cores", "ledger_cores")
        read = pipe.execute(raise_on_error=False)
    return sum(max(0, min(cores, _delta(pair))) for cores, pair in zip(dropped.values(), read, strict=True))


def _is_job(key: str) -> bool:
    """Whether a key is that of a job."""
    return key.startswith(keys.job(""))


def _delta(pair: Any) -> int:
    """int_cores less ledger_cores as Redis has them; 0 where a field is no number, or the key of another type."""
    try:
        counted, explained = pair
        return int(counted or 0) - int(explained or 0)
    except (TypeError, ValueError):
        return 0


def swap_counters(ledger: Ledger, done: Pass) -> bool:
    """Write every counter as the ledger says, if only this pass moved anything since its mark."""
    own = [*done.check.seqs, *done.seqs]
    expected = done.mark.seq + len(own)
    if own != list(range(done.mark.seq + 1, expected + 1)):
        return False  # the numbers of our calls do not follow the mark without a gap: another process moved something
    values = counters(done.entries_now().values(), _stored(ledger, done.check))
    for part in chunks(values, _KEYS_PER_ROUND_TRIP):
        answers = ledger.call_under(reseed_cas_calls(done.mark.epoch.text, expected, part))
        if any(int(answer[0]) != 1 for answer in answers):
            return False
    return True


def counters(entries: Iterable[str], stored: Iterable[str]) -> list[tuple[str, int, int]]:
    """Cores and GPUs of each vertex, from the entries; 0 for every stored key without any. Limits are left out."""
    sums = dict.fromkeys(stored, (0, 0))
    for entry in entries:
        for key, cores, gpus in amounts(entry):
            if not key.startswith(keys.LIMIT_PREFIX):
                before = sums.get(key, (0, 0))
                sums[key] = before[0] + cores, before[1] + gpus
    return [(key, cores, gpus) for key, (cores, gpus) in sums.items()]


def _stored(ledger: Ledger, check: ConsistencyCheck | None = None) -> list[str]:
    """Every vertex but the limits that has a counter, also where another consistency check was under way."""
    vertices = check.readings if check is not None and check.complete else vertex_keys(ledger)
    return [key for key in vertices if not key.startswith(keys.LIMIT_PREFIX)]


def _dissolve(ledger: Ledger, epoch: Epoch, phase: Phase, vertices: Sequence[str]) -> None:
    """Correct what can no longer be explained, at the beginning or the end of a recompute (lua/foreign.lua)."""
    for part in chunks(vertices, _KEYS_PER_ROUND_TRIP):
        ledger.call_under(id_calls("foreign", part, epoch.text, phase, PUBLISH_GRACE_SECONDS))
