"""The one Redis URL of the settings, as far as its parts have to be told to more than one library.

``redis://[user:password@]host:port/db``, ``rediss://`` (TLS), ``unix://``, and
``sentinel://[user:password@]host:port[,host:port...]/service?db=0``. The query of the last may say ``ssl=true`` (TLS to
the Sentinels and to the master), ``sentinel_username`` and ``sentinel_password`` (what the Sentinels themselves ask
for). With TLS, ``ssl_ca_certs``, ``ssl_certfile``, ``ssl_keyfile``, ``ssl_cert_reqs`` (required, optional, none)
and ``ssl_check_hostname`` mean what they mean to redis-py. Certificates are verified unless the URL says otherwise.
Never log a URL: it may hold a password.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlencode, urlsplit, urlunsplit

from opencue_sched.errors import InvalidInput

SENTINEL_PORT = 26379
UNDECODABLE = "backslashreplace"
"""How clients show bytes that are no text, which anybody may have written: that value then makes no sense, and not the
call that read it, which may have taken others away with it."""
_OPTIONS: dict[str, tuple[str, ...]] = {
    "redis": (),
    "rediss": (),
    "unix": ("db", "password"),
    "sentinel": ("db", "sentinel_username", "sentinel_password"),
}
"""What the query may say, besides ``ssl...``. Celery takes no more than this for options of its own."""
_TLS_OPTIONS = frozenset(
    f"ssl_{name}"
    for name in (
        "ca_certs",
        "ca_data",
        "ca_path",
        "cert_reqs",
        "certfile",
        "check_hostname",
        "ciphers",
        "keyfile",
        "password",
    )
)
"""Those of redis-py that are text, or read here. It raises TypeError for others, when it first connects."""
_NO_HOST = "accounting.redis_url: its host is no name: between two dots are 1 to 63 characters"
_TRUE = ("1", "true", "yes")
_WITHOUT = ("0", "false", "no")


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """Where the Sentinels are, which master they are asked for, and what both want to be told.

    ``tls`` are redis-py's ``ssl_*`` options, None without TLS.
    """

    nodes: tuple[tuple[str, int], ...]
    service: str
    database: int
    username: str | None
    password: str | None = field(repr=False)
    sentinel_username: str | None
    sentinel_password: str | None = field(repr=False)
    tls: dict[str, str | bool] | None


def check_redis_url(url: str) -> None:
    """Raises InvalidInput for a URL that a library would refuse later, or read as something else.

    redis-py reads a database that is no number as 0, Celery refuses it. What was not understood is not shown: it may be
    part of a password.
    """
    try:
        parts = urlsplit(url)
        if parts.scheme not in _OPTIONS:
            raise InvalidInput("accounting.redis_url is not a Redis URL: redis://, rediss://, unix:// or sentinel://")
        _check_options(parts.scheme, _query(parts.query))
        if parts.scheme == "sentinel":
            read_sentinel_url(url)
            return
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise InvalidInput(
            "accounting.redis_url cannot be read: redis://user:password@host:port/db, with / @ and : in the password "
            "as %2F %40 and %3A, and a port from 1 to 65535"
        )
    if not _is_host(parts.hostname or ""):
        raise InvalidInput(_NO_HOST)
    database = _query(parts.query).get("db", "" if parts.scheme == "unix" else parts.path.strip("/"))
    if database and not database.isdigit():
        raise InvalidInput("accounting.redis_url: the database, after the last /, must be a number")
    if parts.scheme == "unix" and not parts.path:
        raise InvalidInput("accounting.redis_url: unix:// is followed by the path of a socket")
    tls_options(url)


def _check_options(scheme: str, query: dict[str, str]) -> None:
    if all(name in _OPTIONS[scheme] or name == "ssl" or name.startswith("ssl_") for name in query):
        return
    options = ", ".join((*_OPTIONS[scheme], "ssl_..."))
    instead = "; the database stands after the last /" if "db" in query else ""
    raise InvalidInput(f"accounting.redis_url: the options of {scheme}:// are {options}{instead}")


def tls_options(url: str) -> dict[str, str | bool] | None:
    """redis-py's ``ssl_*`` options of a ``rediss://`` or TLS Sentinel URL; None when it asks for no TLS.

    Raises InvalidInput for an option that is none.
    """
    parts = urlsplit(url)
    query = _query(parts.query)
    given = {name: value for name, value in query.items() if name.startswith("ssl_")}
    if parts.scheme != "rediss" and query.get("ssl", "").lower() not in _TRUE:
        return None
    if unknown := sorted(given.keys() - _TLS_OPTIONS):
        raise InvalidInput(f"accounting.redis_url: no option of TLS is {unknown[0]}: {', '.join(sorted(_TLS_OPTIONS))}")
    options: dict[str, str | bool] = {"ssl_cert_reqs": "required", **given}
    if options["ssl_cert_reqs"] not in ("required", "optional", "none"):
        raise InvalidInput("accounting.redis_url: ssl_cert_reqs is required, optional or none")
    if (check := given.get("ssl_check_hostname")) is not None:
        if check.lower() not in (*_TRUE, *_WITHOUT):
            raise InvalidInput("accounting.redis_url: ssl_check_hostname is true or false")
        options["ssl_check_hostname"] = check.lower() in _TRUE
    return options


def without_tls_options(url: str) -> str:
    """``url`` without its ``ssl...`` query."""
    parts = urlsplit(url)
    kept = {name: value for name, value in _query(parts.query).items() if name != "ssl" and not name.startswith("ssl_")}
    return url if len(kept) == len(_query(parts.query)) else urlunsplit(parts._replace(query=urlencode(kept)))


def read_sentinel_url(url: str) -> SentinelUrl:
    """The parts of a ``sentinel://`` URL. Raises InvalidInput."""
    parts = urlsplit(url)
    service = parts.path.strip("/")
    authority = parts.netloc.rpartition("@")[2]
    nodes = [node.rpartition(":") if ":" in node else (node, ":", str(SENTINEL_PORT)) for node in authority.split(",")]
    query = _query(parts.query)
    if not service or not all(host and port.isdigit() for host, _, port in nodes):
        raise InvalidInput("accounting.redis_url: a Sentinel URL is sentinel://host:port[,host:port]/service?db=0")
    if not all(_is_host(host) for host, _, _ in nodes):
        raise InvalidInput(_NO_HOST)
    try:
        database = int(query.get("db", "0"))
    except ValueError as error:
        raise InvalidInput("accounting.redis_url: db of a Sentinel URL must be a number") from error
    return SentinelUrl(
        nodes=tuple((host, int(port)) for host, _, port in nodes),
        service=service,
        database=database,
        username=_unquoted(parts.username),
        password=_unquoted(parts.password),
        sentinel_username=query.get("sentinel_username"),
        sentinel_password=query.get("sentinel_password"),
        tls=tls_options(url),
    )


def _is_host(name: str) -> bool:
    """Whether Python would look the name up: for another it raises an error that is none of the network."""
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return True


def _query(text: str) -> dict[str, str]:
    return {name: values[-1] for name, values in parse_qs(text).items()}


def _unquoted(text: str | None) -> str | None:
    return unquote(text) if text else None
