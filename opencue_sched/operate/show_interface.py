"""OpenCue's ShowInterface, as far as shows are looked at and flipped: for `cueadmin -scheduler-managed` and pycue.

It is served beside the report interface where there is no Cuebot. A flip answers when the show has the new flag; its
quarantine goes on in the background. pycue asks a server for its statistics before it believes that there is one,
so that one call of CueInterface is answered too.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import structlog
from google.protobuf.descriptor import ServiceDescriptor
from opencue_proto import cue_pb2, cue_pb2_grpc, show_pb2, show_pb2_grpc
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.connection import make_redis
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.domain.errors import SchedulerError
from opencue_sched.domain.units import CENTICORES_PER_CORE
from opencue_sched.operate.flip import FlipUnderWay, flip_show, wait_of
from opencue_sched.settings import Settings
from opencue_sched.store import admin, naming
from opencue_sched.store.engine import make_engine
from opencue_sched.store.flips import ShowDetails, show_details
from opencue_sched.store.naming import Kind

log = structlog.get_logger(__name__)

MOST_FLIPS = 8
"""Shows flipped at once by one service; one more is told to come back."""

# A flip that ends holds two connections for a moment; calls that only look need one each.
_CONNECTIONS = 2 * MOST_FLIPS + 4
_ANSWER_SECONDS = 20.0
_ANSWER_MARGIN_SECONDS = 0.5
_STOP_SECONDS = 10.0


class FlipInterrupted(SchedulerError):
    """The service was stopped while a show was being flipped; flipping it again completes that."""


class TooManyFlips(SchedulerError):
    """As many shows are being flipped as may be at once."""


class ShowFlips:
    """Flips of shows in threads of their own, one per show. ``cuebots``: some may be there and remember for 30 s."""

    def __init__(self, engine: Engine, ledger: Ledger, settings: Settings, *, cuebots: bool) -> None:
        self._engine = engine
        self._ledger = ledger
        self._settings = settings
        self._cuebots = cuebots
        self._stopping = threading.Event()
        self._mutex = threading.Lock()
        self._running: dict[str, RunningFlip] = {}

    def begin(self, show_id: str, *, managed: bool) -> RunningFlip:
        """The flip of this show this way, started if it is not under way. Raises FlipUnderWay when the other way is."""
        with self._mutex:
            running = self._running.get(show_id)
            if running is not None:
                if running.managed == managed:
                    return running
                raise FlipUnderWay("the show is being flipped the other way; try again in half a minute")
            if len(self._running) >= MOST_FLIPS or self._stopping.is_set():
                raise TooManyFlips(f"{len(self._running)} shows are being flipped; try again in half a minute")
            flip = self._running[show_id] = RunningFlip(show_id, managed)
            threading.Thread(target=self._run, args=(flip,), name=f"flip-{show_id}", daemon=True).start()
            return flip

    def close(self) -> None:
        """Interrupt the flips that wait and let the others end. A show that was interrupted keeps its booking off."""
        self._stopping.set()
        deadline = time.monotonic() + _STOP_SECONDS
        with self._mutex:
            running = list(self._running.values())
        for flip in running:
            flip.ended.wait(max(0.0, deadline - time.monotonic()))

    def _run(self, flip: RunningFlip) -> None:
        def wait(seconds: float) -> None:
            if flip.managed:
                flip.shown.set()
            if self._stopping.wait(seconds):
                raise FlipInterrupted("the service was stopped; flip the show again to complete it")

        try:
            flip_show(
                self._engine,
                self._ledger,
                flip.show_id,
                managed=flip.managed,
                wait_seconds=wait_of(self._settings, managed=flip.managed, cuebots=self._cuebots),
                age_seconds=self._settings.accounting.in_flight_age,
                sleep=wait,
            )
        except FlipUnderWay as refusal:
            flip.error = refusal
        except Exception as error:
            flip.error = error
            log.exception("flip_not_completed", show=flip.show_id, managed=flip.managed, remedy="flip it again")
        finally:
            with self._mutex:
                del self._running[flip.show_id]
            flip.shown.set()
            flip.ended.set()


class RunningFlip:
    """``shown``: the flag is as wanted, or the flip failed; ``ended``: nothing is left to do; ``error``: why it did."""

    def __init__(self, show_id: str, managed: bool) -> None:
        self.show_id = show_id
        self.managed = managed
        self.shown = threading.Event()
        self.ended = threading.Event()
        self.error: Exception | None = None


class _ShowServicer(show_pb2_grpc.ShowInterfaceServicer):  # type: ignore[misc]
    """Shows as Cuebot's ShowInterface tells of them: names are exact, cores have fractions."""

    def __init__(self, engine: Engine, flips: ShowFlips) -> None:
        self._engine = engine
        self._flips = flips

    def FindShow(self, request: show_pb2.ShowFindShowRequest, context: Any) -> Any:  # noqa: N802
        with _answering(context):
            return show_pb2.ShowFindShowResponse(show=self._one(request.name, context))

    def GetShows(self, _request: show_pb2.ShowGetShowsRequest, context: Any) -> Any:  # noqa: N802
        with _answering(context):
            return show_pb2.ShowGetShowsResponse(shows=show_pb2.ShowSeq(shows=self._all()))

    def GetActiveShows(self, _request: show_pb2.ShowGetActiveShowsRequest, context: Any) -> Any:  # noqa: N802
        with _answering(context):
            active = [show for show in self._all() if show.active]
            return show_pb2.ShowGetActiveShowsResponse(shows=show_pb2.ShowSeq(shows=active))

    def SetSchedulerManaged(self, request: show_pb2.ShowSetSchedulerManagedRequest, context: Any) -> Any:  # noqa: N802
        """Answers when the flag is set; after 20 s, or shortly before the caller gives up, in any case."""
        with _answering(context):
            show = self._one(request.show.id or request.show.name, context)
            try:
                flip = self._flips.begin(show.id, managed=request.enabled)
                left = context.time_remaining()
                patience = _ANSWER_SECONDS if left is None else min(_ANSWER_SECONDS, left - _ANSWER_MARGIN_SECONDS)
                if flip.shown.wait(max(0.0, patience)) and flip.error is not None:
                    raise flip.error
            except FlipUnderWay as refusal:
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"show {show.name}: {refusal}")
            except TooManyFlips as refusal:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(refusal))
            return show_pb2.ShowSetSchedulerManagedResponse()

    def _one(self, name: str, context: Any) -> show_pb2.Show:
        if "\0" in name:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a show's name has no NUL in it")
        with self._engine.connect() as connection:
            row = naming.find_row(connection, Kind.SHOW, name)
            shows = admin.list_shows(connection, row.id) if row is not None else []
            details = show_details(connection, row.id) if row is not None else {}
        if not shows or shows[0].id not in details:
            context.abort(grpc.StatusCode.NOT_FOUND, f"there is no show {name!r}")
        return _message(shows[0], details[shows[0].id])

    def _all(self) -> list[show_pb2.Show]:
        with self._engine.connect() as connection:
            shows, details = admin.list_shows(connection), show_details(connection)
        return [_message(show, details[show.id]) for show in shows if show.id in details]


