"""Cluster postings: which clusters should be dispatched, who works on each, and when a message for it is due.

Each cluster has one posting on the board for each shard; the board and its scripts call a posting a job. Messages are
only hints; the posting decides. Enqueueing a cluster twice is harmless, a claim expires with its owner, and a wake-up
during a claim is never lost. Every message has a ticket. A claim answers all messages that were sent for its posting
before; a message that was answered is stale, so copies of a message change nothing.
"""

from __future__ import annotations

import json
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

import redis
import structlog

from opencue_sched.background import PeriodicThread
from opencue_sched.clients.lua_scripts import Fence, chunks
from opencue_sched.clock import boot_clock
from opencue_sched.coordination.board import RESEND_SECONDS, BoardScripts, End, Held, JobPriority, Update, life_ms
from opencue_sched.coordination.keys import BoardKeys, cluster_board
from opencue_sched.domain.clusters import Cluster, ClusterKind, as_in_this_release, without_shard
from opencue_sched.domain.shards import Division, shards
from opencue_sched.settings import Settings

log = structlog.get_logger(__name__)

ENQUEUED_PER_CALL = 50
"""How many clusters one call of a script posts at most: Redis serves nobody else while a script runs."""
CLAIMED_TOGETHER = 200
"""How many postings one claim takes along at most: so many take Redis about two milliseconds."""
_CLAIM_RAN_OUT = 1
"""What lua/board_due.lua answers, in place of the time of an unanswered message, for a posting whose claim ran out."""
FAILURE_KINDS = ("postgresql", "redis", "program")
"""The kinds of failures of passes: the store that the error came from, or the program itself."""


@dataclass(frozen=True, slots=True)
class Enqueued:
    """A cluster's posting, and whether a message is to be sent for it."""

    cluster: Cluster
    uuid: str
    ticket: int = 0
    """The ticket of the message to send now; 0 when none is to be sent."""
    again: bool = False
    """Whether a message was sent before that nobody took."""
    sleeping: bool = False
    """Whether the posting sleeps, or cools down, until a time."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to work on a posting until it expires."""

    uuid: str
    """The uuid of the posting."""
    owner: str
    """The instance that has the claim."""
    fence: int
    """A number that grows with each claim on the posting: what names an older one is refused."""
    wake: int
    """How many wake-ups the posting had had when the claim began. After a later wake-up the posting is ready again as
    soon as the claim ends."""
    cluster: Cluster
    token: str
    """Tells this claim from one of the same owner and fence, which a Redis that lost something may give out."""

    @property
    def held(self) -> Held:
        """The claim as the board's scripts know it."""
        return self.uuid, self.owner, self.fence, self.token


class ClaimEnd(NamedTuple):
    """How a claim ends."""

    claim: Claim
    how: End
    """What becomes of the posting: lua/board_end.lua says what each word means."""
    delay_seconds: float = 0.0
    """How long the posting sleeps or cools down, where ``how`` has it do so."""
    reason: str = ""
    """Why the work failed: the kind (FAILURE_KINDS), a colon and one line."""
    error: str = ""
    """The whole text of that failure, with the traceback."""


@dataclass(frozen=True, slots=True)
class SkippedCluster:
    """A cluster that no pass looks at: it is in the trash, or cools down because its passes fail.

    All times are epoch seconds of Redis.
    """

    key: str
    cluster: Cluster | None
    """The cluster that was posted; None where the posting cannot be read."""
    since: float
    """The moment at which the posting came into the trash, or the first of ``failures`` happened."""
    reason: str
    """One line for people."""
    until: float | None = None
    """The end of the cooldown, before which nothing wakes the cluster. It lies in the past while a pass tries the
    cluster again. None for a cluster in the trash."""
    failures: int = 0
    """How many passes over the cluster have failed in a row; 0 for a cluster in the trash."""
    kind: str = ""
    """The kind of the last failure, one of FAILURE_KINDS."""


