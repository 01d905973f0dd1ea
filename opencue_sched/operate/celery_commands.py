"""What the command line of Celery is guarded against, before anything starts.

Flower listens on every address by default, and whoever reaches it can stop workers; here it is on loopback unless told
otherwise, and elsewhere has a password. It has options from the command line, from ``FLOWER_*`` variables and from a
file of its own, so what it has made of them all is judged.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from opencue_sched.domain.errors import InvalidInput


def is_celery(argv: Sequence[str]) -> bool:
    """Whether this is a process of the command ``celery``, also as ``python -m celery``."""
    return bool(argv) and "celery" in PurePath(argv[0]).parts[-2:]


def is_flower(argv: Sequence[str]) -> bool:
    """Whether this is the process of ``celery ... flower``."""
    return is_celery(argv) and "flower" in argv[1:]


def keeps_a_log(argv: Sequence[str]) -> bool:
    """Whether this is a worker or a beat, which log as our settings say."""
    return is_celery(argv) and not {"worker", "beat"}.isdisjoint(argv[1:])


def asks_for_help(argv: Sequence[str]) -> bool:
    """Whether the command only says how it is used."""
    return "--help" in argv


def asks_for_prefork(argv: Sequence[str]) -> bool:
    """Whether the command line asks for the prefork pool.

    Celery takes ``--pool prefork`` for its default, and so for less than the pool of our configuration.
    """
    pairs = zip(argv, [*argv[1:], ""], strict=True)
    return any(
        option in ("-Pprefork", "--pool=prefork") or (option in ("-P", "--pool") and value == "prefork")
        for option, value in pairs
    )


def guard_flower(options: Any) -> None:
    """Judge the options that Flower has read. Raises InvalidInput for an address off loopback without a password.

    No address means every address. An ``auth_provider`` alone asks nobody: Flower looks at ``auth`` and ``basic_auth``.
    """
    asks = options.auth or any(options.basic_auth or ())
    if asks or options.unix_socket or _is_loopback(options.address):
        return
    raise InvalidInput(
        f"Flower would listen on {options.address or 'every address'} and let everybody stop workers; "
        "set FLOWER_BASIC_AUTH=user:password"
    )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
