"""The one Redis URL of the settings, as far as its parts have to be told to more than one library.

``redis://[user:password@]host:port/db``, ``rediss://`` (TLS), ``unix://[user:password@]/path?db=0``, and
``sentinel://[user:password@]host:port[,host:port...]/service?db=0``. The query of ``unix://`` may also say
``username`` and ``password``. That of ``sentinel://`` may say ``ssl=true`` (TLS to the Sentinels and to the master),
``sentinel_username`` and ``sentinel_password`` (what the Sentinels themselves ask for). With TLS, ``ssl_ca_certs``,
``ssl_ca_path``, ``ssl_certfile``, ``ssl_keyfile``, ``ssl_password`` (of the key), ``ssl_cert_reqs`` (required,
optional, none) and ``ssl_check_hostname`` mean what they mean to redis-py. Certificates are verified unless the URL
says otherwise. Never log a URL, but what ``without_secrets`` leaves of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, parse_qs, quote, unquote, urlsplit

from opencue_sched.errors import InvalidInput

REDIS_PORT = 6379
SENTINEL_PORT = 26379
UNDECODABLE = "backslashreplace"
"""How clients show bytes that are no text, which anybody may have written: that value then makes no sense, and not the
call that read it, which may have taken others away with it."""
_OPTIONS: dict[str, tuple[str, ...]] = {
    "redis": (),
    "rediss": (),
    "unix": ("db", "username", "password"),
    "sentinel": ("db", "sentinel_username", "sentinel_password"),
}
"""What the query may say, besides ``ssl`` and _TLS_OPTIONS where there is a network in between. Celery takes no more
than this for options of its own."""
FILE_OPTIONS = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
"""The TLS options that name a file, or (ssl_ca_path) a directory."""
_TLS_OPTIONS = (
    "ssl_ca_certs",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_cert_reqs",
    "ssl_check_hostname",
    "ssl_ca_path",
    "ssl_password",
)
_BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A Redis URL in its parts, as libraries are told them."""

    scheme: str
    """``redis``, ``rediss``, ``unix`` or ``sentinel``."""
    database: int
    username: str | None
    password: str | None = field(repr=False)
    tls: dict[str, str | bool] | None = field(repr=False)
    """The ``ssl_*`` options of redis-py; None without TLS."""
    host: str = "localhost"
    port: int = REDIS_PORT
    path: str = ""
    """The socket of ``unix://``."""
    nodes: tuple[tuple[str, int], ...] = ()
    """The Sentinels that are asked for the master ``service``; none for other URLs."""
    service: str = ""
    sentinel_options: dict[str, Any] = field(default_factory=dict, repr=False)
    """Options of the connections to the Sentinels."""

    @property
    def options(self) -> dict[str, Any]:
        """Options of redis-py's connections to the server, or to the master that Sentinels name; without its place."""
        user = {"username": self.username, "password": self.password}
        return {"db": self.database, **user, **(self.tls or {})}


def read_redis_url(url: str) -> RedisUrl:
    """The parts of the URL. Raises InvalidInput for one that a library would refuse later, or read as something else.

    redis-py reads a database that is no number as 0, Celery refuses it. What was not understood is not shown: it may be
    part of a password.
    """
    parts = _split(url)
    scheme, path = parts.scheme, unquote(parts.path.strip("/"))
    query = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
    options = (*_OPTIONS[scheme], *(() if scheme == "unix" else ("ssl", *_TLS_OPTIONS)))
    if not query.keys() <= set(options):
        raise _refusal(f": the options of {scheme}:// are {', '.join(options)}")
    nodes = _sentinels(parts) if scheme == "sentinel" else ()
    if scheme == "unix" and not path:
        raise _refusal(": unix:// is followed by the path of a socket")
    database = query.get("db", "") if "db" in options else path
    if database and not database.isdigit():
        raise _refusal(": the database, after the last /, must be a number (with unix:// and sentinel:// as ?db=0)")
    tls = _tls_options(scheme, query)
    username, password = (unquote(part) if part else None for part in (parts.username, parts.password))
    for_both = {"ssl": True, **tls} if tls else {}
    sentinel_user = {"username": query.get("sentinel_username"), "password": query.get("sentinel_password")}
    return RedisUrl(
        scheme,
        int(database or 0),
        query.get("username") or username,
        query.get("password") or password,
        tls,
        host=unquote(parts.hostname or "localhost") if not nodes else "",
        port=(parts.port or REDIS_PORT) if not nodes else 0,
        path=f"/{path}" if scheme == "unix" else "",
        nodes=nodes,
        service=path if nodes else "",
        sentinel_options=sentinel_user | for_both if nodes else {},
    )