@dataclass(frozen=True, slots=True)
class ClaimRefused:
    """A posting was not claimed."""

    reason: str
    """Why not:

    - ``gone``: there is no such posting any more.
    - ``held``: it is claimed.
    - ``not_yet``: it sleeps or cools down.
    - ``trashed``: it is in the trash.
    - ``stale``: the message that led to it was answered before.
    - ``unreadable``: its payload cannot be read, and it was taken down.
    - ``no_database``: PostgreSQL does not answer, and a pass of this worker hangs there.
    """
    owner: str = ""
    """The owner of the claim there is, where the reason is ``held``."""


def with_messages(due: Iterable[Enqueued]) -> list[Enqueued]:
    """The postings for which to send a message. ``due``: all that are due, in the order of their tickets.

    One message for each shard is enough, because the claim that answers it takes the shard's other postings along
    (claim_with). It is sent for the last posting: a claim made meanwhile has all postings before. Of more postings than
    CLAIMED_TOGETHER, one in CLAIMED_TOGETHER gets a message, counted from the last. A posting that no claim takes along
    is due again once its message counts as lost.
    """
    # Messages that are sent again go to another queue than first ones (routing.py), so each kind is enough by itself.
    alike: defaultdict[tuple[str, bool], list[Enqueued]] = defaultdict(list)
    for posting in due:
        alike[posting.cluster.shard, posting.again].append(posting)
    chosen = []
    for postings in alike.values():
        last_first = postings[::-1]
        chosen += last_first[::CLAIMED_TOGETHER]
    return chosen


def encode_cluster(cluster: Cluster) -> str:
    """A cluster as the payload of its posting, version 1. The field ``shard`` is left out for a cluster without a
    shard."""
    fields = {
        "v": 1,
        "facility": cluster.facility_id,
        "show": cluster.show_id,
        "kind": cluster.kind.value,
        "tags": list(cluster.tags),
        "alloc": cluster.alloc_id,
    }
    return json.dumps({**fields, "shard": cluster.shard} if cluster.shard else fields)


def decode_cluster(text: str) -> Cluster | None:
    """The cluster of a posting's payload; None for a payload of another version, or one that cannot be read."""
    try:
        data = json.loads(text)
        kind, tags, shard = ClusterKind(data["kind"]), tuple(data["tags"]), str(data.get("shard", ""))
        cluster = Cluster(data["facility"], data["show"], kind, tags, data["alloc"], shard)
        return cluster if data["v"] == 1 else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


