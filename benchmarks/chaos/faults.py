"""What goes wrong: each kind of fault, its share, and how it ends by itself.

A fault that lasts (a freeze, a lowered cap) puts its end on the agenda, so faults overlap. Everything is drawn from one
seed; what it meets depends on the moment. Every kind is drawn once before any kind is drawn again.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog
from redis.exceptions import RedisError
from sqlalchemy import Connection, TextClause, text
from sqlalchemy.exc import SQLAlchemyError

from benchmarks.chaos.holds import hold_hosts
from benchmarks.chaos.licences import TIME_TO_LIVE_SECONDS, LicenceServers
from benchmarks.chaos.load import Cap, Load
from benchmarks.chaos.lost_notices import drop_notices, tell_again
from benchmarks.chaos.silent_changes import change_silently
from benchmarks.chaos.silent_release import release_silently
from benchmarks.chaos.site import Site
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.epoch import guarded_redis
from opencue_sched.accounting.show_handover import hand_back, hand_over
from opencue_sched.embedded.rqds.simulated_host import Answer
from opencue_sched.errors import SchedulerError

log = structlog.get_logger(__name__)

_LISTENERS = text(
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'opencue-sched-listener'"
)
_SESSIONS = text(
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
    "WHERE application_name LIKE 'opencue-sched worker%' OR application_name = 'opencue-sched-report'"
)
# The waiting frames of the layer that comes first, but for those that are being booked.
_LOCK_FIRST_LAYER = text(
    """
    SELECT f.pk_frame FROM frame f
    WHERE f.str_state = 'WAITING' AND f.pk_layer = (
        SELECT s.pk_layer FROM layer_stat s JOIN job j USING (pk_job) JOIN job_resource r USING (pk_job)
        WHERE s.int_waiting_count > 0 AND j.str_state = 'PENDING'
        ORDER BY r.int_priority DESC, j.ts_started, s.pk_layer LIMIT 1)
    FOR UPDATE SKIP LOCKED
    """
)
_FLIP_SETTLE_SECONDS = 2.5
_FLIP_QUARANTINE_SECONDS = 1.0
_FLIP_ATTEMPT_SECONDS = 1.0
_PROCS_RELEASED_SILENTLY = 4
_LOWER, _HIGHER = (0.0, 0.3, 0.5, 0.75), (1.5, 2.0, 3.0)


@dataclass(frozen=True, slots=True)
class Fault:
    """``began`` and ``over`` by time.time(): a booking committed after ``over`` shows that work goes on."""

    kind: str
    target: str
    began: float
    over: float


class Faults:
    """Injects one fault at a time into ``site``. ``injected`` lists them."""

    def __init__(self, site: Site, load: Load, servers: LicenceServers, chance: random.Random) -> None:
        self.injected: list[Fault] = []
        self.flips = self.flips_interrupted = 0
        self._site = site
        self._load = load
        self._servers = servers
        self._chance = chance
        self._flipper: threading.Thread | None = None
        self._changed_caps: set[tuple[str, ...]] = set()
        self._down: set[str] = set()
        self.given_away: set[str] = set()
        """The ids of frames that were released silently: they may be started elsewhere while they run."""
        self._slow_until = 0.0
        self._in_vain = False
        self._closing = threading.Event()
        self._client = guarded_redis(site.settings.redis_dsn, site.settings)
        self._ledger = make_ledger(site.engine, self._client, owner="chaos-flips", accounting=site.settings.accounting)
        # kind -> (share, how). Losing a store takes the fleet several seconds each time, so it is rarer.
        self._kinds: dict[str, tuple[float, Callable[[], str | None]]] = {
            "worker killed": (4, self._kill("worker")),
            "worker frozen": (5, self._freeze("worker", 0.5, 9.0)),
            "worker stopped for long": (1, self._stop_for_long),
            "beat killed": (2, self._kill("beat")),
            "beat frozen": (2, self._freeze("beat", 1.0, 7.0)),
            "report service killed": (2, self._kill("report")),
            "report service frozen": (2, self._freeze("report", 0.5, 4.0)),
            "redis restarted empty": (1.5, self._restart_redis),
            "redis frozen": (2, self._freeze_redis),
            "redis connections cut": (1, self._cut_redis),
            "postgresql restarted fast": (1, lambda: self._restart_postgres("fast")),
            "postgresql restarted immediate": (1.5, lambda: self._restart_postgres("immediate")),
            "postgresql frozen": (2, self._freeze_postgres),
            "postgresql sessions cut": (2, self._cut_sessions),
            "notifications lost": (2, self._cut_listeners),
            "notices dropped": (2, self._drop_notices),
            "frames locked": (2, self._lock_frames),
            "work changed silently": (4, self._change_silently),
            "releases dropped": (4, self._release_silently),
            "completions lost": (3, self._lose_completions),
            "launch answers lost": (3, self._lose_answers),
            "launches refused": (1.5, self._refuse_launches),
            "frames slow to set up": (1, self._slow_setup),
            "host frozen": (2, self._freeze_host),
            "host crashed": (1.5, self._crash_host),
            "cap lowered": (10, lambda: self._change_cap(_LOWER)),
            "cap raised": (4, lambda: self._change_cap(_HIGHER)),
            "show flipped": (2, self._flip_show),
            "hosts held": (4, self._hold_hosts),
            "licence servers silent": (1.5, self._silence_servers),
        }

    @property
    def kinds(self) -> frozenset[str]:
        """Every kind there is."""
        return frozenset(self._kinds)

    def inject(self) -> Fault | None:
        """One fault; None when the kind drawn finds no victim at the moment."""
        kinds = list(self._kinds)
        if not self._in_vain:
            had = {fault.kind for fault in self.injected}
            kinds = [kind for kind in kinds if kind not in had] or kinds
        self._in_vain = True
        (kind,) = self._chance.choices(kinds, weights=[self._kinds[it][0] for it in kinds])
        began = time.time()
        try:
            target = self._kinds[kind][1]()
        except (SQLAlchemyError, RedisError) as error:
            log.info("fault_not_injected", kind=kind, reason=str(error).partition("\n")[0])
            return None
        if target is None:
            return None
        self._in_vain = False
        fault = Fault(kind, target, began, time.time())
        self.injected.append(fault)
        return fault

    def wait_for_flips(self, seconds: float = 90.0) -> bool:
        """Whether, at last, no show is under way any more."""
        if self._flipper is not None:
            self._flipper.join(seconds)
        return self._flipper is None or not self._flipper.is_alive()

    def close(self) -> None:
        self._closing.set()
        self._client.close()

    def _hold_hosts(self) -> str | None:
        """No fault of anybody's: hosts are promised to some layers, until the duty finds nothing in it."""
        with self._site.engine.begin() as connection:
            return ", ".join(hold_hosts(connection, self._chance)) or None

    # Processes

    def _kill(self, kind: str) -> Callable[[], str | None]:
        def kill() -> str | None:
            names = self._site.crew.names(kind)
            if not names:
                return None
            name = self._chance.choice(names)
            self._site.crew.kill(name, down_seconds=self._chance.uniform(0.2, 2.0))
            return name

        return kill

    def _freeze(self, kind: str, shortest: float, longest: float) -> Callable[[], str | None]:
        def freeze() -> str | None:
            names = self._site.crew.at_work(kind)
            if not names:
                return None
            name, seconds = self._chance.choice(names), self._chance.uniform(shortest, longest)
            self._site.crew.freeze(name)
            self._site.agenda.later(seconds, lambda: self._site.crew.thaw(name))
            return f"{name} for {seconds:.1f} s"

        return freeze

    def _stop_for_long(self) -> str | None:
        """Longer than any claim, permit or commit lives, while another worker goes on."""
        if len(self._site.crew.at_work("worker")) < 2:
            return None
        return self._freeze("worker", 20.0, 60.0)()

    # Stores. Each is over when it answers again, so that only bookings from then on count as recovery.

    def _restart_redis(self) -> str:
        self._site.cache.restart()
        return "redis"

    def _freeze_redis(self) -> str:
        seconds = self._chance.uniform(0.2, 7.0)
        self._site.cache.pause()
        time.sleep(seconds)
        self._site.cache.resume()
        return f"redis for {seconds:.1f} s"

    def _cut_redis(self) -> str:
        self._site.client.client_kill_filter(_type="normal", skipme=True)
        return "redis"

    def _restart_postgres(self, mode: str) -> str:
        self._site.postgres.restart("immediate" if mode == "immediate" else "fast")
        return "postgresql"

    def _freeze_postgres(self) -> str:
        """The server with all its sessions, as on a host that swaps or whose disk hangs."""
        seconds = self._chance.uniform(0.2, 4.0)
        pids = _freeze_tree(self._site.postgres.pid)
        time.sleep(seconds)
        for pid in reversed(pids):
            _send(pid, signal.SIGCONT)
        return f"postgresql for {seconds:.1f} s"

    def _cut_sessions(self) -> str | None:
        return self._cut(_SESSIONS, "sessions")

    def _cut_listeners(self) -> str | None:
        return self._cut(_LISTENERS, "listeners")

    def _cut(self, ending: TextClause, what: str) -> str | None:
        """Where a store was just lost there may be none: then nothing was injected."""
        with self._site.engine.begin() as connection:
            count = connection.execute(ending).scalar()
        return f"{count} {what}" if count else None

    # Work

    def _lock_frames(self) -> str | None:
        """Somebody's session that was left open, with the frames that come first."""
        connection = self._site.engine.connect()
        frames = connection.execute(_LOCK_FIRST_LAYER).all()
        seconds = self._chance.uniform(2.0, 20.0) if frames else 0.0
        self._site.agenda.later(seconds, lambda: _close(connection))
        return f"{len(frames)} frames for {seconds:.1f} s" if frames else None

    def _drop_notices(self) -> str | None:
        """New work arrives meanwhile of which nobody hears."""
        with self._site.engine.begin() as connection:
            definitions = drop_notices(connection)
        if not definitions:
            return None
        seconds = self._chance.uniform(1.0, 6.0)
        self._site.agenda.later(seconds, lambda: self._tell_again(definitions))
        return f"for {seconds:.1f} s"

    def _tell_again(self, definitions: list[str]) -> None:
        try:
            with self._site.engine.begin() as connection:
                tell_again(connection, definitions)
        except SQLAlchemyError:
            self._site.agenda.later(0.5, lambda: self._tell_again(definitions))

    def _change_silently(self) -> str | None:
        return change_silently(self._site.engine, self._chance) or None

    # Releases and hosts

    def _release_silently(self) -> str | None:
        """Not while frames are slow to set up: somebody who looks at a process before killing it would not find it."""
        if time.monotonic() < self._slow_until:
            return None
        with self._site.engine.begin() as connection:
            frames = release_silently(connection, most=_PROCS_RELEASED_SILENTLY)
        self.given_away.update(frames)
        return f"{len(frames)} procs" if frames else None

    def _lose_completions(self) -> str:
        farm = self._chance.choice(self._site.farms)
        farm.behave(completions_lost=True)
        self._site.agenda.later(self._chance.uniform(0.3, 1.5), lambda: farm.behave(completions_lost=False))
        return farm.specs[0].name[:-4]

    def _lose_answers(self) -> str:
        """The frame starts, but nobody hears it: the connection is cut, or the answer never comes."""
        farm, answer = self._chance.choice(self._site.farms), self._chance.choice((Answer.CUT_OFF, Answer.NEVER))
        farm.behave(launch_answer=answer)
        self._site.agenda.later(self._chance.uniform(0.3, 2.0), lambda: farm.behave(launch_answer=Answer.GIVEN))
        return answer.value

    def _refuse_launches(self) -> str:
        farm = self._chance.choice(self._site.farms)
        farm.behave(refusal="Not launching, rqd is lockNimby and not Ignore Nimby")
        self._site.agenda.later(self._chance.uniform(0.3, 2.0), lambda: farm.behave(refusal=""))
        return farm.specs[0].name[:-4]

    def _slow_setup(self) -> str:
        farm, seconds = self._chance.choice(self._site.farms), self._chance.uniform(0.5, 3.0)
        lasts = self._chance.uniform(1.0, 3.0)
        farm.behave(setup_seconds=seconds)
        self._slow_until = max(self._slow_until, time.monotonic() + lasts + seconds)
        self._site.agenda.later(lasts, lambda: farm.behave(setup_seconds=0.0))
        return f"{farm.specs[0].name[:-4]} by {seconds:.1f} s"

    def _freeze_host(self) -> str:
        farm = self._chance.choice(self._site.farms)
        host = self._chance.choice(farm.specs).name
        farm.freeze(host)
        self._site.agenda.later(self._chance.uniform(0.5, 5.0), lambda: farm.thaw(host))
        return host

    def _crash_host(self) -> str | None:
        """Power lost, and back after a moment: what ran there is gone and reports nothing."""
        farm = self._chance.choice(self._site.farms)
        host = self._chance.choice(farm.specs).name
        if host in self._down:
            return None
        farm.crash(host)
        self._down.add(host)

        def boot() -> None:
            farm.restart(host)
            self._down.discard(host)

        self._site.agenda.later(self._chance.uniform(0.5, 2.0), boot)
        return host

    # Caps and flags

    def _change_cap(self, factors: tuple[float, ...]) -> str | None:
        """Change a cap, sometimes to less than is in use or to next to nothing, sometimes without a word; and back."""
        caps = [*self._load.caps, *self._load.job_caps()]
        cap = self._chance.choice(caps)
        identity = (cap.kind, *cap.where.values())
        if identity in self._changed_caps:
            return None
        least = 0 if cap.kind in ("subscription", "limit") else 1
        value = max(least, int(cap.value * self._chance.choice(factors)))
        silent = self._chance.random() < 0.3
        with self._site.engine.begin() as connection:
            cap.write(connection, value, silent=silent)
        self._changed_caps.add(identity)
        self._site.agenda.later(self._chance.uniform(1.0, 5.0), lambda: self._restore_cap(cap, identity))
        return f"{cap.kind} {cap.value} to {value}{' silently' if silent else ''}"

    def _restore_cap(self, cap: Cap, identity: tuple[str, ...]) -> None:
        try:
            with self._site.engine.begin() as connection:
                cap.write(connection, cap.value)
        except SQLAlchemyError:
            self._site.agenda.later(0.5, lambda: self._restore_cap(cap, identity))
        else:
            self._changed_caps.discard(identity)

    def _silence_servers(self) -> str:
        """Sometimes until their reports are too old, and the limits open."""
        seconds = self._chance.uniform(2.0, 1.5 * TIME_TO_LIVE_SECONDS)
        self._servers.fall_silent(seconds)
        return f"for {seconds:.1f} s"

    def _flip_show(self) -> str | None:
        if self._flipper is not None and self._flipper.is_alive():
            return None
        name, show = self._chance.choice(sorted(self._load.shows.items(), key=lambda item: item[0]))
        seconds = self._chance.uniform(0.5, 3.0)
        self._flipper = threading.Thread(target=self._flip, args=(show.id, seconds), name="flipper", daemon=True)
        self._flipper.start()
        return name

    def _flip(self, show_id: str, seconds: float) -> None:
        """Off and on again by our own command; again, as an operator would, where a fault came between."""
        self._flip_until_done(show_id, managed=False, wait=_FLIP_SETTLE_SECONDS)
        time.sleep(seconds)
        self._flip_until_done(show_id, managed=True, wait=_FLIP_QUARANTINE_SECONDS)

    def _flip_until_done(self, show_id: str, *, managed: bool, wait: float) -> None:
        age = self._site.settings.accounting.in_flight_age
        while not self._closing.is_set():
            try:
                move = hand_over if managed else hand_back
                move(self._site.engine, self._ledger, show_id, wait_seconds=wait, age_seconds=age)
            except (SQLAlchemyError, SchedulerError, RedisError) as error:
                self.flips_interrupted += 1
                log.info("flip_interrupted", show=show_id, managed=managed, reason=str(error).partition("\n")[0])
                time.sleep(_FLIP_ATTEMPT_SECONDS)
            else:
                self.flips += 1
                return


def _close(connection: Connection) -> None:
    """Whatever became of the server meanwhile."""
    with suppress(SQLAlchemyError):
        connection.close()


def _freeze_tree(pid: int) -> list[int]:
    """Freeze a process, then its children, those it makes meanwhile included; the pids frozen, parent first."""
    _send(pid, signal.SIGSTOP)
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    for child in children:
        _send(child, signal.SIGSTOP)
    return [pid, *children]


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        log.debug("process_gone", pid=pid)