def without_secrets(url: str) -> str:
    """The URL as it may be shown: without user and password, and without its query."""
    return re.sub(r"//.*@", "//", url.partition("?")[0])


def _split(url: str) -> SplitResult:
    """The URL's parts. Raises InvalidInput where a password that is not escaped may have been split with them."""
    try:
        parts = urlsplit(url)
        cut = bool(parts.fragment) or (bool(parts.netloc) and "@" in parts.path)
        if parts.scheme != "sentinel":
            cut = cut or parts.port == 0 or (parts.port is not None and not parts.hostname)
    except ValueError:
        parts, cut = urlsplit("redis:"), True
    if parts.scheme not in _OPTIONS:
        raise _refusal(" is not a Redis URL: redis://, rediss://, unix:// or sentinel://")
    if cut:
        raise _refusal(
            " cannot be read: redis://user:password@host:port/db, with / @ : # and ? in the password as %2F %40 %3A "
            "%23 and %3F, and a port from 1 to 65535"
        )
    return parts


def with_password(url: str, password: str) -> str:
    """A URL that read_redis_url has read, with this password in it. Raises InvalidInput for one that has a password."""
    parts = urlsplit(url)
    if parts.password is not None or "password" in parse_qs(parts.query):
        raise _refusal(" has a password and accounting.redis_password is set: leave one of them out")
    escaped = quote(password, safe="")
    if parts.scheme == "unix":
        return f"{url}{'&' if parts.query else '?'}password={escaped}"
    user, _, hosts = parts.netloc.rpartition("@")
    return url.replace(f"//{parts.netloc}", f"//{user}:{escaped}@{hosts}", 1)


def _sentinels(parts: SplitResult) -> tuple[tuple[str, int], ...]:
    """The addresses of a Sentinel URL, with SENTINEL_PORT where none is given. Raises InvalidInput for one without a
    host or a service."""
    authority = parts.netloc.rpartition("@")[2]
    named = [node if ":" in node else f"{node}:{SENTINEL_PORT}" for node in authority.split(",")]
    nodes = [node.rpartition(":") for node in named]
    if not parts.path.strip("/") or not all(host and port.isdigit() for host, _, port in nodes):
        raise _refusal(": a Sentinel URL is sentinel://host:port[,host:port]/service?db=0")
    return tuple((host, int(port)) for host, _, port in nodes)


def _tls_options(scheme: str, query: dict[str, str]) -> dict[str, str | bool] | None:
    """The TLS options of a URL by redis-py's names; None where it asks for no TLS. Raises InvalidInput."""
    if scheme != "rediss" and not _BOOLEANS.get(query.get("ssl", "").lower(), False):
        return None
    options: dict[str, str | bool] = {"ssl_cert_reqs": "required"}
    options |= {name: value for name, value in query.items() if name in _TLS_OPTIONS}
    if options["ssl_cert_reqs"] not in ("required", "optional", "none"):
        raise _refusal(": ssl_cert_reqs is required, optional or none")
    if "ssl_check_hostname" in options:
        if query["ssl_check_hostname"].lower() not in _BOOLEANS:
            raise _refusal(": ssl_check_hostname is true or false")
        options["ssl_check_hostname"] = _BOOLEANS[query["ssl_check_hostname"].lower()]
    return options


def _refusal(why: str) -> InvalidInput:
    return InvalidInput(f"accounting.redis_url{why}")
