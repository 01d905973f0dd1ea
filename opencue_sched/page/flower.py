"""The guard of Flower's start: no Flower of ours can be reached by a person without a password.

By default Flower listens on every address, and a person who reaches it can stop workers. Here it listens on loopback
unless told otherwise, and on another address only with a password. Flower takes options from the command line, from
``FLOWER_*`` variables and from a file of its own, so the guard checks what Flower has made of all three.
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
    """Have the start of Flower in this process check its options and the stores, and add the farm page.

    ``refuse`` ends the process where Flower may not start. In a process in which Celery has not loaded Flower's command
    this does nothing.
    """
    command: Any = sys.modules.get("flower.command")
    if command is None:
        return
    from tornado.options import options

    @cache  # Flower parses its options twice where it has a file of them
    def prepare() -> None:
        # In workers and beat the configured application does this, but here Celery has not configured it yet.
        end_by_sigterm_as_first_process()
        # Now the options are read, and Flower's application, which copies the list of pages, is not made yet.
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
        import_modules.connect(check_options, weak=False)

    def check_options(**_: Any) -> None:
        # Called when Flower imports our tasks: by then it has read its file of options, and does not listen yet.
        try:
            guard_flower(options)
        except (InvalidInput, AttributeError) as error:
            refuse(error)

    command.apply_env_options = _refusing(command.apply_env_options, refuse)
    command.apply_options = _refusing(command.apply_options, refuse)
    options.add_parse_callback(prepare)


def show_queues_of_sockets(settings: Settings) -> None:
    """Have Flower's page of queues use the user and the database of a Redis URL with a unix socket.

    Of such a URL Flower itself takes only the path and the password.
    """
    url = read_redis_url(settings.redis_dsn)
    if url.scheme != "unix":
        return
    from flower.utils import broker
    from redis.asyncio import Redis

    class Socket(broker.RedisSocket):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.redis = Redis(unix_socket_path=url.path, socket_timeout=self.socket_timeout, **url.options)

    broker.RedisSocket = Socket


def _refusing(read_options: Callable[..., None], refuse: Callable[[Exception], NoReturn]) -> Callable[..., None]:
    """Wrap a function of Flower's that reads options: an option that makes no sense is refused, and raises no error."""
    from tornado.options import Error

    def read(*arguments: Any) -> None:
        try:
            read_options(*arguments)
        except (ValueError, TypeError, Error) as error:
            refuse(InvalidInput(unreadable_option(os.environ, str(error))))

    return read


def unreadable_option(environment: Mapping[str, str], error: str) -> str:
    """A sentence on an option of Flower's that could not be read.

    Flower's ``error`` names no variable. So the variable whose value is in the error is named, if there is one.
    """
    for name, value in environment.items():
        if name.startswith("FLOWER_") and repr(value) in error:
            linked = value.startswith("tcp://")  # as Kubernetes sets FLOWER_PORT where a Service is called flower
            cure = f"; a Service named flower sets it in each pod beside it: set {name}, or enableServiceLinks: false"
            return f"{name}: {error}{cure if linked else ''}"
    return f"an option of Flower's makes no sense: {error}"


def guard_flower(options: Any) -> None:
    """Check the options that Flower has read.

    Raises InvalidInput for an address other than loopback without a password (no address means every address), and for
    a password that nobody could enter.
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
