"""Book, settle, roll back, release: the hot path of the counters (docs/accounting.md).

Every method takes a constant number of round trips for as many procs as a plan has, is idempotent by proc id, and
raises NotReady when the store is empty, belongs to another Redis process, or does not answer. After NotReady from
``book`` nothing may be committed; a booking that Redis took nevertheless stays in flight until recompute finds it too
old.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any, Literal, TypeAlias, cast

import redis
import structlog
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.accounting import keys
from opencue_sched.accounting.damage import raise_if_damaged
from opencue_sched.accounting.epoch import Epoch
from opencue_sched.accounting.keys import LEDGER_KEYS, Booking, EntryState, Record, VertexCaps
from opencue_sched.accounting.seats import (
    READS_OF_FRAMES,
    READS_OF_MACHINES,
    Read,
    Settling,
    headroom_of,
    read_of_starts,
    reads_of_frames,
    reads_of_machines,
    seats_of,
)
from opencue_sched.clients.lua_scripts import Fence, ScriptCall, call_scripts, chunks
from opencue_sched.clients.store_errors import takes_no_write
from opencue_sched.domain.caps import Headroom, Seats
from opencue_sched.errors import InvalidInput, NotReady

log = structlog.get_logger(__name__)

CapRow: TypeAlias = tuple[str, Sequence[str | list[str]]]
"""The key of a vertex, and names and values of its fields by turns."""

_SCAN_COUNT = 1000
"""How many entries one step of an HSCAN, or one HMGET, reads."""
_APPLIED_PER_ROUND_TRIP = 2000
"""How many changes one round trip applies, in calls of fewer each, so that bookings of others come in between."""
# Calls that name ids only are short: Redis reads, and so carries out, as many at once as fit into 16 KB.
_RELEASED_PER_ROUND_TRIP = 200
_FOLLOWER_SECONDS = 5
"""How long no other process takes the place of the one that moves entries to other limits, though it may have died.
With more, the counters of limits may stay wrong for longer after its death; with less, more processes take the place in
turn, and each reads the procs again that another has read."""


@dataclass(frozen=True, slots=True)
class BookingRefused:
    """Why a booking was not taken."""

    table: str
    """What refused the booking: subscription, folder, job, folder_gpus, job_gpus, limit, tombstoned, unseeded or
    error."""
    current: float = 0.0
    """What was in use there: cores, GPUs or frames."""
    limit: float = 0.0
    """The cap, in the same unit."""
    text: str = ""
    """The key of an unseeded vertex, a released id, or what Redis said of an error; empty otherwise."""


@dataclass(frozen=True, slots=True)
class BookAnswers:
    """What became of each booking."""

    accepted: frozenset[str]
    """The proc ids of the bookings that were taken."""
    refusals: Mapping[str, BookingRefused]
    """All others, by proc id."""
    caps: Mapping[str, VertexCaps]
    """The caps and use of every vertex that could refuse, read after the bookings in the same round trip."""
    terms: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """The terms (limit_types.TERMS) under which limits accepted a booking, by proc id and limit id: of each limit that
    counts machines, is reported or is not enforced. A booking under no such limit has none."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of the store."""

    epoch: Epoch
    seq: int
    """The sequence number of the last change before this moment."""
    seconds: int
    """Redis TIME, read after ``seq``."""


