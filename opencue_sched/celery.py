"""The Celery application that ``celery -A opencue_sched`` finds.

Only wiring lives here: configuration, logs, signals, the start and stop of a worker's process, and the heartbeat of its
presence. Celery swallows exceptions of signal handlers, so what must not fail silently (stores that do not answer, a
schema that is too old) ends the process at once, with a message and exit status 78 (configuration error: starting again
would not help), or 75 when a store does not answer and may yet.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NoReturn, cast

import click
import structlog
from celery import Celery, bootsteps
from celery.signals import beat_init, setup_logging, worker_shutting_down
from celery.utils.imports import load_extension_class_names, symbol_by_name
from celery.worker import state
from pydantic import ValidationError
from redis.exceptions import RedisError
from sqlalchemy.exc import ProgrammingError, SQLAlchemyError

from opencue_sched.accounting.epoch import guarded_redis
from opencue_sched.coordination.presence import REFRESH_SECONDS, InstanceTaken
from opencue_sched.coordination.transport import broker_settings
from opencue_sched.errors import InvalidInput, NotReady, SchedulerError, TakesNoWrites, WrongConfiguration
from opencue_sched.insight.health import check_for_beat, failure_lines, is_wrong_configuration
from opencue_sched.page.flower import guard_start
from opencue_sched.settings import get_settings
from opencue_sched.signals import StopOrder, end_by_sigterm_as_first_process
from opencue_sched.standard_streams import open_closed_streams
from opencue_sched.worker import control as _our_commands  # noqa: F401 - workers, and `celery control`, have them by this
from opencue_sched.worker.logs import configure_logging, install_level_signals
from opencue_sched.worker.probes import PULSE
from opencue_sched.worker.task import process_of

if TYPE_CHECKING:
    from celery.apps.beat import Beat as BeatProgram

    from opencue_sched.worker.process import Process

log = structlog.get_logger(__name__)

_LOOK_FOR_AN_ORDER_SECONDS = 0.2
"""The time between two looks for the order to stop, while a worker waits before its consumer runs."""
_BROKER_COMMANDS = frozenset({"amqp", "call", "control", "events", "graph", "inspect", "list", "purge", "status"})
"""Celery's commands that speak to the broker and end."""
_LEADER_SCHEDULER = "opencue_sched.beat:LeaderScheduler"
"""The scheduler behind the leader gate, as Celery's options name schedulers."""


def is_celery(argv: Sequence[str]) -> bool:
    """Whether this is a process of the command ``celery``, also as ``python -m celery``."""
    # The program is .../bin/celery, or .../celery/__main__.py.
    return bool(argv) and "celery" in PurePath(argv[0]).parts[-2:]


