"""The calls that a board consists of, one per Lua script, the events it tells of, and the permits of layers. Cluster
postings and the jobboard are built from them, too.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, NamedTuple, cast
from uuid import uuid4

import redis
import structlog

from opencue_sched.background import PeriodicThread
from opencue_sched.clients.lua_scripts import Fence, ScriptCall, call_script, call_scripts, chunks
from opencue_sched.coordination.names import BoardKeys, layers_booked, permit_board

log = structlog.get_logger(__name__)


class JobPriority(StrEnum):
    """How urgent a job is."""

    VERY_HIGH = "VERY_HIGH"
    HIGH = "HIGH"
    NORMAL = "NORMAL"
    LOW = "LOW"
    VERY_LOW = "VERY_LOW"

    @classmethod
    def convert(cls, value: JobPriority | str) -> JobPriority:
        """A priority from its name in any case. Raises ValueError naming the choices."""
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls(value.upper())
        raise ValueError(f"{value!r} is no job priority; use one of {', '.join(cls.__members__)}")

    @property
    def rank(self) -> int:
        """0 for the most urgent to 4."""
        return list(type(self)).index(self)


NEVER = math.inf
"""A claim that does not end by itself."""
ERROR_CHARACTERS = 4000
PAGE = 100
RESEND_SECONDS = 0.8
"""So long after it was sent, a message that no claim answered counts as lost."""
End = Literal["again", "abandon", "sleep", "idle", "put_off", "fail", "consume", "trash"]
Update = Literal["trash", "restore", "rest", "withdraw"]
Pages = Literal["ready", "listed", "trash"]
Held = tuple[str, str, int, str]
"""A claim, as every write under it names it: the job's uuid, owner, fence and token."""


def life_ms(seconds: float) -> int:
    """A claim's life as the scripts want it: 0 for one that never ends."""
    return 0 if seconds == NEVER else max(1, round(seconds * 1000))


def resend_ms() -> int:
    """RESEND_SECONDS as the scripts want it."""
    return round(RESEND_SECONDS * 1000)


@dataclass(frozen=True, slots=True)
class Listing:
    """One job as it was at one moment. ``left_ms`` of its claim: -1 never ends, -2 no claim, None not asked for."""

    uuid: str
    fields: dict[str, str]
    left_ms: float | None = None


class Counts(NamedTuple):
    """How many jobs are where; ``next_ms`` until one becomes ready by itself, -1 when none will."""

    ready: int
    delayed: int
    claimed: int
    trash: int
    next_ms: int


class BoardScripts:
    """The scripts on one board's keys.

    Redis clients make a call again whose answer was lost. Claims, ends and updates carry a token of the call, so that
    the second gets the answer of the first; a caller that means it a second time makes another call.
    """

    def __init__(self, client: redis.Redis, keys: BoardKeys) -> None:
        self.client = client
        self.keys = keys

    def call(self, script: str, *args: str | int | float) -> Any:
        return call_script(self.client, script, self.keys.parts(), [self.keys.job(""), *args])

    def call_each(
        self, script: str, argument_lists: Sequence[Sequence[str | int | float]], *, fence: Fence | None = None
    ) -> list[Any]:
        """One script with several arguments, in one round trip; Redis Cluster takes no scripts in a pipeline.

        Raises FencedOff when a leader after that of ``fence`` was elected.
        """
        parts = self.keys.parts()
        calls = [ScriptCall(script, parts, [self.keys.job(""), *args]) for args in argument_lists]
        return call_scripts(self.client, calls, fence=fence)[0] if calls else []

    def claim_job(
        self, uuid: str, owner: str, token: str, *, life: float, ticket: int | None = None, again: float | None = None
    ) -> list[Any]:
        """Claim one job, or the next of an empty ``uuid``: the answer of lua/board_claim.lua. ``again`` is the life
        that a claim of the same owner gets instead of being made anew."""
        answered = "" if ticket is None else ticket
        anew = "" if again is None else life_ms(again)
        return list(self.call("board_claim", uuid, owner, life_ms(life), answered, anew, token, self.keys.call(token)))

    def end_call(
        self, held: Held, how: End, *, delay_seconds: float = 0.0, wake: int = 0, reason: str = "", error: str = ""
    ) -> Sequence[str | int | float]:
        """The arguments with which board_end ends the claim ``held``, and a token of this call. lua/board_end.lua says
        what each end means, and what it answers."""
        more = (round(delay_seconds * 1000), wake, reason, error[-ERROR_CHARACTERS:], self.keys.call(uuid4().hex))
        return (*held, how, *more, resend_ms())

    def update(self, uuid: str, how: Update, value: str | int = "", *, force: bool = False) -> list[Any]:
        """What an operator does to a job, also to a claimed one: the answer of lua/board_update.lua."""
        return list(self.call("board_update", uuid, how, value, int(force), self.keys.call(uuid4().hex)))

    def job(self, uuid: str) -> Listing | None:
        """One job now; None when it is gone."""
        *_, fields, left = self.call("board_look", uuid)
        return Listing(uuid, field_map(fields), left_ms=float(left)) if fields else None

    def listings(self, which: Pages) -> Iterator[Listing]:
        """The jobs of one kind, highest priority and oldest first (the trash: oldest first), read in pages."""
        after = "-inf"
        while rows := self.call("board_page", which, after, PAGE):
            yield from (Listing(str(uuid), field_map(fields)) for uuid, _, fields in rows)
            after = str(rows[-1][1])

    def counts(self) -> Counts:
        """Where the jobs are now."""
        return Counts(*self.call("board_look", "")[:5])