class Ledger:
    """The ledger of one process. ``owner`` names it in the entries; thread-safe, since clients and pipelines are.

    ``load_caps`` reads the caps of the given vertex keys from PostgreSQL into Redis (accounting.caps.make_ledger sets
    it); without it a vertex that was never seeded refuses.
    """

    def __init__(self, client: redis.Redis, *, owner: str, settling: Settling | None = None) -> None:
        if "|" in owner:
            raise InvalidInput(f"instance name {owner!r} must not contain |")
        self.client = client
        self.owner = owner
        self.load_caps: Callable[[Sequence[str]], object] | None = None
        self.settling = settling
        self._epoch: Epoch | None = None
        self._fence: Fence | None = None

    def under(self, fence: Fence | None) -> Ledger:
        """A copy of this ledger for a periodic task.

        Once a leader newer than ``fence`` is recorded, every call on the copy raises FencedOff and changes nothing.
        ``fence`` is None for a task that no leader sent: then the ledger itself is returned.
        """
        if fence is None:
            return self
        fenced = copy.copy(self)
        fenced._fence = fence
        return fenced

    # The epoch

    def epoch(self) -> Epoch:
        """The epoch this process works under, learnt on first use, or when the store had another. Raises NotReady."""
        return self._epoch or self.learn_epoch()

    def learn_epoch(self) -> Epoch:
        """Read the epoch of the store again. Raises NotReady."""
        self._epoch = Epoch.parse(stored_epoch(self.client))
        if self._epoch is None:
            raise NotReady("the counters in Redis are not filled; waiting for the bootstrap")
        return self._epoch

    # The hot path

    def book(self, bookings: Sequence[Booking]) -> BookAnswers:
        """Book each, or say why not: one round trip, a second one only for vertices whose caps had to be loaded.

        An error of one script refuses its own booking, and caps that PostgreSQL does not give refuse what waits for
        them: what is accepted beside it is the caller's to commit or to roll back.
        """
        answers, caps = self._book(bookings)
        unseeded = [booking for booking in bookings if refused_for(answers[booking.proc_id]) == UNSEEDED]
        if unseeded and self.load_caps is not None:
            try:
                self.load_caps(_capped_keys(unseeded))  # each refusal names only the first in its way
            except SQLAlchemyError as error:
                log.warning("caps_not_loaded", procs=len(unseeded), error=str(error))
            else:
                again, fresh = self._book(unseeded)
                answers |= again
                caps |= fresh
        refused = {proc_id: _refused(answer) for proc_id, answer in answers.items() if refused_for(answer) is not None}
        under = {proc_id: answer for proc_id, answer in answers.items() if proc_id not in refused and len(answer) > 3}
        terms = {proc_id: dict(zip(answer[3::2], answer[4::2], strict=True)) for proc_id, answer in under.items()}
        return BookAnswers(frozenset(answers) - refused.keys(), refused, caps, terms)

    def _book(self, bookings: Sequence[Booking]) -> tuple[dict[str, Any], dict[str, VertexCaps]]:
        """The scripts' answers by proc id, errors of single scripts among them, and the caps read with them by vertex
        key: one round trip. Raises NotReady, FencedOff, StoreDamaged, and an error of Redis that meets every call."""
        vertices = _capped_keys(bookings)
        answers, reads = self._call(
            lambda epoch: [book_call(epoch, "check", booking, self.owner) for booking in bookings],
            reads=[("HMGET", key, *keys.cap_fields(key)) for key in vertices],
            raising=False,
        )
        for answer in (*answers, *reads):
            # Any other error than of one damaged key says that Redis refuses whatever it is sent.
            if isinstance(answer, Exception) and (type(answer) is not ResponseError or takes_no_write(answer)):
                with answering(self.client):
                    raise answer
        if any(isinstance(answer, Exception) for answer in (*answers, *reads)):
            with answering():
                raise_if_damaged(self.client)
        caps = {key: read for key, values in zip(vertices, reads, strict=True) if (read := keys.read_caps(key, values))}
        return {booking.proc_id: answer for booking, answer in zip(bookings, answers, strict=True)}, caps

    def cores_in_use(self, subscriptions: Collection[tuple[str, str]]) -> dict[tuple[str, str], int]:
        """Whole cores booked under each subscription (show id, allocation id): one round trip, whatever their number.

        A subscription that was never seeded has 0 in use. A damaged counter counts as 0 here, and still refuses
        bookings; the next recompute puts the counter right.
        """
        listed = list(subscriptions)
        with self.client.pipeline(transaction=False) as pipe:
            for show_id, alloc_id in listed:
                pipe.hget(keys.subscription(show_id, alloc_id), "int_cores")
            answers = pipe.execute(raise_on_error=False)
        counted = zip(listed, answers, strict=True)
        return {pair: int(text) for pair, text in counted if isinstance(text, str) and text.isdecimal()}

    def caps(self, vertices: Sequence[str]) -> dict[str, VertexCaps]:
        """Caps and use of vertices (keys) that were seeded and can be read: one round trip, whatever their number."""
        with self.client.pipeline(transaction=False) as pipe:
            for key in vertices:
                pipe.hmget(key, keys.cap_fields(key))
            answers = pipe.execute(raise_on_error=False)
        return {
            key: read for key, values in zip(vertices, answers, strict=True) if (read := keys.read_caps(key, values))
        }

    def seats(self, limits: Mapping[str, tuple[int, str]]) -> dict[str, Seats]:
        """The machines that may take more frames under limits that count them, and how many more may: two round trips,
        whatever their number. ``limits``: maximum and name by id; of a limit that was never seeded its maximum counts.

        Not at one instant: the script that books decides. A limit whose report has grown too old since its caps were
        loaded is open: nobody announces that, and who books loads them again. A machine whose last frames a worker of
        the release before has released counts until a recompute, but does not hold the limit.
        """
        first = [read for limit_id in limits for read in reads_of_machines(limit_id)]
        now, found = self._read_at(first)
        machines = {
            limit_id: [machine for machine, _ in since] if isinstance(since, list) else []
            for limit_id, since in zip(limits, found[::READS_OF_MACHINES], strict=True)
        }
        second: list[Read] = [
            ["HGET", keys.limit(keys.on_machine(limit_id, machine)[2]), "int_running"]
            for limit_id in limits
            for machine in machines[limit_id]
        ]
        counters = iter(self._read_at(second)[1])
        answers, seats = iter(found), {}
        for limit_id, (most, name) in limits.items():
            of_limit = iter([next(answers) for _ in range(READS_OF_MACHINES)])
            counts = [next(counters) for _ in machines[limit_id]]
            with suppress(TypeError, ValueError):  # a damaged key: a recompute puts it right
                pairs = zip(machines[limit_id], counts, strict=True)
                frames_on = {machine: int(frames or 0) for machine, frames in pairs}
                seats[limit_id] = seats_of(of_limit, frames_on, most, name, now)
        return seats

    def reported_frames(self, limits: Mapping[str, tuple[int, str]]) -> dict[str, Headroom]:
        """The headroom of limits of frames whose holders a licence server reports, by limit id: two round trips,
        whatever their number. ``limits``: how many frames may run (-1: any number) and name by id.

        Not at one instant: see ``seats``. A limit with a damaged key is left out."""
        now, found = self._read_at([read for limit_id in limits for read in reads_of_frames(limit_id)])
        pairs = zip(limits, found[::READS_OF_FRAMES], strict=True)
        _, starts = self._read_at([read_of_starts(limit_id, fields) for limit_id, fields in pairs])
        answers, headroom = iter(found), {}
        for (limit_id, (most, name)), started in zip(limits.items(), starts, strict=True):
            of_limit = iter([next(answers) for _ in range(READS_OF_FRAMES)])
            with suppress(TypeError, ValueError):
                headroom[limit_id] = headroom_of(of_limit, started, most, name, now)
        return headroom

    def _read_at(self, reads: Sequence[Read]) -> tuple[int, list[Any]]:
        """Redis TIME in seconds, and what became of reads: values, and errors."""
        with answering(self.client), self.client.pipeline(transaction=False) as pipe:
            for read in reads:
                pipe.execute_command(*read)  # type: ignore[no-untyped-call]
            pipe.time()
            *found, now = pipe.execute(raise_on_error=False)
        return int(now[0]), found

    def limits_lacking_machines(self, limit_ids: Sequence[str]) -> list[str]:
        """The limits among these under which frames run whose entries lack what the limit counts by now: the machine of
        the frame, where the limit counts machines, or the frame's start, where a licence server reports the limit."""
        with answering(self.client), self.client.pipeline(transaction=False) as pipe:
            for limit_id in limit_ids:
                pipe.hmget(keys.limit(limit_id), "int_machines", "after", "int_running")
                pipe.hget(keys.limit(f"{limit_id}@"), "int_running")
                pipe.zcard(keys.started(limit_id))
            answers = iter(pipe.execute(raise_on_error=False))
        lacking = []
        for limit_id in limit_ids:
            of_limit, known, dated = next(answers), next(answers), next(answers)
            with suppress(TypeError, ValueError):  # a damaged key: a recompute puts it right
                machines, after, frames = of_limit
                saying = int(known or 0) - dated if machines else min(int(known or 0), dated)
                lacking += [limit_id] if (machines or after) and int(frames or 0) > saying else []
        return lacking

    def follows_limits(self) -> bool:
        """Whether this process is the one of the fleet that moves entries of running frames to other limits.

        It has been since it last said so less than ``_FOLLOWER_SECONDS`` ago, or nobody has. This process hears every
        such change itself, so the others may leave all of them to it for the moment; but it may have died or failed, so
        each follows them again some seconds later (worker/handlers.py).
        """
        with answering(self.client):
            if self.client.set(keys.FOLLOWER, self.owner, nx=True, ex=_FOLLOWER_SECONDS):
                return True
            follows = self.client.get(keys.FOLLOWER) == self.owner
            if follows:
                self.client.expire(keys.FOLLOWER, _FOLLOWER_SECONDS)
        return follows

    def settle(self, bookings: Sequence[Booking]) -> None:
        """Note that procs are committed. A proc that was released meanwhile is left as it is."""
        waiting = {booking.proc_id: booking for booking in reversed(bookings)}
        while waiting:
            answers, _ = self._call(partial(settle_calls, bookings=list(waiting.values()), owner=self.owner))
            waiting = {proc_id: waiting[proc_id] for answer in answers for proc_id in answer[3]}

    def rollback(self, bookings: Sequence[Booking]) -> None:
        """Take exactly these entries out again: their procs were certainly not committed (or their DELETE was).

        Never call this while the outcome of a COMMIT is unknown: leave the booking in flight and recompute will tell.
        """
        self._call(lambda epoch: [rollback_call(epoch, booking, self.owner) for booking in bookings])

    def release(self, proc_ids: Sequence[str]) -> int:
        """The procs are deleted. Returns how many entries left the ledger; unknown ids are remembered as released."""
        removed, waiting = 0, list(dict.fromkeys(proc_ids))
        while waiting:
            part, waiting = waiting[:_RELEASED_PER_ROUND_TRIP], waiting[_RELEASED_PER_ROUND_TRIP:]
            answers, _ = self._call(partial(id_calls, "release", part))
            removed += sum(int(answer[2]) for answer in answers)
            waiting += [proc_id for answer in answers for proc_id in answer[3:]]
        return removed

    # For recompute, caps and bootstrap

    def mark(self) -> Mark:
        """Mark this moment: the sequence number every earlier change is at or below, and Redis TIME after that."""
        (answer,), (now,) = self._call(
            lambda epoch: [ScriptCall("inventory", LEDGER_KEYS, (epoch,))], reads=[("TIME",)]
        )
        return Mark(self.epoch(), int(answer[1]), int(now[0]))

    def seq_behind(self, records: Iterable[Record], *, at_least: int = -1) -> str | None:
        """What is wrong when acct:seq is below the number of an entry, in words: another program set the number back or
        deleted it.

        A number that comes again would keep entries of vanished procs for ever, and let a change be taken for none.
        ``at_least``: acct:seq at some moment before, which mostly spares reading it again.
        """
        newest = max((record.changed_seq for record in records), default=0)
        if newest <= at_least or newest <= (seq := self.mark().seq):
            return None
        return f"{keys.SEQ} is {seq}, below the {newest} of an entry"

    def apply(self, changes: Sequence[Change], *, epoch: Epoch) -> tuple[list[str], list[int]]:
        """Apply differences that were found under ``epoch``; returns the ids passed over because they had changed, and
        our sequence numbers."""
        passed_over, seqs, waiting = [], [], list(changes)
        while waiting:
            part, waiting = waiting[:_APPLIED_PER_ROUND_TRIP], waiting[_APPLIED_PER_ROUND_TRIP:]
            answers = self.call_under(reconcile_calls(epoch.text, part, self.owner))
            passed_over += [proc_id for answer in answers for proc_id in answer[4:]]
            seqs += [int(answer[1]) for answer in answers if int(answer[2])]
            left = {proc_id for answer in answers for proc_id in answer[3]}
            waiting += [change for change in part if change.proc_id in left] if left else []
        return passed_over, seqs

    def write_caps(self, version: str, rows: Sequence[CapRow], *, epoch: Epoch | None = None) -> tuple[int, int]:
        """Write caps of ``version`` (store.caps_version); returns how many, and how many newer ones were kept."""
        if epoch is None:
            answers, _ = self._call(lambda epoch: caps_calls(epoch, version, rows))
        else:
            answers = self.call_under(caps_calls(epoch.text, version, rows))
        return sum(int(answer[1]) for answer in answers), sum(int(answer[2]) for answer in answers)

    def records(self) -> Iterator[Record]:
        """Every entry, by HSCAN: bounded work a call; one that comes or goes meanwhile may be seen or not, any twice.

        What nobody can read is no entry: it counts for nothing, and a recompute writes it anew if its proc runs.
        """
        with answering(self.client):
            for proc_id, text in self.client.hscan_iter(keys.LEDGER, count=_SCAN_COUNT):
                with suppress(InvalidInput):
                    yield keys.unpack(proc_id, text)

    def records_of(self, proc_ids: Sequence[str]) -> list[Record]:
        """The entries of these procs that there are and that can be read."""
        found = []
        with answering(self.client):
            for part in chunks(proc_ids, _SCAN_COUNT):
                texts = cast("list[str | None]", self.client.hmget(keys.LEDGER, list(part)))
                for proc_id, text in zip(part, texts, strict=True):
                    with suppress(InvalidInput):
                        found += [keys.unpack(proc_id, text)] if text is not None else []
        return found

    def _call(
        self,
        calls: Callable[[str], Sequence[ScriptCall]],
        *,
        reads: Sequence[Sequence[str]] = (),
        raising: bool = True,
    ) -> tuple[list[Any], list[Any]]:
        """Make the calls; all of them again if the store has a new epoch by now, because what was answered under the
        former one went with the store that had it. ``raising`` False: errors of Redis stand among the answers."""
        for epoch in (self.epoch, self.learn_epoch):
            answers, values = self._send(calls(epoch().text), reads, raising=raising)
            if not _refused_for_the_epoch(answers):
                return answers, values
        raise NotReady("the counters in Redis are being filled; waiting for the bootstrap")

    def call_under(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Make calls that carry an epoch of their own. Raises NotReady when it is not the store's (any more)."""
        answers, _ = self._send(calls, ())
        if _refused_for_the_epoch(answers):
            raise NotReady("the counters in Redis were lost, or filled anew, in the middle of an operation")
        return answers

    def _send(
        self, calls: Sequence[ScriptCall], reads: Sequence[Sequence[str]], *, raising: bool = True
    ) -> tuple[list[Any], list[Any]]:
        """The answers to the calls, and what the reads returned, in one round trip under this ledger's fence. Raises
        NotReady, StoreDamaged and FencedOff."""
        with answering(self.client):
            return call_scripts(self.client, calls, reads=reads, raising=raising, fence=self._fence)


def stored_epoch(client: redis.Redis) -> str | None:
    """The epoch as it stands in the store; None for none, and for a key of another type. Raises NotReady."""
    with answering(client):
        (stored,) = cast("list[str | None]", client.mget(keys.EPOCH))
    return stored


@contextmanager
def answering(client: redis.Redis | None = None) -> Iterator[None]:
    """Turn "Redis does not answer, or may not write" into NotReady: for a booking it means the same.

    With ``client``, what Redis refuses because a key of the store is damaged closes the store (StoreDamaged).
    """
    try:
        yield
    except (RedisConnectionError, RedisTimeoutError, ResponseError) as error:
        if isinstance(error, ResponseError) and not takes_no_write(error):
            if client is not None:
                with answering():
                    raise_if_damaged(client)
            raise
        raise NotReady(f"Redis cannot be used for the counters: {error}") from error


def _capped_keys(bookings: Iterable[Booking]) -> list[str]:
    """The keys of all capped vertices that these bookings count in, each once."""
    return list(dict.fromkeys(key for booking in bookings for key in keys.capped(booking.vertices)))


def _refused_for_the_epoch(answers: Sequence[Any]) -> bool:
    """Whether a script refused any of these calls because it was made under another epoch than the store's."""
    return any(refused_for(answer) == NOT_READY for answer in answers)


def _refused(answer: Any) -> BookingRefused:
    """Why a booking was refused, by the script's answer to it or the error in the place of one."""
    if isinstance(answer, Exception):
        return BookingRefused(ERROR, text=str(answer))
    _, table, current, limit = answer
    if table in (UNSEEDED, TOMBSTONED):
        return BookingRefused(table, text=str(current))
    return BookingRefused(str(table), float(current), float(limit))


# The calls of the scripts: what their headers ask for, built in one place (tests compare the two).

PROCS_PER_CALL, PROCS_PER_DUAL_CALL, VERTICES_PER_CALL = 16, 10, 50
"""What one call takes: at most 400 commands, or some half a millisecond of Redis's processor, for which everybody else
waits, also where a layer has a dozen limits; so little that a busy system seldom puts Redis off the processor in the
midst of it. In a dual store a proc takes more commands, and a change may count one proc out and in: two for one. Of
procs under limits that count machines or are reported a script leaves those for which there is no time, and says so."""

NOT_READY = "not_ready"
"""A refusal of the scripts: the store has another epoch, or none that is open."""
UNSEEDED = "unseeded"
"""A refusal of the scripts: the store lacks caps of a vertex."""
TOMBSTONED = "tombstoned"
"""A refusal of the scripts: the proc was in the ledger and left it."""
ERROR = "error"
"""A refusal that is an error of Redis, whose text comes with it."""

Phase: TypeAlias = Literal["before", "after"]


class Cause(StrEnum):
    """Why an entry differs from the proc table."""

    MISSED_RELEASE = "missed_release"  # confirmed, and its proc is gone: its release was not heard
    CRASHED_BOOKING = "crashed_booking"  # never confirmed, no proc, too old to be committed still
    RETIRED = "retired"  # the show is not managed any more
    MISSING = "missing"  # a proc without entry
    MOVED = "moved"  # job, host or amounts changed since the booking
    LATE_SETTLE = "late_settle"  # committed, but the worker that booked it died before settling


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between the ledger and the proc table, to be applied."""

    proc_id: str
    expected_seq: int | None
    """``changed_seq`` of the entry as it was seen: an entry that has another by now is left alone. None when there was
    no entry, or one that nobody can read."""
    entry: str | None
    """The entry as it should be; None removes it."""
    state: EntryState = EntryState.CONFIRMED
    """The state that the entry should have. It counts only with an entry."""
    cause: Cause | None = field(default=None, compare=False)
    """Why the entry is not as it should be."""


def book_call(epoch: str, mode: Literal["check", "force"], booking: Booking, owner: str) -> ScriptCall:
    """The call that books a proc: by ``check`` where the caps decide, by ``force`` where they do not."""
    # Where a booking has limits alone: whatever an argument says, it costs.
    machine = (booking.machine,) if booking.vertices.limit_ids else ()
    arguments = (epoch, mode, booking.proc_id, owner, *booking.packed().split("|"), *machine)
    return ScriptCall("book", LEDGER_KEYS, arguments)


def rollback_call(epoch: str, booking: Booking, owner: str) -> ScriptCall:
    """The call that takes exactly this booking out again."""
    return book_call(epoch, "force", replace(booking, cores=-booking.cores, gpus=-booking.gpus), owner)


def settle_calls(epoch: str, bookings: Sequence[Booking], owner: str) -> list[ScriptCall]:
    """Confirm entries, or add them."""
    rows = [(booking.proc_id, "any", EntryState.CONFIRMED.value, booking.packed()) for booking in bookings]
    return _calls("reconcile", (epoch, owner), rows, _procs_per_call(epoch))


def reconcile_calls(epoch: str, changes: Sequence[Change], owner: str) -> list[ScriptCall]:
    """The calls that bring entries to what the proc table says."""
    rows = [
        (
            change.proc_id,
            str(change.expected_seq or ""),
            change.state.value if change.entry is not None else "",
            change.entry or "",
        )
        for change in changes
    ]
    return _calls("reconcile", (epoch, owner), rows, _procs_per_call(epoch) // 2)


def caps_calls(epoch: str, version: str, rows: Sequence[CapRow]) -> list[ScriptCall]:
    """The calls that write caps. A row has the key of a vertex, and its fields, each name before its value.

    A limit that counts machines has two lists behind its fields, of machines that hold it by what the ledger does not
    have: those that count, and those that do not.
    """
    return _calls("caps", (epoch, version), [(key, json.dumps(fields)) for key, fields in rows])


def adjust_calls(epoch: str, token: str, amounts: Sequence[tuple[str, int, int]]) -> list[ScriptCall]:
    """The calls by which the consistency check that has this token corrects counters.

    ``amounts``: the key of a vertex, and the cores (of a limit, frames) and GPUs to add.
    """
    return [
        ScriptCall("adjust", LEDGER_KEYS, (epoch, token, number, *(field for amount in part for field in amount)))
        for number, part in enumerate(chunks(amounts, VERTICES_PER_CALL), start=1)
    ]


def machines_calls(epoch: str, places: Sequence[tuple[str, str, str]], *, heal: bool) -> list[ScriptCall]:
    """``places``: limits, machines ('' of a limit of frames), and a proc that may be counted there or '', of which the
    script says which differ, and heals them."""
    return _calls("machines", (epoch, "heal" if heal else "look"), places)


def reseed_cas_calls(epoch: str, seq: int, values: Sequence[tuple[str, int, int]]) -> list[ScriptCall]:
    """``values``: vertex key, cores and GPUs as they were at ``seq``. Each call compares and swaps by itself."""
    return _calls("reseed_cas", (epoch, seq), values)


def epoch_set_call(seen: str, wanted: str) -> ScriptCall:
    """The call that replaces the epoch, if it is still the one seen."""
    return ScriptCall("epoch_set", (keys.EPOCH, keys.SEQ), (seen, wanted))


def id_calls(name: str, ids: Sequence[str], epoch: str, *fixed: str | float) -> list[ScriptCall]:
    """Calls of a script that takes ids, or vertex keys: ``release``; ``inventory``; ``free``, with ``idle`` for those
    that count nothing or ``all``; ``foreign``, with phase and grace in seconds."""
    size = _procs_per_call(epoch) if name == "release" else VERTICES_PER_CALL
    return _calls(name, (epoch, *fixed), [(proc_id,) for proc_id in ids], size)


def _procs_per_call(epoch: str) -> int:
    """The most procs that one call of ``release`` names: fewer in a dual store."""
    return PROCS_PER_DUAL_CALL if Epoch(epoch).dual else PROCS_PER_CALL


def _calls(
    name: str, fixed: Sequence[str | float], rows: Sequence[Sequence[str | int]], size: int = VERTICES_PER_CALL
) -> list[ScriptCall]:
    """Calls that take the ``fixed`` arguments, and then as many rows as one call may."""
    return [
        ScriptCall(name, LEDGER_KEYS, (*fixed, *(field for row in part for field in row)))
        for part in chunks(rows, size)
    ]


def refused_for(answer: Sequence[Any] | Exception) -> str | None:
    """The table (or reason) of a refusal, None for a success."""
    if isinstance(answer, Exception):
        return ERROR
    return None if int(answer[0]) == 1 else str(answer[1])
