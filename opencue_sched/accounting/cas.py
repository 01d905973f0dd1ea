"""The reference's reseed contract, for a store into which another program publishes plain decrements.

``release_feed = "cuebot-redis"``: a Cuebot deletes a proc and then takes its cores off the five counters, without the
proc's id. So int_* and the ledger part: ``ledger_*`` beside it says what the ledger accounts for, and the difference
is the *foreign delta*. A pass first brings the ledger in line with the proc table, dropping entries of vanished procs
without a decrement, and then ends the reference's ``GET acct:seq -> SQL -> compare-and-swap``: counters become what
the ledger says, if nothing moved. Bookings in flight are in the ledger, so the overwrite carries them.

Under load nothing ever stands still. Then the pass ends with the foreign deltas instead of being skipped: one above 0
older than a grace is a lost decrement, one below 0 at two passes' ends belongs to nobody (lua/foreign.lua). A publish
that comes after its proc's entry was swapped away under-counts until the next pass: the reference's own drift bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from opencue_sched.accounting import keys
from opencue_sched.accounting.entries import amounts
from opencue_sched.accounting.inventory import Stock, vertex_keys
from opencue_sched.accounting.keys import VertexKind
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.accounting.reconcile import Pass
from opencue_sched.accounting.scripts import Phase, chunks, foreign_calls, reseed_cas_calls
from opencue_sched.accounting.store_epoch import Epoch

DEFAULT_GRACE_SECONDS = 30.0
_KEYS_PER_ROUND_TRIP = 2000


@dataclass(frozen=True, slots=True)
class CasReport:
    """``swapped``: the overwrite went through, at try number ``tries``. ``dissolved`` counts corrected vertices."""

    swapped: bool
    tries: int
    dissolved: int


def reseed_booked(
    ledger: Ledger,
    epoch: Epoch,
    one_pass: Callable[[], Pass],
    *,
    max_retries: int,
    grace_seconds: float = DEFAULT_GRACE_SECONDS,
) -> tuple[Pass, CasReport]:
    """Reconcile and swap, up to ``max_retries`` times more; returns the last pass.

    ``grace_seconds``: how long after dropping an entry its decrement may still come.
    """
    dissolved = _dissolve(ledger, epoch, "before", grace_seconds, _hierarchy(vertex_keys(ledger)))
    tries = 0
    while True:
        tries += 1
        done = one_pass()
        if swap_counters(ledger, done):
            return done, CasReport(True, tries, dissolved)
        if tries > max_retries:
            break
    dissolved += _dissolve(ledger, done.mark.epoch, "after", grace_seconds, _stored(ledger, done.stock))
    return done, CasReport(False, tries, dissolved)


def swap_counters(ledger: Ledger, done: Pass) -> bool:
    """Write every counter as the ledger says, if nobody but this pass moved anything since its mark."""
    if not is_undisturbed(done.mark.seq, done.applied.seqs):
        return False
    values = counters(done.entries_now().values(), _stored(ledger, done.stock))
    expected = done.mark.seq + len(done.applied.seqs)
    for part in chunks(values, _KEYS_PER_ROUND_TRIP):
        answers = ledger.call_under(reseed_cas_calls(done.mark.epoch.text, expected, part))
        if any(int(answer[0]) != 1 for answer in answers):
            return False
    return True


def is_undisturbed(mark_seq: int, own_seqs: Sequence[int]) -> bool:
    """Whether the sequence numbers our own calls got follow the mark without a gap: then nobody else moved anything."""
    return list(own_seqs) == list(range(mark_seq + 1, mark_seq + 1 + len(own_seqs)))


def counters(entries: Iterable[str], stored: Iterable[str]) -> list[tuple[str, int, int]]:
    """Cores and GPUs of each vertex, from the entries; 0 for every stored key without any. Limits are left out."""
    sums = dict.fromkeys(stored, (0, 0))
    for entry in entries:
        for key, cores, gpus in amounts(entry):
            if not key.startswith(keys.LIMIT_PREFIX):
                before = sums.get(key, (0, 0))
                sums[key] = before[0] + cores, before[1] + gpus
    return [(key, cores, gpus) for key, (cores, gpus) in sums.items()]


def _stored(ledger: Ledger, stock: Stock) -> list[str]:
    """Every vertex that has a counter, also where somebody else was taking stock."""
    return _hierarchy(stock.readings if stock.complete else vertex_keys(ledger))


def _hierarchy(vertices: Iterable[str]) -> list[str]:
    refs = ((key, keys.parse(key)) for key in vertices)
    return [key for key, ref in refs if ref is not None and ref.kind is not VertexKind.LIMIT]


def _dissolve(ledger: Ledger, epoch: Epoch, phase: Phase, grace_seconds: float, vertices: Sequence[str]) -> int:
    corrected = 0
    for part in chunks(vertices, _KEYS_PER_ROUND_TRIP):
        answers = ledger.call_under(foreign_calls(epoch.text, phase, grace_seconds, part))
        corrected += sum(int(answer[2]) for answer in answers)
    return corrected