class _CueServicer(cue_pb2_grpc.CueInterfaceServicer):  # type: ignore[misc]
    """Enough of CueInterface for pycue to know that somebody is there."""

    def GetSystemStats(self, _request: cue_pb2.CueGetSystemStatsRequest, _context: Any) -> Any:  # noqa: N802
        """The lengths of Cuebot's queues, of which there are none here: our metrics tell of ours."""
        return cue_pb2.CueGetSystemStatsResponse(stats=cue_pb2.SystemStats())


@contextlib.contextmanager
def show_interface(settings: Settings, *, cuebots: bool) -> Iterator[Callable[[grpc.Server], None]]:
    """The interfaces, with connections of their own, to be added to a server before it starts.

    ``cuebots``: the database is a Cuebot's, so that some may be running. Use it in the process that serves.
    """
    engine = make_engine(settings, application_name="opencue-sched-shows", pool_size=_CONNECTIONS)
    client = make_redis(settings.redis_dsn, settings)
    flips = ShowFlips(
        engine, make_ledger(engine, client, owner=f"{settings.instance}-shows"), settings, cuebots=cuebots
    )

    def add(server: grpc.Server) -> None:
        show_pb2_grpc.add_ShowInterfaceServicer_to_server(_ShowServicer(engine, flips), server)
        cue_pb2_grpc.add_CueInterfaceServicer_to_server(_CueServicer(), server)

    try:
        yield add
    finally:
        flips.close()
        client.close()
        engine.dispose()


@contextlib.contextmanager
def _answering(context: Any) -> Iterator[None]:
    """Failures of ours as statuses that pycue has words for."""
    try:
        yield
    except SQLAlchemyError as error:
        reason = str(error).partition("\n")[0]
        log.warning("show_call_failed", error=reason)
        context.abort(grpc.StatusCode.UNAVAILABLE, f"PostgreSQL did not do it: {reason}")
    except SchedulerError as error:
        context.abort(grpc.StatusCode.INTERNAL, str(error))


def _message(show: admin.Show, details: ShowDetails) -> show_pb2.Show:
    return show_pb2.Show(
        id=show.id,
        name=show.name,
        default_min_cores=show.default_min_cores / CENTICORES_PER_CORE,
        default_max_cores=show.default_max_cores / CENTICORES_PER_CORE,
        default_min_gpus=details.default_min_gpus,
        default_max_gpus=details.default_max_gpus,
        comment_email=details.comment_email,
        booking_enabled=show.booking,
        dispatch_enabled=show.dispatch,
        active=show.active,
        scheduler_managed=show.managed,
        show_stats=show_pb2.ShowStats(
            running_frames=show.running_frames,
            pending_frames=show.waiting_frames,
            dead_frames=details.dead_frames,
            pending_jobs=show.pending_jobs,
            created_job_count=details.created_jobs,
            created_frame_count=details.created_frames,
            rendered_frame_count=details.succeeded_frames,
            failed_frame_count=details.failed_frames,
            reserved_cores=show.centicores / CENTICORES_PER_CORE,
            reserved_gpus=show.gpus,
        ),
    )


def _refuse_the_rest(servicer: type[Any], service: ServiceDescriptor) -> None:
    """Give every call that is not served an answer that says where to go (the generated one logs a stack trace)."""
    for method in service.methods:
        if method.name not in vars(servicer):
            setattr(servicer, method.name, _refusal(f"{service.name}.{method.name}"))


def _refusal(call: str) -> Callable[[Any, Any, Any], None]:
    text = f"{call} is not served without a Cuebot; `opencue-sched --help` lists what changes shows here"

    def refuse(_self: Any, _request: Any, context: Any) -> None:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, text)

    return refuse


_refuse_the_rest(_ShowServicer, show_pb2.DESCRIPTOR.services_by_name["ShowInterface"])
_refuse_the_rest(_CueServicer, cue_pb2.DESCRIPTOR.services_by_name["CueInterface"])