class ClusterPostings(BoardScripts):
    """The board of clusters in one namespace (one per facility scope).

    ``division`` says how the hosts are divided now. A posting of a shard that there is not any more is taken down when
    its claim ends, however it ends: its cluster has postings for the shards there are. Without ``division`` no posting
    is taken down for that. A message that no claim answers within ``resend_seconds`` counts as lost, and is sent again.
    Calls raise RedisError when Redis cannot be asked.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: BoardKeys,
        *,
        division: Callable[[], Division] | None = None,
        resend_seconds: float = RESEND_SECONDS,
    ) -> None:
        super().__init__(client, keys, resend_seconds=resend_seconds)
        self._division = division

    def enqueue(
        self, clusters: Iterable[Cluster], *, wake: bool | Collection[Cluster] = False, fence: Fence | None = None
    ) -> list[Enqueued]:
        """Post each cluster unless it is posted, and wake the clusters of ``wake`` (True: all) that sleep. One round
        trip.

        Raises FencedOff, and posts nothing more, when a leader after that of ``fence`` was elected.
        """
        listed = list(clusters)
        calls = []
        for chunk in chunks(listed, ENQUEUED_PER_CALL):
            args: list[str | int | float] = [self.resend_ms]
            for cluster in chunk:
                woken = wake if isinstance(wake, bool) else cluster in wake
                # All postings have the same: priority counts among OpenCue's jobs, within a pass, and no rule puts one
                # show before another.
                args += [cluster.key, encode_cluster(cluster), JobPriority.NORMAL.rank, int(woken)]
            calls.append(args)
        answers = [posting for page in self.call_each("board_enqueue", calls, fence=fence) for posting in page]
        return [
            Enqueued(cluster, str(uuid), int(ticket), bool(again), bool(sleeping))
            for cluster, (uuid, ticket, again, sleeping) in zip(listed, answers, strict=True)
        ]

    def withdraw(self, uuids: Sequence[str], *, fence: Fence | None = None) -> int:
        """Take postings down for good, except those that are claimed or in the trash; returns how many were taken down.
        One round trip.

        Raises FencedOff, and takes none down, when a leader after that of ``fence`` was elected.
        """
        answers = self.call_each("board_update", [_update(uuid, "withdraw") for uuid in uuids], fence=fence)
        return sum(int(done) for done, *_ in answers)

    def posted(self) -> dict[str, str]:
        """Cluster key -> posting uuid, of every posting."""
        return {str(name): str(uuid) for name, uuid in self.client.hgetall(self.keys.of("names")).items()}

    def find_all(self, cluster_key: str) -> list[str]:
        """The uuids of a cluster's postings. A key with a shard names the posting for that shard, a key without a shard
        those for all shards.

        Postings of the same cluster that another release made under another key come last.
        """

        def is_named(key: str) -> bool:
            return key == cluster_key or key.startswith(f"{cluster_key}@")

        found = self._present_keys()
        present_keys = {present for posted, present in found.values() if is_named(posted) or is_named(present)}
        uuids = [uuid for uuid, (_, present) in found.items() if present in present_keys]
        named = [uuid for uuid in uuids if is_named(found[uuid][0])]
        return named + [uuid for uuid in uuids if uuid not in named]

    def _present_keys(self) -> dict[str, tuple[str, str]]:
        """Posting uuid -> the key it was posted under, and the key that its cluster has in this release."""
        posted = self.posted()
        with self.client.pipeline(transaction=False) as pipe:
            for uuid in posted.values():
                pipe.hget(self.keys.job(uuid), "details")
            answers: Any = pipe.execute()
        return {uuid: (key, _present_key(key, text)) for (key, uuid), text in zip(posted.items(), answers, strict=True)}

    def keep_trashed(self, clusters: Iterable[Cluster], *, fence: Fence | None = None) -> None:
        """Put the other postings of each trashed cluster in the trash, too: those for other shards, and those that
        another release made under another key. They get the same reason and time, so that all leave the trash together.

        ``clusters`` are all clusters that there are. Those in the trash get their postings here: an enqueue() alone
        would have them worked on. Raises FencedOff as enqueue() does.
        """
        trashed: dict[str, dict[str, str]] = {}
        for listing in self.listings("trash"):
            key = _present_key(listing.fields.get("name", ""), listing.fields.get("details"))
            trashed.setdefault(without_shard(key), listing.fields)
        if not trashed:
            return
        self.enqueue([cluster for cluster in clusters if without_shard(cluster.key) in trashed], fence=fence)
        calls = []
        for uuid, (_, key) in self._present_keys().items():
            if fields := trashed.get(without_shard(key)):
                error, since_ms = fields.get("error", ""), fields.get("modified", "")
                calls.append(_update(uuid, "trash", error, force=True, since_ms=since_ms))
        self.call_each("board_update", calls, fence=fence)

    def skipped(self) -> list[SkippedCluster]:
        """The clusters that cool down after failed passes, the longest cooldown first; then those in the trash, the
        oldest first. Two round trips."""
        names = ("state", "name", "details", "failures", "failing", "rest", "reason", "modified", "error")
        with self.client.pipeline(transaction=False) as pipe:
            for uuid in self.posted().values():
                pipe.hmget(self.keys.job(uuid), *names)
            answers: Any = pipe.execute()
        rows = ({name: value or "" for name, value in zip(names, values, strict=True)} for values in answers)
        found = [_skipped(fields) for fields in rows if fields["state"] == "trash" or int(fields["failures"] or 0) > 0]
        trashed = [cluster for cluster in found if cluster.until is None]
        cooled_down = [cluster for cluster in found if cluster.until is not None]
        cooled_down.sort(key=lambda cluster: (-(cluster.until or 0.0), cluster.since))
        return cooled_down + sorted(trashed, key=lambda cluster: cluster.since)

    def failures(self, claim: Claim) -> int:
        """How many passes over the claimed cluster have failed in a row before this one."""
        return int(self.client.hget(self.keys.job(claim.uuid), "failures") or 0)

    def claim(self, uuid: str, owner: str, *, ttl_seconds: float, ticket: int | None = None) -> Claim | ClaimRefused:
        """Claim a posting for ``owner``; the answer says why not when the claim was refused.

        ``ticket`` is that of the message that leads here; without a message no claim is refused as stale. A posting
        whose payload cannot be read is taken down: the next sweep that finds work in its cluster posts it anew.
        """
        token = uuid4().hex
        answer = self.claim_job(uuid, owner, token, life=ttl_seconds, ticket=ticket)
        if not answer[0]:
            return ClaimRefused(str(answer[1]), str(answer[2]) if answer[1] == "held" else "")
        _claimed, _uuid, fence, wake, _name, details = answer
        return self._claim_of(uuid, owner, fence, wake, details, token) or ClaimRefused("unreadable")

    def _claim_of(self, uuid: str, owner: str, fence: int, wake: int, details: str, token: str) -> Claim | None:
        """The claim that a script has just made. None for a posting that cannot be read, which is taken down."""
        if cluster := decode_cluster(details):
            return Claim(uuid, owner, int(fence), int(wake), cluster, token)
        log.error("posting_unreadable", posting=uuid, details=details[:200])
        self.call("board_end", *self.end_call((uuid, owner, fence, token), "consume"))
        return None

    def claim_with(self, claim: Claim, owner: str, *, ttl_seconds: float) -> list[Claim]:
        """Claim, for the ``owner`` of a claim, the other postings of its shard: those that are ready now, and those
        that sleep because a pass found no host for their frames; at most CLAIMED_TOGETHER. One round trip.

        Each claim is as one of claim(): it has a fence of its own, and answers the messages for its posting.
        """
        token = uuid4().hex
        answer = self.call(
            "board_claim_with",
            claim.uuid,
            claim.token,
            claim.cluster.shard,
            owner,
            life_ms(ttl_seconds),
            token,
            CLAIMED_TOGETHER,
            self.keys.call(token),
        )
        claims = [self._claim_of(uuid, owner, fence, wake, details, token) for uuid, fence, wake, details in answer]
        return [claim for claim in claims if claim is not None]

    def take_due(self) -> tuple[list[Enqueued], float]:
        """The postings for which a message is due, each with its ticket, and the seconds until the first claim runs out
        unless it is renewed (infinity when there is no claim). One call of a script."""
        ends_ms, *answer = self.call("board_due", self.resend_ms)
        due = []
        for uuid, details, ticket, unanswered in answer:
            cluster = decode_cluster(details)
            if cluster is None:
                log.error("posting_unreadable", posting=uuid, details=details[:200])
                continue
            due.append(Enqueued(cluster, str(uuid), int(ticket), again=unanswered > 0))
            if unanswered == _CLAIM_RAN_OUT:
                log.warning("claim_ran_out", posting=uuid, cluster=cluster.key)
        return due, ends_ms / 1000 if ends_ms >= 0 else math.inf

    def extend(self, claims: Sequence[Claim], *, ttl_seconds: float) -> list[Claim]:
        """Renew claims, so that they live for ``ttl_seconds`` from now; returns those that are still held. One round
        trip."""
        life = life_ms(ttl_seconds)
        answers = self.call_each("board_end", [(*claim.held, "extend", life) for claim in claims])
        return [claim for claim, (held, *_) in zip(claims, answers, strict=True) if held]

    def end(self, claim: Claim, how: End, *, delay_seconds: float = 0.0, reason: str = "", error: str = "") -> int:
        """End one claim, as end_many() does; returns the ticket of the message to send, or 0."""
        return self.end_many([ClaimEnd(claim, how, delay_seconds, reason, error)])[0]

    def end_many(self, endings: Sequence[ClaimEnd]) -> list[int]:
        """End claims. Returns for each, in this order, the ticket of the message to send for its posting at once.

        The ticket is 0 where no message is due, and for a claim that was lost meanwhile: the posting is another
        worker's. with_messages() says which messages to send. One round trip.
        """
        present_shards = None if self._division is None else shards(self._division())
        calls = [
            self.end_call(
                ending.claim.held,
                ending.how if present_shards is None or ending.claim.cluster.shard in present_shards else "consume",
                delay_seconds=ending.delay_seconds,
                wake=ending.claim.wake,
                reason=ending.reason,
                error=ending.error,
            )
            for ending in endings
        ]
        tickets = []
        for ending, (ended, ticket, *_) in zip(endings, self.call_each("board_end", calls), strict=True):
            tickets.append(int(ticket) if ended else 0)
            if not ended:
                claim = ending.claim
                where = {"posting": claim.uuid, "cluster": claim.cluster.key}
                log.warning("claim_lost", **where, fence=claim.fence, how=ending.how)
        return tickets


def _present_key(posted: str, details: str | None) -> str:
    """The key that a posting's cluster has in this release. Another release may have posted it under another key; a
    payload that cannot be read leaves it the key it was ``posted`` under."""
    cluster = decode_cluster(details or "")
    return posted if cluster is None else as_in_this_release(cluster).key


def _update(
    uuid: str, how: Update, text: str = "", *, force: bool = False, since_ms: str = ""
) -> tuple[str | int, ...]:
    """The arguments of lua/board_update.lua for a posting.

    No key for the answer is given, so Redis does not remember the answer: a call that is made again because its answer
    was lost changes nothing more.
    """
    return uuid, how, text, int(force), "", since_ms


def _skipped(fields: dict[str, str]) -> SkippedCluster:
    """The cluster of a posting that is in the trash or has failed, from the fields of its hash (empty where unset)."""
    cluster = decode_cluster(fields["details"])
    if fields["state"] == "trash":
        why = fields["error"].strip().rpartition("\n")[2]
        return SkippedCluster(fields["name"], cluster, float(fields["modified"] or 0) / 1000, why)
    kind, _, reason = fields["reason"].partition(": ")
    return SkippedCluster(
        fields["name"],
        cluster,
        float(fields["failing"] or 0) / 1000,
        reason,
        until=float(fields["rest"] or 0) / 1000,
        failures=int(fields["failures"]),
        kind=kind,
    )


@dataclass(slots=True)
class _Renewed:
    """The times at which a claim was renewed and its work last did a step, by the boot clock."""

    renewed_at: float
    """The time before the call by which Redis last renewed the claim, or gave it."""
    stepped_at: float
    """The time at which the work under the claim last did a step."""


_RENEWALS_IN_A_LIFE = 3
"""How often a claim is renewed within its life: two renewals in a row may fail."""
_TRUSTED_SHARE_OF_LIFE = 0.75
"""The part of its life for which a claim counts as held after it was renewed. It is less than 1, so that this process
has let go of the claim before another process can have it."""


class ClaimRenewer(PeriodicThread):
    """Renews this process's claims from one thread, at a third of their life.

    A claim that was not renewed in time counts as lost (``alive`` is False) from three quarters of its life after the
    last success on, by this process's own clock: before another process can have it.

    A claim without ``progress`` for longer than ``patience_seconds`` is given up: the work under it hangs, and others
    are to have the cluster.
    """

    def __init__(self, postings: ClusterPostings, *, ttl_seconds: float, patience_seconds: float = math.inf) -> None:
        self._pause_seconds = ttl_seconds / _RENEWALS_IN_A_LIFE
        super().__init__("claim-renewer", self._renew, failed="claims_not_renewed", retry_seconds=self._pause_seconds)
        self._postings = postings
        self.ttl_seconds = ttl_seconds
        self._patience = patience_seconds
        self._lock = threading.Lock()
        self._held: dict[Claim, _Renewed] = {}
        """The claims to renew. Passes and the renewing thread write it, under ``_lock``; alive() only looks up."""
        self._given_up: set[Claim] = set()
        """Claims whose work hangs. Written under ``_lock``; ``hangs`` reads whether it is empty, without."""

    def keep(self, *claims: Claim, claimed_at: float) -> None:
        """Start to renew claims; ``claimed_at`` is the time of the boot clock before Redis was asked for them."""
        with self._lock:
            self._held |= {claim: _Renewed(claimed_at, boot_clock()) for claim in claims}
        self.start()

    def progress(self, *claims: Claim) -> None:
        """Note that the work under the claims has done a step, so that it does not hang. A claim that was given up is
        not renewed again."""
        with self._lock:
            self._given_up.difference_update(claims)
            for claim in self._held.keys() & claims:
                self._held[claim].stepped_at = boot_clock()

    def drop(self, *claims: Claim) -> None:
        """Stop renewing claims."""
        with self._lock:
            self._given_up.difference_update(claims)
            for claim in claims:
                self._held.pop(claim, None)

    @property
    def hangs(self) -> bool:
        """Whether work of this process hangs: a claim was given up, and neither did a step nor was dropped since."""
        return bool(self._given_up)

    def held(self) -> list[Claim]:
        """The claims that are renewed at this moment."""
        with self._lock:
            return list(self._held)

    def alive(self, *claims: Claim) -> bool:
        """Whether the claims are certainly still this process's."""
        oldest = boot_clock() - self.ttl_seconds * _TRUSTED_SHARE_OF_LIFE
        found = [self._held.get(claim) for claim in claims]
        return all(renewed is not None and renewed.renewed_at > oldest for renewed in found)

    def _renew(self) -> float:
        """Renew the claims under which work goes on, and give up the others. Returns the seconds until the next
        round."""
        # Read before the call: a claim lives from the moment Redis renewed it, and that is not earlier.
        now = boot_clock()
        with self._lock:
            # This thread sees only that Redis answers: a claim whose work hangs must not be renewed for ever.
            for claim, renewed in list(self._held.items()):
                silent = now - renewed.stepped_at
                if silent > self._patience:
                    log.error(
                        "claim_given_up", job=claim.uuid, fence=claim.fence, seconds_without_progress=round(silent, 1)
                    )
                    del self._held[claim]
                    self._given_up.add(claim)
        claims = self.held()
        kept = set(self._postings.extend(claims, ttl_seconds=self.ttl_seconds))
        with self._lock:
            for claim in claims:
                if claim not in kept:
                    self._held.pop(claim, None)
                elif claim in self._held:
                    self._held[claim].renewed_at = now
        return self._pause_seconds


