"""Sending RunFrames to RQD, and saying exactly what is known afterwards.

RQD must not be sent a frame twice while its first copy is being set up: it would start a second thread for it, which
fails after ten seconds, reports exit 256 and forgets the copy that runs. So a call is repeated, once, only when it is
certain that nothing started:

- no connection, no such host: not sent, so it is sent once more.
- UNAUTHENTICATED, PERMISSION_DENIED, or a refusal in RQD's own words (UNKNOWN, ABORTED): nothing started; once more.
- "already running": RQD is asked for which proc. Ours: launched. Another's, or unclear: unknown.
- ABORTED, INTERNAL, UNKNOWN otherwise: the call ended, its effect is unclear. RQD is asked; when the frame is absent,
  it is sent once more.
- DEADLINE_EXCEEDED, connection lost, cancelled: it may start at any time, so it is unknown (dispatch.settle asks).
- any other code: refused for good.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import grpc
import structlog
from opencue_proto import rqd_pb2

from opencue_sched.dispatch.rqd import FrameSeen, RqdChannels, RunningFrameRef, Whereabouts, describe, look
from opencue_sched.domain.command import command_line, environment, memory_limits
from opencue_sched.domain.farm import PlannedProc
from opencue_sched.domain.units import centicores
from opencue_sched.errors import InvalidInput, RqdFailure
from opencue_sched.settings import Settings
from opencue_sched.store.jobs import Environments

log = structlog.get_logger(__name__)

_RESEND_PAUSE_SECONDS = 0.05
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


class LaunchState(StrEnum):
    LAUNCHED = "launched"
    FAILED = "failed"
    UNKNOWN = "unknown"


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
    """LAUNCHED: RQD has it. FAILED: nothing runs and nothing will. UNKNOWN: it may run now or later.

    ``sends`` counts LaunchFrame calls; 0 means that it was not sent at all. ``answered``: RQD itself said no.
    """

    proc_id: str
    host_name: str
    frame_id: str
    state: LaunchState
    sends: int
    error: RqdFailure | None = None
    answered: bool = False


class Answer(StrEnum):
    """What the status of a LaunchFrame call tells (the table above)."""

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
    progress: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[LaunchOutcome]:
    """Launch frames on many hosts at once; one outcome per request, in their order. Never raises for an RQD.

    Hosts are served side by side (``RqdChannels.each``), the frames of one host one after the other, so a host
    that hangs delays no other. A frame whose turn has not come ``send_within`` seconds after the call (default
    ``rqd.launch_timeout``) is not sent; nor are the remaining frames of a host that did not answer. Both are FAILED.
    With ``rqd.dry_run_mode`` nothing is sent and everything counts as launched. ``progress`` is called as hosts end.
    """
    if channels.settings.dry_run_mode:
        return [_outcome(request, LaunchState.LAUNCHED, 0) for request in requests]
    not_after = clock() + (channels.settings.launch_timeout if send_within is None else send_within)
    by_host: dict[str, list[int]] = {}
    for index, request in enumerate(requests):
        by_host.setdefault(request.host_name, []).append(index)

    def serve(indexes: list[int]) -> list[tuple[int, LaunchOutcome]]:
        return _launch_on_host(channels, [(index, requests[index]) for index in indexes], not_after, clock)

    outcomes = dict(pair for pairs in channels.each(serve, by_host.values(), progress=progress) for pair in pairs)
    return [outcomes[index] for index in range(len(requests))]


def _launch_on_host(
    channels: RqdChannels,
    requests: Sequence[tuple[int, LaunchRequest]],
    not_after: float,
    clock: Callable[[], float],
) -> list[tuple[int, LaunchOutcome]]:
    outcomes: list[tuple[int, LaunchOutcome]] = []
    silent = ""
    for index, request in requests:
        if silent:  # each further call would hang as long as the first
            outcome = _outcome(request, LaunchState.FAILED, 0, f"not sent: {silent}")
        elif clock() >= not_after:
            outcome = _outcome(request, LaunchState.FAILED, 0, "not sent: its turn did not come in time")
        else:
            outcome, answered = _Launch(channels, request).run()
            if not answered:
                silent = f"{request.host_name} did not answer the launch before it"
        outcomes.append((index, outcome))
    return outcomes


class _Launch:
    """One frame's launch: at most two LaunchFrame calls, and two questions what RQD runs."""

    def __init__(self, channels: RqdChannels, request: LaunchRequest) -> None:
        self._channels = channels
        self._request = request
        self._sends = 0

    def run(self) -> tuple[LaunchOutcome, bool]:
        """The outcome, and whether the host answered at all."""
        answer, text = self._send()
        if answer is None:
            return self._end(LaunchState.LAUNCHED), True
        if answer in (Answer.NOT_SENT, Answer.REFUSED) or (
            answer is Answer.UNCLEAR and self._look().place is Whereabouts.ABSENT
        ):
            # Certainly nothing started, so it is sent once more. After a pause: an RQD that is starting is there then.
            time.sleep(_RESEND_PAUSE_SECONDS)
            answer, text = self._send()
            if answer is None:
                return self._end(LaunchState.LAUNCHED), True
        if answer in (Answer.NOT_SENT, Answer.REFUSED, Answer.REFUSED_FOR_GOOD):
            answered = answer is not Answer.NOT_SENT
            return self._end(LaunchState.FAILED, text, answered=answered), answered
        if answer is Answer.LOST:
            return self._end(LaunchState.UNKNOWN, text), False
        return self._ask(answer, text), True

    def _send(self) -> tuple[Answer | None, str]:
        """None when RQD accepted the frame."""
        self._sends += 1
        request = rqd_pb2.RqdStaticLaunchFrameRequest(run_frame=self._request.run_frame)
        try:
            with self._channels.stub(self._request.host_name) as stub:
                stub.LaunchFrame(request, timeout=self._channels.settings.launch_timeout)
        except grpc.RpcError as error:
            return classify(error.code(), error.details() or ""), describe(error)
        return None, ""

    def _look(self) -> FrameSeen:
        return look(self._channels, self._request.ref)

    def _ask(self, answer: Answer, text: str) -> LaunchOutcome:
        """RQD answered, but in a way that leaves open whether the frame runs."""
        ref, seen = self._request.ref, self._look()
        if seen.place is Whereabouts.OURS:
            log.info("launch_found_running", host=ref.host_name, proc_id=ref.proc_id, answer=text)
            return self._end(LaunchState.LAUNCHED)
        if answer is Answer.UNCLEAR and seen.place is Whereabouts.ABSENT:
            return self._end(LaunchState.FAILED, text, answered=True)
        return self._end(LaunchState.UNKNOWN, f"{text}; then {seen.place.value}: {seen.detail}")

    def _end(self, state: LaunchState, text: str = "", *, answered: bool = False) -> LaunchOutcome:
        return _outcome(self._request, state, self._sends, text, answered=answered)