def _refuse(error: Exception) -> NoReturn:
    """End this process with the reasons of ``error``, whatever Celery would make of an exception.

    The exit status says whether starting again may help: EX_TEMPFAIL where a store is away, else EX_CONFIG.
    """
    of_store = isinstance(error, RedisError | SQLAlchemyError | NotReady | TakesNoWrites)
    # ProgrammingError: the store answers, and its schema lacks something or grants too little.
    store_is_away = of_store and not (isinstance(error, ProgrammingError) or is_wrong_configuration(error))
    with suppress(OSError):  # a full disk under standard error: the exit status tells a supervisor all the same
        for reason in failure_lines(error) or [str(error)]:
            print(f"opencue-sched cannot start: {reason}", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(os.EX_TEMPFAIL if store_is_away else os.EX_CONFIG)


class SchedulerApp(Celery):
    """Celery with the files of this distribution, and with no scheduler for its beats but the one behind the leader
    gate."""

    loader_cls = "opencue_sched.worker.loader:Loader"
    events_cls = "opencue_sched.worker.task_events:HeardEventsOnly"

    @cached_property
    def process(self) -> Process:
        """What this process has open. A worker makes it when it starts; beats and clients never ask for it, and do
        without the modules behind it."""
        from opencue_sched.worker.process import Process

        return Process(get_settings(), self)

    @property
    def Beat(self) -> type[BeatProgram]:  # noqa: N802 - celery's name
        """The class of which ``celery beat`` makes its program: ends the process if another scheduler is named."""
        from celery.apps.beat import Beat

        # The command asks for the class before it detaches. It makes the program afterwards, when nobody could read the
        # reason for which the process ends: so look here, and again below for a program that is made in another way.
        command = click.get_current_context(silent=True)
        _refuse_other_schedulers(command.params.get("scheduler") if command else None)

        class GatedBeat(Beat):
            def __init__(self, *, scheduler: str | None = None, **options: Any) -> None:
                _refuse_other_schedulers(scheduler)
                super().__init__(scheduler=scheduler, **options)

        return cast("type[BeatProgram]", self.subclass_with_self(GatedBeat))


def _refuse_other_schedulers(option: str | None) -> None:
    """End this process unless the schedulers that ``option`` (the value of ``--scheduler``, if any) and the
    configuration name are LeaderScheduler: two beats with another would send every message twice, without a fence.

    Both are looked at, though the option wins: what the configuration names would be passed over in silence.
    """
    for scheduler in (option or _LEADER_SCHEDULER, app.conf.beat_scheduler):
        _refuse_other_scheduler(scheduler)


def _refuse_other_scheduler(scheduler: str) -> None:
    """End this process unless ``scheduler``, as Celery's options name it, is LeaderScheduler."""
    cure = "leave --scheduler (-S) and beat_scheduler out"
    try:
        aliases = dict(cast(Iterable[tuple[str, str]], load_extension_class_names("celery.beat_schedulers")))
        named = symbol_by_name(scheduler, aliases=aliases)
    except (ImportError, AttributeError, ValueError) as error:
        _refuse(InvalidInput(f"the scheduler {scheduler} cannot be imported ({error}); {cure}"))
    if not (isinstance(named, type) and issubclass(named, symbol_by_name(_LEADER_SCHEDULER))):
        _refuse(InvalidInput(f"the scheduler {scheduler} fires without the leader gate, beside other beats; {cure}"))


def _guard_detaching_workers() -> None:
    """Check the scheduler of an embedded beat before ``celery worker --detach`` detaches.

    The command makes the worker after it has detached, when nobody would read why the worker ends. Before it detaches,
    it calls nothing of ours but its own ``detach``, which is replaced here. In a process in which Celery has not loaded
    the command this does nothing.
    """
    command: Any = sys.modules.get("celery.bin.worker")
    if command is None:
        return
    detach = command.detach

    def detach_with_our_scheduler(*given: Any, **options: Any) -> Any:
        params = click.get_current_context().params
        if params["beat"]:
            _refuse_other_schedulers(params["scheduler"])
        return detach(*given, **options)

    command.detach = detach_with_our_scheduler


app = SchedulerApp("opencue_sched", task_cls="opencue_sched.worker.task:SchedulerTask")
app.config_from_object("celeryconfig")


@app.on_configure.connect
def _prepare_celery_command(**_: Any) -> None:
    """Prepare a process of the command ``celery``: its signals, its standard streams and its settings.

    Wrong settings end it with a sentence, where Celery would show a traceback. So does a Redis that cannot be used, in
    commands that only speak to the broker: workers, beats and Flower check their stores themselves, as any program that
    is not ``celery`` does all of this itself.
    """
    if not is_celery(sys.argv):
        return
    end_by_sigterm_as_first_process()
    open_closed_streams()
    try:
        settings = get_settings()
        broker_settings(settings.redis_dsn)
        if _BROKER_COMMANDS & set(sys.argv) and "--help" not in sys.argv:
            with guarded_redis(settings.redis_dsn, settings) as client:
                client.ping()
    except (ValidationError, SchedulerError, RedisError) as error:
        _refuse(error)


@setup_logging.connect
def _logging(**_: Any) -> None:
    """Configure the logging of a Celery process in Celery's place; a wrong setting ends the process."""
    try:
        configure_logging(get_settings().logging)
    except WrongConfiguration as error:
        _refuse(error)


class ProcessStep(bootsteps.StartStopStep):
    """Starts what a worker has open (worker/process.py) before its pool and consumer, and gives it back at the end."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, *, beat: bool = False, **_: Any) -> None:
        if beat:  # refused here: the embedded beat is a process of its own, and its end would not end the worker
            _refuse_other_schedulers(parent.scheduler)
        if getattr(parent, "autoscale", None) and not hasattr(parent.pool_cls, "grow"):
            pool = parent.pool_cls.__module__.rpartition(".")[2]
            _refuse(InvalidInput(f"the {pool} pool has a fixed size; leave --autoscale out"))

    def start(self, parent: Any) -> None:
        """Check the stores, fill the counters and listen to the database; where that fails, end the process with the
        reason."""
        mine = process_of(parent.app)
        # At a signal to stop, take nothing new. This waits for no lock, which the interrupted code may hold.
        worker_shutting_down.connect(lambda **_: mine.membership.workload.stop(), weak=False)
        # Take what is loaded now, which stays, out of Python's searches for garbage, and search less often: a pass
        # makes tens of thousands of objects and hardly a cycle among them, and the default, a search for each 700 more,
        # was a fifth of a worker's processor time.
        gc.freeze()
        gc.set_threshold(10_000)
        try:
            mine.start(parent.hostname, parent.concurrency, sleep_unless_stopped)
        except (SchedulerError, RedisError, SQLAlchemyError) as error:
            _refuse(error)
        except SystemExit:
            # The order to stop came during the start. Celery ends no step of a worker that has not started all of them.
            mine.stop()
            raise
        install_level_signals()

    def stop(self, parent: Any) -> None:
        """Give everything back, or end the process where work does not end in time."""
        if not process_of(parent.app).stop():
            # Celery would wait for its threads without end. Claims and presence expire, PostgreSQL rolls back, and
            # Redis bookings without a proc are reconciled.
            logging.shutdown()
            os._exit(os.EX_OK)

    terminate = stop


class PresenceStep(bootsteps.StartStopStep):
    """Refreshes the presence every few seconds while the consumer runs, which is the pulse of the worker.

    By the consumer's timer: timers of the worker itself stop after a reconnect to the broker.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    _timer: Any = None

    def start(self, parent: Any) -> None:
        """Take work from now on, and refresh the presence by the consumer's timer."""
        membership = process_of(parent.app).membership
        # The messages that Celery has taken for this worker, whether their tasks run already or wait for a thread.
        membership.in_flight = lambda: len(state.reserved_requests)
        membership.workload.begin()

        def refresh() -> None:
            PULSE.beat()
            try:
                membership.heartbeat()
            except InstanceTaken as error:
                log.error("worker_stops", reason=str(error))
                state.should_stop = os.EX_CONFIG  # type: ignore[assignment]  # Celery ends with this exit status
            except RedisError as error:
                log.warning("beat_of_the_worker_failed", error=str(error))

        refresh()
        self._timer = parent.timer.call_repeatedly(REFRESH_SECONDS, refresh)

    def stop(self, parent: Any) -> None:  # noqa: ARG002 - celery's signature
        """Cease to refresh the presence: the connection to the broker was lost, or the worker ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        PULSE.rest()

    shutdown = stop


def sleep_unless_stopped(seconds: float) -> None:
    """Sleep in a worker whose consumer does not run yet. Raises WorkerShutdown or WorkerTerminate once the worker is
    ordered to stop, for which otherwise only the consumer looks."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, _LOOK_FOR_AN_ORDER_SECONDS))
        state.maybe_shutdown()


@beat_init.connect
def _beat_starts(sender: Any, **_: Any) -> None:
    """Check the stores when a beat starts, as a worker does; for a store that is lost later the beat waits.

    A signal to stop ends the beat between two ticks from now on. Celery's own handler, which serves until then, would
    hand over within a tick, and wait for ever for a lock that the tick holds.
    """
    try:
        check_for_beat(get_settings())
        sender.scheduler.serve()
    except (SchedulerError, RedisError, SQLAlchemyError) as error:
        _refuse(error)
    sender.scheduler.stop_order = StopOrder()


app.steps["worker"].add(ProcessStep)
app.steps["consumer"].add(PresenceStep)
guard_start(_refuse)
_guard_detaching_workers()
