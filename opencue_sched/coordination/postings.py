"""Cluster postings: what should be dispatched, who is at it, and when it is worth looking again.

A posting per cluster on the board. Messages are only hints; the posting decides. Offering a posting twice is harmless,
a claim expires with its owner, and a wake-up during a claim is never lost.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import redis
import structlog
from redis.exceptions import RedisError

from opencue_sched.coordination.leader import boot_clock
from opencue_sched.coordination.names import BoardKeys
from opencue_sched.domain.cluster import Cluster, ClusterKind
from opencue_sched.lua_scripts import ScriptCall, call_script, call_scripts

log = structlog.get_logger(__name__)

RESEND_SECONDS = 2.0
OFFERS_PER_CALL = 50
NORMAL_PRIORITY = 2

End = Literal["again", "abandon", "sleep", "fail", "consume", "trash"]


@dataclass(frozen=True, slots=True)
class Offered:
    """A cluster's posting; ``send`` says that a message should go out for it now."""

    cluster: Cluster
    uuid: str
    send: bool


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to work on a posting until it expires; ``wake`` is the wake-up count it began with."""

    uuid: str
    owner: str
    fence: int
    wake: int
    cluster: Cluster


def _encode(cluster: Cluster) -> str:
    return json.dumps(
        {
            "v": 1,
            "facility": cluster.facility_id,
            "show": cluster.show_id,
            "kind": cluster.kind.value,
            "tags": list(cluster.tags),
            "alloc": cluster.alloc_id,
        }
    )


def _decode(text: str) -> Cluster:
    data = json.loads(text)
    return Cluster(data["facility"], data["show"], ClusterKind(data["kind"]), tuple(data["tags"]), data["alloc"])


class ClusterPostings:
    """The board of clusters in one namespace (one per facility scope)."""

    def __init__(self, client: redis.Redis, keys: BoardKeys) -> None:
        self._client = client
        self._board = keys
        self._keys = [keys.of(part) for part in ("ready", "delayed", "claimed", "names", "seq", "events", "trash")]
        self._prefix = keys.job("")

    def offer(self, clusters: Iterable[Cluster], *, wake: bool = False) -> list[Offered]:
        """Post each cluster unless it is posted; with ``wake``, also rouse sleeping ones. One round trip."""
        listed = list(clusters)
        chunks = [listed[i : i + OFFERS_PER_CALL] for i in range(0, len(listed), OFFERS_PER_CALL)]
        calls = [ScriptCall("board_offer", self._keys, self._offer_args(chunk, wake)) for chunk in chunks]
        if not calls:
            return []
        answers, _ = call_scripts(self._client, calls)
        offered = []
        for chunk, answer in zip(chunks, answers, strict=True):
            for i, cluster in enumerate(chunk):
                offered.append(Offered(cluster, str(answer[3 * i]), bool(answer[3 * i + 1])))
        return offered

    def sleeping(self) -> int:
        """How many postings rest."""
        return int(self._client.zcard(self._board.of("delayed")))

    def posted(self) -> dict[str, str]:
        """Cluster key -> posting uuid, of every posting."""
        return {str(name): str(uuid) for name, uuid in self._client.hgetall(self._board.of("names")).items()}

    def _offer_args(self, clusters: Sequence[Cluster], wake: bool) -> list[str | int | float]:
        args: list[str | int | float] = [self._prefix, int(RESEND_SECONDS * 1000)]
        for cluster in clusters:
            args += [cluster.key, _encode(cluster), NORMAL_PRIORITY, int(wake)]
        return args

    def claim(self, uuid: str, owner: str, *, ttl_seconds: float) -> Claim | None:
        """Claim a posting; None when it is gone, held, asleep or trashed."""
        answer = call_script(
            self._client, "board_claim", self._keys, [self._prefix, uuid, owner, int(ttl_seconds * 1000)]
        )
        if not answer[0]:
            return None
        return Claim(uuid, owner, int(answer[1]), int(answer[2]), _decode(answer[4]))

    def extend(self, claims: Sequence[Claim], *, ttl_seconds: float) -> list[Claim]:
        """Prolong claims; returns those that are still held. One round trip."""
        calls = [
            ScriptCall(
                "board_extend",
                self._keys,
                [self._prefix, claim.uuid, claim.owner, claim.fence, int(ttl_seconds * 1000)],
            )
            for claim in claims
        ]
        answers, _ = call_scripts(self._client, calls) if calls else ([], [])
        return [claim for claim, held in zip(claims, answers, strict=True) if held]

    def end(
        self, claim: Claim, how: End, *, delay_seconds: float = 0.0, failures_allowed: int = 1, error: str = ""
    ) -> bool:
        """End a claim (see lua/board_end.lua). True when a message should be sent for the posting at once.

        A claim lost meanwhile is somebody else's: nothing is changed, and False is returned.
        """
        answer = call_script(
            self._client,
            "board_end",
            self._keys,
            [
                self._prefix,
                claim.uuid,
                claim.owner,
                claim.fence,
                how,
                int(delay_seconds * 1000),
                claim.wake,
                failures_allowed,
                error[-4000:],
            ],
        )
        if not answer[0]:
            log.warning("claim_lost", posting=claim.uuid, cluster=claim.cluster.key, fence=claim.fence, how=how)
            return False
        return bool(answer[1])


class ClaimKeeper:
    """Prolongs this process's claims from one thread, at a third of their life.

    A claim that was not prolonged in time counts as lost (``alive`` is False) from ``ttl - ttl / 4`` after the last
    success on, by this process's own clock: before anybody else can have it.
    """

    def __init__(
        self, postings: ClusterPostings, *, ttl_seconds: float, clock: Callable[[], float] = boot_clock
    ) -> None:
        self._postings = postings
        self._ttl = ttl_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[tuple[str, int], tuple[Claim, float]] = {}
        self._wanted = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, claim: Claim, *, claimed_at: float) -> None:
        """Start prolonging ``claim``; ``claimed_at`` is the clock before the claim was asked for."""
        with self._lock:
            self._held[(claim.uuid, claim.fence)] = (claim, claimed_at)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="claim-keeper", daemon=True)
                self._thread.start()
        self._wanted.set()

    def drop(self, claim: Claim) -> None:
        """Stop prolonging ``claim``."""
        with self._lock:
            self._held.pop((claim.uuid, claim.fence), None)

    def alive(self, claim: Claim) -> bool:
        """Whether ``claim`` is certainly still this process's."""
        with self._lock:
            held = self._held.get((claim.uuid, claim.fence))
        return held is not None and self._clock() - held[1] < self._ttl * 0.75

    def stop(self) -> None:
        self._stopped.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(timeout=self._ttl)

    def _run(self) -> None:
        while not self._stopped.is_set():
            with self._lock:
                claims = [claim for claim, _ in self._held.values()]
            if not claims:
                self._wanted.wait()
                self._wanted.clear()
                continue
            self._extend(claims)
            self._stopped.wait(self._ttl / 3)

    def _extend(self, claims: list[Claim]) -> None:
        now = self._clock()
        try:
            held = {(claim.uuid, claim.fence) for claim in self._postings.extend(claims, ttl_seconds=self._ttl)}
        except RedisError as error:
            log.warning("claims_not_prolonged", claims=len(claims), error=str(error))
            return
        with self._lock:
            for claim in claims:
                key = (claim.uuid, claim.fence)
                if key in held and key in self._held:
                    self._held[key] = (claim, now)
                else:
                    self._held.pop(key, None)
