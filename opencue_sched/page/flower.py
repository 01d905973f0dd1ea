"""What Flower is guarded against, before it starts.

Flower listens on every address by default, and whoever reaches it can stop workers; here it is on loopback unless
told otherwise, and elsewhere has a password. It has options from the command line, from ``FLOWER_*`` variables and
from a file of its own, so what it has made of them all is judged.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NoReturn

from celery.signals import import_modules
from pydantic import ValidationError
from redis.exceptions import RedisError

from opencue_sched.accounting.epoch import guarded_redis
from opencue_sched.domain.redis_url import read_redis_url
from opencue_sched.errors import InvalidInput, SchedulerError
from opencue_sched.insight.health import check_service_redis
from opencue_sched.settings import Settings, get_settings
from opencue_sched.signals import end_by_sigterm_as_first_process


def guard_start(refuse: Callable[[Exception], NoReturn]) -> None:
    """Have the options judged, the stores looked at and the farm page added when Flower starts in this process, which
    ends by ``refuse`` where it may not. Nothing where Celery has not loaded Flower's command."""
    command: Any = sys.modules.get("flower.command")
    if command is None:
        return
    from tornado.options import options

    @cache  # Flower reads its options twice where it has a file of them
    def starts() -> None:
        end_by_sigterm_as_first_process()  # Celery has not configured the application yet, which does it elsewhere
        # Options are read, the application is not made yet: it takes its list of pages when it is.
        options.address = options.address or "127.0.0.1"
        try:
            settings = get_settings()
            with guarded_redis(settings.redis_dsn, settings) as client:
                check_service_redis(client, settings)
            from opencue_sched.page.application import GuardedFlower
            from opencue_sched.page.handlers import add_to_flower

            add_to_flower(settings)
            show_queues_of_sockets(settings)
        except (ValidationError, SchedulerError, RedisError) as error:
            refuse(error)
        command.Flower = partial(GuardedFlower, hosts=settings.page.hosts, refuse=refuse)
        import_modules.connect(judged, weak=False)

    def judged(**_: Any) -> None:
        # Flower imports our tasks when it has read its file, too, and before it listens.
        try:
            guard_flower(options)
        except (InvalidInput, AttributeError) as error:
            refuse(error)

    command.apply_env_options = _refusing(command.apply_env_options, refuse)
    command.apply_options = _refusing(command.apply_options, refuse)
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


def _refusing(read_options: Callable[..., None], refuse: Callable[[Exception], NoReturn]) -> Callable[..., None]:
    """A function of Flower's that reads options, which refuses one that makes no sense instead of raising an error."""
    from tornado.options import Error

    def read(*given: Any) -> None:
        try:
            read_options(*given)
        except (ValueError, TypeError, Error) as error:
            refuse(InvalidInput(unreadable_option(os.environ, str(error))))

    return read


def unreadable_option(environment: Mapping[str, str], error: str) -> str:
    """What to say of an option of Flower's that could not be read, by the variable if its value is in the ``error``."""
    for name, value in environment.items():
        if name.startswith("FLOWER_") and repr(value) in error:
            linked = value.startswith("tcp://")
            cure = f"; a Service named flower sets it in each pod beside it: set {name}, or enableServiceLinks: false"
            return f"{name}: {error}{cure if linked else ''}"
    return f"an option of Flower's makes no sense: {error}"


def guard_flower(options: Any) -> None:
    """Judge the options that Flower has read. Raises InvalidInput for an address off loopback without a password, and
    for a password that cannot be given.

    No address means every address.
    """
    from opencue_sched.page.application import asks_for_a_password

    if any(entry and ":" not in entry for entry in options.basic_auth or ()):
        raise InvalidInput(
            "FLOWER_BASIC_AUTH (--basic_auth) is user:password, or several of these with commas between them, and one "
            "has no colon: a password cannot have a comma"
        )
    if asks_for_a_password(options) or options.unix_socket or options.address in ("127.0.0.1", "::1", "localhost"):
        return
    raise InvalidInput(
        f"Flower would listen on {options.address or 'every address'} and let everybody stop workers; "
        "set FLOWER_BASIC_AUTH=user:password"
    )