def field_map(flat: Sequence[Any]) -> dict[str, str]:
    """A hash as a script answers it."""
    return {str(flat[i]): str(flat[i + 1]) for i in range(0, len(flat), 2)}


# What happens on a board, from its Stream: POSTED, CLAIMED, READY, EXPIRED, REMOVED and TRASHED, each written in the
# same call that made it true.

ANY = "*"
_BLOCK_SECONDS = 1.0
_RETRY_SECONDS = 1.0


class EventReader:
    """Reads a board's events from now on: the fields ``kind``, ``job`` and ``name``. Where it falls 10,000 behind, the
    oldest are lost."""

    def __init__(self, client: redis.Redis, stream: str) -> None:
        self._client = client
        self._stream = stream
        self._position = stream_end(client, stream)

    def read(self, seconds: float) -> list[dict[str, str]]:
        """The events since the last call, waiting up to ``seconds`` for one. Raises RedisError."""
        time_out = self._client.get_connection_kwargs().get("socket_timeout") or math.inf
        block = max(1, round(1000 * min(seconds, _BLOCK_SECONDS, time_out / 2)))
        answer = cast("list[Any]", self._client.xread({self._stream: self._position}, block=block, count=1000))
        entries = answer[0][1] if answer else []
        if entries:
            self._position = entries[-1][0]
        return [fields for _, fields in entries]


def stream_end(client: redis.Redis, stream: str) -> str:
    """The id of a stream's newest entry; that before any of one that has none."""
    newest = cast("list[tuple[str, object]]", client.xrevrange(stream, count=1))
    return newest[0][0] if newest else "0-0"


Callback = Callable[[str, dict[str, Any]], None]


class Notifier(PeriodicThread):
    """Calls back, from a thread of its own, for events of the kinds registered. Callbacks must be quick.

    The thread runs from the first registration on.
    """

    def __init__(self, open_reader: Callable[[], EventReader]) -> None:
        super().__init__("board-events", self._pass_on, failed="board_events_unreadable", retry_seconds=_RETRY_SECONDS)
        self._open = open_reader
        self._reader: EventReader | None = None
        self._lock = threading.Lock()
        self._callbacks: dict[str, list[Callback]] = defaultdict(list)

    def register(self, kind: str, callback: Callback) -> None:
        """Call ``callback(kind, {"job": uuid, "name": name})`` for each event of ``kind`` from now on (ANY: each)."""
        with self._lock:
            self._reader = self._reader or self._open()
            self._callbacks[kind].append(callback)
        self.start()

    def deregister(self, kind: str, callback: Callback) -> None:
        """Stop calling ``callback`` for ``kind``."""
        with self._lock:
            if callback in self._callbacks[kind]:
                self._callbacks[kind].remove(callback)

    def _pass_on(self) -> float:
        for event in self._reader.read(_BLOCK_SECONDS / 2) if self._reader else ():
            with self._lock:
                called = [*self._callbacks[event["kind"]], *self._callbacks[ANY]]
            for callback in called:
                try:
                    callback(event["kind"], {"job": event["job"], "name": event["name"]})
                except Exception:
                    log.exception("board_callback_failed", kind=event["kind"], job=event["job"])
        return 0.0


