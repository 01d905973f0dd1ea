"""Launches frames on their RQDs, then settles them: confirms what runs, undoes what does not, leaves alone what is
unknown. `Refusals` finds out whether a host or a job is at fault.

RQD must not be sent a frame twice while its first copy is being set up: it would start a second thread for it, which
fails after ten seconds, reports exit 256 and forgets the copy that runs. So a call is repeated, once, only when it is
certain that nothing started:

- no connection, no such host: not sent, so it is sent once more.
- UNAUTHENTICATED, PERMISSION_DENIED, or a refusal in RQD's own words (UNKNOWN, ABORTED): nothing started; once more.
- "already running": RQD is asked for which proc. Ours: launched. Another's, or unclear: unknown.
- ABORTED, INTERNAL, UNKNOWN otherwise: the call ended, its effect is unclear. RQD is asked; when the frame is absent,
  it is sent once more.
- DEADLINE_EXCEEDED, connection lost, cancelled: it may start at any time, so it is unknown (the settlement asks).
- any other code: refused for good.

Order of an undoing, and why: RQD first (the frame does not run there, confirmed while its proc is still ours), then
PostgreSQL (proc gone, host idle restored, frame WAITING again), then the Redis ledger, then the word that the host
changed. A kill after the second step could hit the frame's next run on the same host; a ledger release before it could
let another booking over the cap.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import grpc
import structlog
from opencue_proto import rqd_pb2
from redis.exceptions import RedisError
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.accounting.keys import Booking
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.clients.store_errors import failure_reason
from opencue_sched.dispatch.cooldown import Cooldowns
from opencue_sched.dispatch.rqd import Fate, RqdChannels, RunningFrameRef, Whereabouts, describe, kill_and_confirm, look
from opencue_sched.domain.frame_command import Environments, command_line, environment, memory_limit
from opencue_sched.domain.plans import PlannedProc
from opencue_sched.domain.units import CENTICORES_PER_CORE
from opencue_sched.errors import InvalidInput, NotReady, RqdFailure
from opencue_sched.settings import Settings
from opencue_sched.store.procs import read_runs
from opencue_sched.store.release import undo_bookings

log = structlog.get_logger(__name__)

_RESEND_PAUSE_SECONDS = 0.05
_KILL_REASON = "opencue-sched: the launch was not confirmed"
# How gRPC's and RQD's words begin. ("Not lauching" is what RQD sends.)
_NOT_CONNECTED = (
    "failed to connect to all addresses",
    "errors resolving",
    "DNS resolution failed",
    "empty address list",
)
_DUPLICATE = "already running"
_REFUSALS = ("Exception calling application", "Not launching", "Not lauching", "Nimby Locked")
_LOST = frozenset({grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
_UNCLEAR = frozenset(
    {grpc.StatusCode.UNKNOWN, grpc.StatusCode.ABORTED, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS}
)
_NOT_LET_IN = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """A frame for one host. The proc is ``run_frame.resource_id``."""

    host_name: str
    run_frame: rqd_pb2.RunFrame

    @property
    def ref(self) -> RunningFrameRef:
        frame = self.run_frame
        return RunningFrameRef(self.host_name, frame.frame_id, frame.resource_id, frame.num_cores)


@dataclass(frozen=True, slots=True)
class LaunchOutcome:
    """Without an ``error`` RQD has it. With one nothing runs and nothing will, or, if its outcome is unknown, it may
    run now or later.

    ``sends`` counts LaunchFrame calls; 0 means that it was not sent at all. ``answered``: RQD said something.
    """

    request: LaunchRequest
    sends: int = 0
    error: RqdFailure | None = None
    answered: bool = False

    @property
    def proc_id(self) -> str:
        return str(self.request.run_frame.resource_id)


class Answer(StrEnum):
    """What a failed LaunchFrame call says of the frame, in the order of the module's table."""

    NOT_SENT = "not_sent"
    REFUSED = "refused"
    REFUSED_FOR_GOOD = "refused_for_good"
    DUPLICATE = "duplicate"
    UNCLEAR = "unclear"
    LOST = "lost"