def _outcome(
    request: LaunchRequest, state: LaunchState, sends: int, text: str = "", *, answered: bool = False
) -> LaunchOutcome:
    ref = request.ref
    error = None
    if state is not LaunchState.LAUNCHED:
        error = RqdFailure(
            f"{ref.host_name}: {text}",
            outcome_unknown=state is LaunchState.UNKNOWN,
            proc_id=ref.proc_id,
            host=ref.host_name,
        )
    return LaunchOutcome(ref.proc_id, ref.host_name, ref.frame_id, state, sends, error, answered)


# The RunFrame message RQD gets for a booked proc (facts E; Cuebot's dispatch support and the Rust dispatcher).


def build_run_frame(
    planned: PlannedProc,
    *,
    job_env: Mapping[str, str],
    layer_env: Mapping[str, str],
    settings: Settings,
    now: Callable[[], float] = time.time,
) -> rqd_pb2.RunFrame:
    """Every field RQD reads. ``num_cores`` is centicores, memory limits are KB, ``start_time`` epoch milliseconds.

    ``uid`` is set only when the job has one: RQD refuses 0. ``os`` is the job's, which is the image a containerised RQD
    runs the frame in, or else the host's first. gid, attributes, temp dir and pid are RQD's to fill in.
    Raises InvalidInput when the layer's range or command, or a value that does not fit its field, makes no sense.
    """
    job, layer, frame, host, reservation = planned.job, planned.layer, planned.frame, planned.host, planned.reservation
    limits = memory_limits(
        reservation.memory_kb,
        soft_factor=settings.queue.frame_memory_soft_limit,
        hard_factor=settings.queue.frame_memory_hard_limit,
    )
    try:
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
            num_cores=centicores(reservation.cores),
            num_gpus=reservation.gpus,
            ignore_nimby=False,
            environment=environment(planned, job_env, layer_env),
            os=job.os_name or next(iter(host.os_names), ""),
            soft_memory_limit=limits.soft_kb,
            hard_memory_limit=limits.hard_kb,
            loki_url=job.loki_url or "",
        )
        if job.uid is not None:
            message.uid = job.uid
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"frame {frame.name} of job {job.name} cannot be sent to RQD: {error}") from error
    return message


def launch_requests(
    procs: Sequence[PlannedProc],
    environments: Environments,
    settings: Settings,
    *,
    now: Callable[[], float] = time.time,
) -> tuple[list[LaunchRequest], list[LaunchOutcome]]:
    """The launches of booked procs, and a FAILED outcome for each whose RunFrame cannot be built."""
    requests: list[LaunchRequest] = []
    failed: list[LaunchOutcome] = []
    for planned in procs:
        host = planned.host.name
        try:
            message = build_run_frame(
                planned,
                job_env=environments.jobs.get(planned.job.id, {}),
                layer_env=environments.layers.get(planned.layer.id, {}),
                settings=settings,
                now=now,
            )
        except InvalidInput as invalid:
            error = RqdFailure(str(invalid), outcome_unknown=False, proc_id=planned.proc_id, host=host)
            failed.append(LaunchOutcome(planned.proc_id, host, planned.frame.id, LaunchState.FAILED, 0, error))
        else:
            requests.append(LaunchRequest(host, message))
    return requests, failed