# Layer permits: one pass at a time works on a layer (distributed scheduler reference, "Layer Permit").
#
# A permit is a job of a board of its own, with the layer's id, and there while some pass has it. Its claim lives 2 s
# per frame the pass may book, at least 2 s and at most as long as a cluster claim does unless it is prolonged; for
# what is planned it is prolonged until the commit's deadline, and at the end of the pass it is consumed. It spares
# work lost to races between passes of overlapping clusters; correctness never depends on it. The reference has no
# upper bound: a process that dies there in a pass over 20 frames keeps everybody off their layer for 40 s.
#
# A pass reads frames before it asks for the permits of their layers, so it may have read frames as waiting that another
# pass booked meanwhile. Each pass names the layers it booked of in a log of the fleet, and leaves out those that are
# named there since it read.

JOBS_PER_CALL = 50
"""A call of so many takes Redis half a millisecond, for which all other clients wait; more are several calls."""
SECONDS_PER_FRAME = 2.0
_PAYLOAD = '{"v": 1, "details": {}, "book": null}'
"""A job of the jobboard with nothing in it."""
_BOOKINGS_KEPT = 1_000
"""More than a fleet commits while a pass reads and asks. One that asks later loses at its commit what others booked."""
_BOOKINGS_KEPT_SECONDS = 60


class LayerPermits:
    """Permits of one namespace. ``claim_ttl``: seconds that a claim on a cluster lives unless it is prolonged.

    An owner is ``place|token``. There is one owner of a place at a time: it also gets the permits that an earlier one
    of its place left.
    """

    def __init__(self, client: redis.Redis, namespace: str, *, claim_ttl: float) -> None:
        self._client = client
        self._scripts = BoardScripts(client, permit_board(namespace))
        self._log = layers_booked(namespace)
        self._claim_ttl = claim_ttl

    def take(self, frames_by_layer: Mapping[str, Mapping[str, int]], *, seconds: float | None = None) -> frozenset[str]:
        """Layer ids granted, out of owner -> layer id -> frames to be looked at. One round trip.

        They are the owner's for ``seconds`` from now, where given, also if they were before.
        """
        calls, asked = [], []
        for owner, of in frames_by_layer.items():
            for chunk in chunks(list(of), JOBS_PER_CALL):
                lives = (seconds or min(self._claim_ttl, SECONDS_PER_FRAME * max(1, of[layer])) for layer in chunk)
                pairs = (it for layer, life in zip(chunk, lives, strict=True) for it in (layer, life_ms(life)))
                calls.append([owner.partition("|")[0], owner, _PAYLOAD, JobPriority.NORMAL.rank, *pairs])
                asked.append(chunk)
        answers = self._scripts.call_each("board_take_many", calls)
        return frozenset(
            layer
            for chunk, fences in zip(asked, answers, strict=True)
            for layer, fence in zip(chunk, fences, strict=True)
            if fence
        )

    def drop(self, layers: Mapping[str, Iterable[str]]) -> int:
        """Give back those of each owner's ``layers`` that are its own; returns how many were. One round trip."""
        calls = [
            (owner.partition("|")[0], owner, *chunk)
            for owner, of in layers.items()
            for chunk in chunks(list(of), JOBS_PER_CALL)
        ]
        return sum(int(gone) for gone in self._scripts.call_each("board_consume_many", calls))

    def tell_booked(self, layers: Collection[str]) -> None:
        """Log that frames of these layers are committed; call it before permits are given back. One round trip."""
        if not layers:
            return
        # A transaction, else a process that dies in between leaves the log for good.
        with self._client.pipeline(transaction=True) as pipe:
            pipe.xadd(self._log, dict.fromkeys(layers, ""), maxlen=_BOOKINGS_KEPT, approximate=True)
            pipe.expire(self._log, _BOOKINGS_KEPT_SECONDS)
            pipe.execute()

    def log_end(self) -> str:
        """Where the log of bookings ends; call it before frames are read. One round trip."""
        return stream_end(self._client, self._log)

    def booked_since(self, log_end: str) -> frozenset[str]:
        """The layers of which frames were booked since, so that frames read then may be booked by now; call it once the
        permits are granted. One round trip."""
        told = cast("list[tuple[str, dict[str, str]]]", self._client.xrange(self._log, f"({log_end}"))
        return frozenset(layer for _, layers in told for layer in layers)
