"""Launches frames on their RQDs.

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

Nothing is sent where another host's RQD answers, or none that tells its name (`RqdChannels.check_name`): frames of
one host would take what is booked on another.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import grpc
import structlog
from opencue_proto import rqd_pb2

from opencue_sched.domain.frame_command import LaunchDetails
from opencue_sched.domain.plans import PlannedProc
from opencue_sched.errors import InvalidInput, RqdFailure
from opencue_sched.rqd.channels import RqdChannels, describe
from opencue_sched.rqd.kill import RunningFrameRef, Whereabouts, look
from opencue_sched.rqd.run_frame import build_run_frame
from opencue_sched.settings import Settings

log = structlog.get_logger(__name__)
_RESEND_PAUSE_SECONDS = 0.05
"""The pause before a frame that certainly did not start is sent once more: an RQD that is starting is there then."""
_NOT_CONNECTED = (
    "failed to connect to all addresses",
    "errors resolving",
    "DNS resolution failed",
    "empty address list",
)
"""How gRPC's words begin where there was no connection to send on."""
_DUPLICATE = "already running"
"""RQD's words where it has the frame."""
_REFUSALS = ("Exception calling application", "Not launching", "Not lauching", "Nimby Locked")
"""How RQD's words begin where it started nothing ("Not lauching" is what it sends)."""
_LOST = frozenset({grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
"""The codes of a call whose answer did not come."""
_UNCLEAR = frozenset(
    {grpc.StatusCode.UNKNOWN, grpc.StatusCode.ABORTED, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS}
)
"""The codes of a call that ended in an error after RQD may have begun."""
_NOT_LET_IN = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})
"""The codes of a call that something before RQD refused."""


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """A frame for one host. The proc is ``run_frame.resource_id``."""

    host_name: str
    run_frame: rqd_pb2.RunFrame

    @property
    def ref(self) -> RunningFrameRef:
        """The run, as RQD is asked about it."""
        frame = self.run_frame
        return RunningFrameRef(self.host_name, frame.frame_id, frame.resource_id, frame.num_cores)


@dataclass(frozen=True, slots=True)
class LaunchOutcome:
    """What became of one launch."""

    request: LaunchRequest
    sends: int = 0
    """LaunchFrame calls that were made; 0 means that the frame was not sent at all."""
    error: RqdFailure | None = None
    """Why the launch failed; None when RQD has the frame. After an error the frame does not run and will not, unless
    the error says that the outcome is unknown: then the frame may run now or later."""
    answered: bool = False
    """Whether RQD said something."""
    unfit_host: bool = False
    """Whether the frame was not sent because another host's RQD answers for this host, or an RQD that tells no name."""

    @property
    def proc_id(self) -> str:
        """The id of the proc that the frame was to run for."""
        return str(self.request.run_frame.resource_id)


class Answer(StrEnum):
    """What a failed LaunchFrame call says of the frame; the head of the module has what follows from each."""

    NOT_SENT = "not_sent"
    """RQD was not reached: nothing started."""
    REFUSED = "refused"
    """Nothing started; another try may succeed."""
    REFUSED_FOR_GOOD = "refused_for_good"
    """Nothing started, and another try would end alike."""
    DUPLICATE = "duplicate"
    """RQD has the frame already, for this proc or another."""
    UNCLEAR = "unclear"
    """The call ended in an error; the frame may have started."""
    LOST = "lost"
    """No answer came; the frame may start at any time."""


def classify(code: grpc.StatusCode, details: str) -> Answer:
    """What the code and the words of a failed LaunchFrame call say of the frame."""
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
                silent = "" if outcome.answered else f"{request.host_name} did not take the frame before it"
            outcomes.append(outcome)
        return outcomes

    return [outcome for outcomes in channels.each(serve, by_host.values()) for outcome in outcomes]


def _launch(channels: RqdChannels, request: LaunchRequest) -> LaunchOutcome:
    """Launch one frame, with at most two LaunchFrame calls and two questions what RQD runs."""
    ref, sends = request.ref, 1
    try:
        channels.check_name(ref.host_name)
    except RqdFailure as error:
        failure = RqdFailure(f"{ref.host_name}: not sent: {error}")
        return LaunchOutcome(request, error=failure, unfit_host=True)
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
    """The outcome of a launch that failed; ``unknown``: the frame may run all the same."""
    ref = request.ref
    error = RqdFailure(f"{ref.host_name}: {words}", outcome_unknown=unknown)
    return LaunchOutcome(request, sends, error, answered)


def launch_requests(
    procs: Sequence[PlannedProc], details: LaunchDetails | None, settings: Settings
) -> tuple[list[LaunchRequest], list[LaunchOutcome]]:
    """The launches of booked procs, and the outcome of each whose RunFrame cannot be built.

    Without ``details``, as in a dry run, whose launches are not sent, a request says which run it is and nothing else.
    """
    if details is None:
        return [LaunchRequest(proc.host.name, _ids(proc)) for proc in procs], []
    requests: list[LaunchRequest] = []
    failed: list[LaunchOutcome] = []
    for proc in procs:
        job, layer = details.jobs[proc.job.id], details.layers[proc.layer.id]
        try:
            requests.append(LaunchRequest(proc.host.name, build_run_frame(proc, job, layer, settings)))
        except (InvalidInput, ValueError, TypeError) as error:
            why = RqdFailure(f"frame {proc.frame.name} of job {proc.job.name} cannot be sent to RQD: {error}")
            failed.append(LaunchOutcome(LaunchRequest(proc.host.name, _ids(proc)), error=why))
    return requests, failed


def _ids(proc: PlannedProc) -> rqd_pb2.RunFrame:
    """A RunFrame with nothing but the ids of a run."""
    return rqd_pb2.RunFrame(
        resource_id=proc.proc_id, frame_id=proc.frame.id, layer_id=proc.layer.id, job_id=proc.job.id
    )