def classify(code: grpc.StatusCode, details: str) -> Answer:
    """Read a failed LaunchFrame call."""
    if _DUPLICATE in details or code == grpc.StatusCode.ALREADY_EXISTS:
        return Answer.DUPLICATE
    if code == grpc.StatusCode.UNAVAILABLE and details.startswith(_NOT_CONNECTED):
        return Answer.NOT_SENT
    if code in _LOST:
        return Answer.LOST
    if code in _NOT_LET_IN:
        return Answer.REFUSED
    if code in _UNCLEAR:
        return Answer.REFUSED if details.startswith(_REFUSALS) else Answer.UNCLEAR
    return Answer.REFUSED_FOR_GOOD


def launch_all(
    channels: RqdChannels,
    requests: Sequence[LaunchRequest],
    *,
    send_within: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[LaunchOutcome]:
    """Launch frames on many hosts at once; one outcome per request, host by host. Never raises for an RQD.

    Hosts are served side by side (``RqdChannels.each``), the frames of one host one after the other, so a host
    that hangs delays no other. ``send_within`` seconds after the call (default ``rqd.timeout``) no frame is sent any
    more; nor are the remaining frames of a host that did not answer. Both have failed for certain.
    With ``rqd.dry_run_mode`` nothing is sent and everything counts as launched.
    """
    if channels.settings.dry_run_mode:
        return [LaunchOutcome(request) for request in requests]
    not_after = clock() + (channels.settings.timeout if send_within is None else send_within)
    by_host: defaultdict[str, list[LaunchRequest]] = defaultdict(list)
    for request in requests:
        by_host[request.host_name].append(request)

    def serve(of_host: list[LaunchRequest]) -> list[LaunchOutcome]:
        outcomes = []
        silent = ""
        for request in of_host:
            if silent:  # the host's next calls would hang as long as that one
                outcome = _not_launched(request, f"not sent: {silent}")
            elif clock() >= not_after:
                outcome = _not_launched(request, "not sent: its turn did not come in time")
            else:
                outcome = _launch(channels, request)
                silent = "" if outcome.answered else f"{request.host_name} did not answer the launch before it"
            outcomes.append(outcome)
        return outcomes

    return [outcome for outcomes in channels.each(serve, by_host.values()) for outcome in outcomes]


def _launch(channels: RqdChannels, request: LaunchRequest) -> LaunchOutcome:
    """Launch one frame, with at most two LaunchFrame calls and two questions what RQD runs."""
    ref, sends = request.ref, 1
    answer, words = _send(channels, request)
    if answer in (Answer.NOT_SENT, Answer.REFUSED) or (
        answer is Answer.UNCLEAR and look(channels, ref).place is Whereabouts.ABSENT
    ):
        # Certainly nothing started, so it is sent once more. After a pause: an RQD that is starting is there then.
        time.sleep(_RESEND_PAUSE_SECONDS)
        sends = 2
        answer, words = _send(channels, request)
    answered, unknown = answer not in (Answer.NOT_SENT, Answer.LOST), answer is Answer.LOST
    if answer in (Answer.DUPLICATE, Answer.UNCLEAR):
        # RQD answered, but in a way that leaves open whether the frame runs.
        seen = look(channels, ref)
        if seen.place is Whereabouts.OURS:
            log.info("launch_found_running", host=ref.host_name, proc_id=ref.proc_id, answer=words)
            answer = None
        elif answer is Answer.DUPLICATE or seen.place is not Whereabouts.ABSENT:
            words, unknown = f"{words}; then {seen.detail}", True
    if answer is None:
        return LaunchOutcome(request, sends, answered=True)
    return _not_launched(request, words, sends, answered=answered, unknown=unknown)


def _send(channels: RqdChannels, request: LaunchRequest) -> tuple[Answer | None, str]:
    """What RQD answered, in short (None: it accepted the frame) and in its words."""
    message = rqd_pb2.RqdStaticLaunchFrameRequest(run_frame=request.run_frame)
    try:
        channels.stub(request.host_name).LaunchFrame(message, timeout=channels.settings.timeout)
    except grpc.RpcError as error:
        return classify(error.code(), error.details() or ""), describe(error)
    return None, ""


def _not_launched(
    request: LaunchRequest, words: str, sends: int = 0, *, answered: bool = False, unknown: bool = False
) -> LaunchOutcome:
    ref = request.ref
    error = RqdFailure(f"{ref.host_name}: {words}", outcome_unknown=unknown)
    return LaunchOutcome(request, sends, error, answered)


# The RunFrame message RQD gets for a booked proc (as Cuebot's dispatch support and the Rust dispatcher make it).


def build_run_frame(
    planned: PlannedProc,
    environments: Environments,
    settings: Settings,
    now: Callable[[], float] = time.time,
) -> rqd_pb2.RunFrame:
    """Every field RQD reads. ``num_cores`` is centicores, memory limits are KB, ``start_time`` epoch milliseconds.

    ``uid`` is set only when the job has one: RQD refuses 0. ``os`` is the job's, which is the image a containerised RQD
    runs the frame in, or else the host's first. gid, attributes, temp dir and pid are RQD's to fill in.
    Raises InvalidInput when the layer's range or command makes no sense, ValueError or TypeError when a value does not
    fit its field.
    """
    job, layer, frame, host, reservation = planned.job, planned.layer, planned.frame, planned.host, planned.reservation
    message = rqd_pb2.RunFrame(
        resource_id=planned.proc_id,
        job_id=job.id,
        job_name=job.name,
        frame_id=frame.id,
        frame_name=frame.name,
        layer_id=layer.id,
        command=command_line(planned),
        user_name=job.user,
        log_dir=job.log_dir,
        show=job.show_name,
        shot=job.shot,
        start_time=int(now() * 1000),
        num_cores=reservation.cores * CENTICORES_PER_CORE,
        num_gpus=reservation.gpus,
        ignore_nimby=False,
        environment=environment(planned, environments.get(job.id, {}), environments.get(layer.id, {})),
        os=job.os_name or next(iter(host.os_names), ""),
        soft_memory_limit=memory_limit(reservation.memory_kb, settings.queue.frame_memory_soft_limit),
        hard_memory_limit=memory_limit(reservation.memory_kb, settings.queue.frame_memory_hard_limit),
        loki_url=job.loki_url or "",
    )
    if job.uid is not None:
        message.uid = job.uid
    return message


def launch_requests(
    procs: Sequence[PlannedProc], environments: Environments, settings: Settings
) -> tuple[list[LaunchRequest], list[LaunchOutcome]]:
    """The launches of booked procs, and the outcome of each whose RunFrame cannot be built."""
    requests: list[LaunchRequest] = []
    failed: list[LaunchOutcome] = []
    for proc in procs:
        try:
            requests.append(LaunchRequest(proc.host.name, build_run_frame(proc, environments, settings)))
        except (InvalidInput, ValueError, TypeError) as error:
            ids = rqd_pb2.RunFrame(
                resource_id=proc.proc_id, frame_id=proc.frame.id, layer_id=proc.layer.id, job_id=proc.job.id
            )
            why = RqdFailure(f"frame {proc.frame.name} of job {proc.job.name} cannot be sent to RQD: {error}")
            failed.append(LaunchOutcome(LaunchRequest(proc.host.name, ids), error=why))
    return requests, failed


# What follows a launch.

NotLaunched = tuple[PlannedProc, RqdFailure]


@dataclass(frozen=True, slots=True)
class SettleReport:
    """``launched`` procs run. ``compensated``: given back, the frame waits again (or was taken over).

    ``left_unknown``: still booked, because RQD did not confirm that nothing runs, or PostgreSQL did not take the
    compensation; the reaper resolves them.
    """

    launched: tuple[PlannedProc, ...]
    compensated: tuple[NotLaunched, ...]
    left_unknown: tuple[NotLaunched, ...]


def settle(
    engine: Engine,
    ledger: Ledger,
    channels: RqdChannels,
    committed: Sequence[PlannedProc],
    outcomes: Sequence[LaunchOutcome],
) -> SettleReport:
    """Settle committed procs, given the outcome of each one's launch (one per proc, in any order). The caller publishes
    the hosts: what was undone is idle there again."""
    by_id = {proc.proc_id: proc for proc in committed}
    launched = [by_id[it.proc_id] for it in outcomes if it.error is None]
    to_undo = [(by_id[it.proc_id], it.error) for it in outcomes if it.error and not it.error.outcome_unknown]
    unsure = [(by_id[it.proc_id], it.error) for it in outcomes if it.error and it.error.outcome_unknown]
    ref_of = {it.proc_id: it.request.ref for it in outcomes}

    # 1. RQD.
    unsure, gone, left = _still_ours(engine, unsure)
    to_undo += gone
    confirmations = channels.each(
        lambda ref: kill_and_confirm(channels, ref, reason=_KILL_REASON, adopt=True),
        [ref_of[proc.proc_id] for proc, _ in unsure],
    )
    for (proc, error), (fate, detail) in zip(unsure, confirmations, strict=True):
        if fate is Fate.RUNNING:
            launched.append(proc)
        elif fate is Fate.NOT_RUNNING:
            to_undo.append((proc, error))
        else:
            left.append((proc, _because(error, f"not confirmed to be gone ({detail})")))

    # 2. PostgreSQL.
    problems = _undo_in_postgresql(engine, [proc for proc, _ in to_undo])
    left += [(proc, _because(why, problems[proc.proc_id])) for proc, why in to_undo if proc.proc_id in problems]
    compensated = [(proc, error) for proc, error in to_undo if proc.proc_id not in problems]

    # 3. Redis. A proc that PostgreSQL has is confirmed in the ledger even when it is not known to run.
    try:
        if launched or left:
            ledger.settle([booking_of(proc) for proc in (*launched, *(proc for proc, _ in left))])
        if compensated:
            ledger.release([proc.proc_id for proc, _ in compensated])
    except (RedisError, NotReady) as error:  # the next recompute repairs the ledger
        log.warning("settlement_not_told_to_redis", procs=len(committed), error=f"{type(error).__name__}: {error}")

    for proc, failure in compensated:
        log.warning("launch_compensated", proc_id=proc.proc_id, host=proc.host.name, error=str(failure))
    for proc, failure in left:
        log.error("launch_left_unknown", proc_id=proc.proc_id, host=proc.host.name, error=str(failure))
    return SettleReport(tuple(launched), tuple(compensated), tuple(left))


def _still_ours(
    engine: Engine, unsure: list[NotLaunched]
) -> tuple[list[NotLaunched], list[NotLaunched], list[NotLaunched]]:
    """Split launches of unknown outcome into those whose frames still belong to their procs, so that RQD may be
    asked to kill them; those whose procs are gone, which only the ledger still has; and those to be left.

    While this process was paused, the frame may have been given to another proc, even on the same host, and RQD
    knows frames by frame id only.
    """
    if not unsure:
        return [], [], []
    try:
        with engine.connect() as connection:
            runs = read_runs(connection, [(proc.proc_id, "") for proc, _ in unsure])
    except SQLAlchemyError as problem:
        reason = f"PostgreSQL did not say whose its frame is: {type(problem).__name__}"
        return [], [], [(proc, _because(error, reason)) for proc, error in unsure]
    ours, gone, left = [], [], []
    for (proc, error), run in zip(unsure, runs, strict=True):
        if not run.proc_id:
            gone.append((proc, error))
        elif run.proc_frame_id != proc.frame.id:
            left.append((proc, _because(error, "its frame was taken off its proc")))
        else:
            ours.append((proc, error))
    return ours, gone, left


def _undo_in_postgresql(engine: Engine, procs: Sequence[PlannedProc]) -> dict[str, str]:
    """One transaction, or one per proc when that fails, so that one bad row holds back nothing else.

    Returns the proc ids that could not be undone, or not surely, and why.
    """
    if not procs:
        return {}
    try:
        with engine.begin() as connection:
            undo_bookings(connection, procs)
    except SQLAlchemyError as error:
        if len(procs) == 1:
            return {procs[0].proc_id: f"PostgreSQL did not take the compensation: {failure_reason(error)}"}
        return {it: why for proc in procs for it, why in _undo_in_postgresql(engine, [proc]).items()}
    return {}


def booking_of(planned: PlannedProc) -> Booking:
    """What a planned proc takes from the counters."""
    return Booking(planned.proc_id, planned.vertices, planned.reservation.cores, planned.reservation.gpus)


def _because(error: RqdFailure, reason: str) -> RqdFailure:
    return RqdFailure(f"{error}; {reason}", outcome_unknown=True)


# Whose fault it is when RQD does not take a frame: the host's, the job's, or that of the two together.
#
# One refusal does not tell: a host without a disk refuses every job, and every host refuses a job of an unknown user.
# - A host that does not answer, or says that it takes nothing (_HOST_WORDS), is at fault and gets a cooldown.
# - After any other refusal the layer and the host get a cooldown as a pair, longer each time; both go on with others.
# - That refusal also counts against the job and against the host, for REMEMBERED_SECONDS or until a frame of the job,
#   or on the host, is launched. A job that HOSTS_TO_BLAME hosts refused is at fault; so is a host that refused
#   JOBS_TO_BLAME jobs.

HOSTS_TO_BLAME = 3
JOBS_TO_BLAME = 3
APART_SECONDS = 5.0
LONGEST_APART_SECONDS = 60.0
"""The cooldown of a layer on a host, at first and at most: what the host lacked may be free again."""
REMEMBERED_SECONDS = 60.0
# Words of either RQD that is down, about to stop, taken back by its user, or has less free than PostgreSQL says.
_HOST_WORDS = ("HardwareState", "shutdown", "imby", "insufficient idle")


class Blame(NamedTuple):
    """Who is at fault. ``jobs``: what RQD said, by job id. ``hosts``: names of the hosts that take nothing now."""

    jobs: Mapping[str, str]
    hosts: frozenset[str]


class Refusals:
    """The refusals of the last minute, of one process. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # When each came that counts against a job (job, host), and against a host (host, job).
        self._against: dict[tuple[str, str], float] = {}
        self.apart = Cooldowns[tuple[str, str]](APART_SECONDS, LONGEST_APART_SECONDS, clock)
        """The layers on hosts (layer id, host name) that are kept apart, and what RQD said."""

    def blame(self, outcomes: Iterable[LaunchOutcome]) -> Blame:
        """Note how launches ended, and return who is at fault by now. Counting starts anew for those."""
        refused: dict[tuple[str, str], str] = {}
        hosts, launched = set[str](), set[str]()
        with self._lock:
            now = self._clock()
            kept_apart = self.apart.active()
            for it in (it for it in outcomes if it.sends):
                host, frame, words = it.request.host_name, it.request.run_frame, str(it.error)
                if it.error is None:
                    launched |= {frame.job_id, host}
                    self.apart.worked((frame.layer_id, host))
                elif it.error.outcome_unknown or not it.answered or any(said in words for said in _HOST_WORDS):
                    hosts.add(host)
                else:
                    refused[frame.job_id, host] = words
                    self._against[frame.job_id, host] = self._against[host, frame.job_id] = now
                    # A frame that was sent before the two were kept apart says nothing new.
                    if (frame.layer_id, host) not in kept_apart:
                        kept_apart[frame.layer_id, host] = words
                        self.apart.failed((frame.layer_id, host), words)
            self._forget(now, launched)
            times = Counter(name for name, _ in self._against)
            jobs = {job: words for (job, _), words in refused.items() if times[job] >= HOSTS_TO_BLAME}
            hosts |= {host for job, host in refused if job not in jobs and times[host] >= JOBS_TO_BLAME}
            self._forget(now, jobs.keys() | hosts)
            return Blame(jobs, frozenset(hosts))

    def _forget(self, now: float, names: Collection[str]) -> None:
        """What counts against these, and what came long ago."""
        self._against = {
            pair: at for pair, at in self._against.items() if now - at < REMEMBERED_SECONDS and pair[0] not in names
        }
