"""What a worker does when PostgreSQL tells it something (design 4, "Release feeds").

Every worker listens: releasing twice, loading caps twice and waking twice are harmless, and no worker depends on
another. A notification that is lost is made up for by the recompute, the reseed and the sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import structlog
from redis.exceptions import RedisError
from sqlalchemy import Engine

from opencue_sched.accounting.caps import load_caps
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.accounting.recompute import recompute
from opencue_sched.dispatch.hosts import HostFeed
from opencue_sched.domain.errors import NotReady
from opencue_sched.operate.waker import Waker
from opencue_sched.release.listener import Handlers, NotificationListener
from opencue_sched.release.model import EventCounts
from opencue_sched.settings import Settings

log = structlog.get_logger(__name__)

Wake = Callable[[Collection[str], Collection[str]], object]


class Events:
    """Listener and waker of one process. ``wake(show ids, host ids)`` sweeps."""

    def __init__(
        self, settings: Settings, engine: Engine, ledger: Ledger, hosts: HostFeed, wake: Wake, counts: EventCounts
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._ledger = ledger
        self._hosts = hosts
        self._waker = Waker(wake)
        self.listener = NotificationListener(settings, self._handlers(), counts=counts)

    def _handlers(self) -> Handlers:
        feed = self._settings.accounting.release_feed
        by_notify = feed == "cuebot-notify"
        return Handlers(
            on_release=self._released if feed == "proc-trigger" else None,
            on_caps=self._caps_changed if feed == "proc-trigger" else None,
            on_work=self._waker.shows,
            on_cuebot_release=self._cuebot_released if by_notify else None,
            on_cuebot_caps=self._cuebot_caps if by_notify else None,
            on_reconnect=self._reconnected,
        )

    def start(self) -> None:
        self._waker.start()
        self.listener.start()

    def stop(self) -> None:
        self.listener.stop()
        self._waker.stop()

    def _released(self, procs: Sequence[str], hosts: Sequence[str]) -> None:
        self._hosts.note(hosts)
        self._waker.hosts(hosts)
        try:
            self._ledger.release(procs)
        except (NotReady, RedisError) as error:
            log.warning("release_left_to_recompute", procs=len(procs), error=str(error))

    def _caps_changed(self, vertices: Sequence[str]) -> None:
        """Vertices as our triggers name them: ``sub:{show}:{alloc}``, ``folder:{id}``, ``job:{id}``, ``limit:{id}``."""
        try:
            load_caps(self._engine, self._ledger, [f"acct:{vertex}" for vertex in vertices])
        except (NotReady, RedisError) as error:
            log.warning("caps_left_to_reseed", vertices=len(vertices), error=str(error))
        self._waker.shows({vertex.split(":")[1] for vertex in vertices if vertex.startswith("sub:")})

    def _cuebot_released(self, payload: Mapping[str, Any]) -> None:
        """Cuebot names no proc: reconcile that show now."""
        show = str(payload.get("show", ""))
        if not show:
            log.warning("cuebot_release_without_show", payload=dict(payload))
            return
        recompute(
            self._engine,
            self._ledger,
            [show],
            age_seconds=self._settings.accounting.in_flight_age,
            write_tables=False,
        )
        self._waker.shows([show])

    def _cuebot_caps(self, payload: Mapping[str, Any]) -> None:
        vertex = str(payload.get("vertex", ""))
        if vertex == "sub":
            key = f"sub:{payload.get('show', '')}:{payload.get('alloc', '')}"
        elif vertex in ("folder", "job"):
            key = f"{vertex}:{payload.get('id', '')}"
        else:
            log.warning("cuebot_cap_change_not_understood", payload=dict(payload))
            return
        self._caps_changed([key])

    def _reconnected(self) -> None:
        """Notifications may have been missed: look at everything, as a sweep and a recompute would."""
        try:
            recompute(self._engine, self._ledger, age_seconds=self._settings.accounting.in_flight_age)
        except (NotReady, RedisError) as error:
            log.warning("reconcile_after_reconnect_failed", error=str(error))