CLAIM_SECONDS = 3.0
"""Life of a cluster's claim unless it is renewed: a dead worker's cluster is free after so long."""
LOOK_SECONDS = CLAIM_SECONDS / 3
"""Time between two looks for due postings. A claim that is made after a look must not run out before the next look."""
SHORT_SECONDS = 2.0
"""The longest sleep of a posting whose end gets a look of its own. After a longer sleep the posting can wait for the
next periodic look."""
AFTER_THE_END_SECONDS = 0.002
"""How long after the end of a claim or a sleep a look comes. The board counts in milliseconds: by then the end is past
by its clock as well."""


class DueThread(PeriodicThread):
    """Sends a message for every posting that is due: nobody took its last message, its claim ran out, or its sleep is
    over.

    Every worker has this thread, and of many that look the board gives the ticket of a message to one. So no accident
    strands a cluster, also while no beat leads. The thread looks every ``look_seconds``, when the first claim runs out
    that nobody renews, and when a short sleep ends that this process began. ``send`` puts a message for a posting on a
    dispatch queue.
    """

    def __init__(
        self, postings: ClusterPostings, *, send: Callable[[Enqueued], None], look_seconds: float = LOOK_SECONDS
    ) -> None:
        super().__init__("due-postings", self.look, failed="due_postings_not_read", retry_seconds=look_seconds)
        self._postings = postings
        self._send = send
        self._look_seconds = look_seconds

    def look_in(self, seconds: float) -> None:
        """Look again in ``seconds``, at the end of a posting's sleep, if that is short."""
        if seconds <= SHORT_SECONDS:
            self.start()
            timer = threading.Timer(seconds + AFTER_THE_END_SECONDS, self.wake)
            timer.daemon = True
            timer.start()

    def look(self) -> float:
        """Send the messages that are due; returns the seconds until the next look. Raises RedisError."""
        due, claim_ends = self._postings.take_due()
        for enqueued in with_messages(due):
            self._send(enqueued)
        return min(self._look_seconds, claim_ends + AFTER_THE_END_SECONDS)


def cluster_postings(client: redis.Redis, settings: Settings) -> ClusterPostings:
    """The board of clusters of this process's facility scope."""
    return ClusterPostings(client, cluster_board(settings.coordination.namespace, settings.scheduler.facility))
