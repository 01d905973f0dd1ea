"""What the command line of Celery is guarded against, before anything starts.

Flower listens on every address by default, and whoever reaches it can stop workers; here it is on loopback unless told
otherwise, and elsewhere has a password. It reads its options from the command line and from ``FLOWER_*`` variables; a
configuration file of its own is the operator's word and not looked at.
"""

from __future__ import annotations

import ipaddress
from collections.abc import MutableMapping, Sequence
from pathlib import PurePath

from opencue_sched.domain.errors import InvalidInput

_WAYS_TO_ASK_WHO = ("basic_auth", "auth", "auth_provider")


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


def guard_flower(argv: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Set the address to loopback if none is given. Raises InvalidInput for another address without a password."""
    given = {f"flower_{name}".upper(): value for name, value in _options(argv).items()}
    options = {**environment, **given}
    if options.get("FLOWER_UNIX_SOCKET"):
        return
    address = options.get("FLOWER_ADDRESS")
    if not address:
        environment["FLOWER_ADDRESS"] = "127.0.0.1"
    elif not _is_loopback(address) and not any(options.get(f"FLOWER_{way}".upper()) for way in _WAYS_TO_ASK_WHO):
        raise InvalidInput(
            f"Flower would listen on {address} and let everybody stop workers; set FLOWER_BASIC_AUTH=user:password"
        )


def _options(argv: Sequence[str]) -> dict[str, str]:
    """``--unix-socket=x`` and ``--unix_socket=x`` as ``{"unix_socket": "x"}``."""
    pairs = (argument.lstrip("-").partition("=") for argument in argv if argument.startswith("-"))
    return {name.replace("-", "_"): value for name, _, value in pairs}


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
