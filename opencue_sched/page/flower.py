"""What Flower is guarded against, before it starts.

Flower listens on every address by default, and whoever reaches it can stop workers; here it is on loopback unless
told otherwise, and elsewhere has a password. It has options from the command line, from ``FLOWER_*`` variables and
from a file of its own, so what it has made of them all is judged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

from celery.signals import import_modules
from pydantic import ValidationError
from redis.exceptions import RedisError

from opencue_sched.accounting.epoch import guarded_redis
from opencue_sched.domain.redis_url import read_redis_url
from opencue_sched.errors import InvalidInput, SchedulerError
from opencue_sched.insight.health import check_service_redis
from opencue_sched.settings import Settings, get_settings


def guard_start(refuse: Callable[[Exception], NoReturn]) -> None:
    """Have the stores looked at, the farm page added and the options judged when Flower starts in this process, which
    ends by ``refuse`` where it may not. Nothing where Celery has not loaded Flower's command."""
    if "flower.command" not in sys.modules:
        return
    from tornado.options import options

    @cache  # Flower reads its options twice where it has a file of them
    def starts() -> None:
        # Options are read, the application is not made yet: it takes its list of pages when it is.
        options.address = options.address or "127.0.0.1"
        try:
            settings = get_settings()
            with guarded_redis(settings.redis_dsn, settings) as client:
                check_service_redis(client, settings)
            from opencue_sched.page.handlers import add_to_flower

            add_to_flower(settings)
            show_queues_of_sockets(settings)
        except (ValidationError, SchedulerError, RedisError) as error:
            refuse(error)
        import_modules.connect(judged, weak=False)

    def judged(**_: Any) -> None:
        # Flower imports our tasks when it has read its file, too, and before it listens.
        try:
            guard_flower(options)
        except (InvalidInput, AttributeError) as error:
            refuse(error)

    options.add_parse_callback(starts)


def show_queues_of_sockets(settings: Settings) -> None:
    """Have Flower's page of queues log in to a unix socket, and use the database, as the Redis URL says: Flower itself
    knows a socket's path and password alone."""
    named = read_redis_url(settings.redis_dsn)
    if named.scheme != "unix":
        return
    from flower.utils import broker
    from redis.asyncio import Redis

    class Socket(broker.RedisSocket):  # type: ignore[misc]
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            self.redis = Redis(unix_socket_path=named.path, socket_timeout=self.socket_timeout, **named.options)

    broker.RedisSocket = Socket


def guard_flower(options: Any) -> None:
    """Judge the options that Flower has read. Raises InvalidInput for an address off loopback without a password.

    No address means every address. An ``auth_provider`` alone asks nobody: Flower looks at ``auth`` and ``basic_auth``.
    """
    asks = options.auth or any(options.basic_auth or ())
    if asks or options.unix_socket or options.address in ("127.0.0.1", "::1", "localhost"):
        return
    raise InvalidInput(
        f"Flower would listen on {options.address or 'every address'} and let everybody stop workers; "
        "set FLOWER_BASIC_AUTH=user:password"
    )
