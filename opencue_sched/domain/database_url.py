"""The database URL of the settings, read as PostgreSQL's own library reads it, and written as SQLAlchemy does.

The form is ``postgresql://user:password@host:port/name?option=value``, percent-encoded wherever that is needed: a host
may be the directory of a socket (``%2Frun%2Fpostgresql``). Several hosts are tried in their order: ``h1:5432,h2:5433``,
and in the query ``host=h1,h2&port=5432,5433`` or ``host=h1:5432&host=h2:5433``. The query may name user, password and
dbname, too, and any option of libpq's. Of an option that is given twice, other than host, the last value counts. Never
log a URL: it may hold a password, also in its query.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

from opencue_sched.errors import InvalidInput

_FORM = re.compile(
    r"postgres(?:ql)?(?:\+\w+)?://(?:(?P<user>[^:@/?]*)(?::(?P<password>[^@/]*))?@)?"
    r"(?P<hosts>[^/?]*)(?:/(?P<name>[^?]*))?(?:\?(?P<query>.*))?",
    re.DOTALL,
)
_HOST = re.compile(r"(?:\[(?P<address>[^\]]*)\]|(?P<name>[^:]*))(?::(?P<port>[^:]*))?")
_HIGHEST_PORT = 65535


@dataclass(frozen=True, slots=True)
class DatabaseUrl:
    """The parts of a URL, decoded. Nobody changes ``options``."""

    user: str = ""
    password: str = field(default="", repr=False)
    hosts: tuple[str, ...] = ()
    ports: tuple[str, ...] = ()
    """The port of each of ``hosts``; an empty text is PostgreSQL's own port."""
    name: str = ""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def for_sqlalchemy(self) -> str:
        """The URL that SQLAlchemy takes, with the psycopg2 driver named. Contains the password."""
        query = dict(self.options)
        address = _address(self.hosts[0], self.ports[0]) if len(self.hosts) == 1 else ""
        # SQLAlchemy takes a directory, and several hosts, as options alone.
        if "/" in address or len(self.hosts) > 1:
            address, query["host"] = "", ",".join(self.hosts)
            if any(self.ports):
                query["port"] = ",".join(self.ports)
        credentials = quote(self.user, safe="") + (f":{quote(self.password, safe='')}" if self.password else "")
        text = f"postgresql+psycopg2://{credentials}{'@' if credentials else ''}{address}"
        # SQLAlchemy does not decode the name of a database: a question mark in its place would begin the query.
        if "?" in self.name:
            query["dbname"] = self.name
        elif self.name:
            text += f"/{self.name}"
        options = [f"{option}={quote(value, safe='/,')}" for option, value in query.items()]
        return f"{text}?{'&'.join(options)}" if options else text

    @property
    def shown(self) -> str:
        """What may be shown: who, where and which database, but no password, and nothing else of the query."""
        credentials = quote(self.user, safe="") + (":***" if self.password else "")
        servers = [_address(host, port) for host, port in zip(self.hosts, self.ports, strict=True)]
        where = f"{credentials}{'@' if credentials else ''}{','.join(servers)}"
        return f"postgresql+psycopg2://{where}{'/' if self.name else ''}{self.name}"


def read_database_url(url: str) -> DatabaseUrl:
    """The parts of the URL. Raises InvalidInput, whose text has nothing of the URL: any part may be half a password."""
    found = _FORM.fullmatch(url)
    if found is None or "@" in found["hosts"] or "@" in (found["name"] or ""):
        raise _refusal()
    query = _query(found["query"] or "")
    hosts, ports = _of_query(query.pop("host")) if "host" in query else _of_authority(found["hosts"])
    if "port" in query:
        given = query.pop("port")[-1].split(",")
        # A port without a host is one of PostgreSQL's own host. One port is that of all hosts.
        hosts = hosts or ("",) * len(given)
        ports = tuple(given if len(given) > 1 else given * len(hosts))
    if len(hosts) != len(ports) or not all(_is_port(port) for port in ports if port):
        raise _refusal()
    return DatabaseUrl(
        query.pop("user", [unquote(found["user"] or "")])[-1],
        query.pop("password", [unquote(found["password"] or "")])[-1],
        hosts,
        ports,
        query.pop("dbname", [unquote(found["name"] or "")])[-1],
        {option: values[-1] for option, values in query.items()},
    )


def _of_authority(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The hosts and their ports before the path of a URL, an empty text where one is left out. Raises InvalidInput."""
    parts = [_HOST.fullmatch(part) for part in text.split(",")] if text else []
    servers = [(part["address"] or part["name"] or "", part["port"] or "") for part in parts if part]
    if len(servers) < len(parts):
        raise _refusal()
    return tuple(unquote(host) for host, _ in servers), tuple(port for _, port in servers)


def _of_query(values: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The hosts and ports in the values of ``host``; an empty text for each port that is not given.

    libpq has hosts without ports here, SQLAlchemy allows ``host:port``. A text with several colons is an IPv6 address
    without a port, one with a slash a directory.
    """
    servers = []
    for host in ",".join(values).split(","):
        with_port = host.count(":") == 1 and "/" not in host
        servers.append(host.partition(":") if with_port else (host, "", ""))
    return tuple(host for host, _, _ in servers), tuple(port for _, _, port in servers)


def _query(text: str) -> dict[str, list[str]]:
    """The values of each option. A plus sign stays a plus sign, as in libpq, and is no space."""
    options = defaultdict[str, list[str]](list)
    for part in text.split("&") if text else ():
        option, named, value = part.partition("=")
        if not named:
            raise _refusal()
        options[unquote(option)].append(unquote(value))
    return options


def _is_port(text: str) -> bool:
    return text.isdecimal() and 0 < int(text) <= _HIGHEST_PORT


def _address(host: str, port: str) -> str:
    """Host and port as a URL has them: an IPv6 address in brackets, and no colon without a port."""
    return (f"[{host}]" if ":" in host else host) + (f":{port}" if port else "")


def _refusal() -> InvalidInput:
    """The error for a URL that is none of PostgreSQL's. It does not repeat the URL, which may contain a password."""
    return InvalidInput(
        "database_url is not a PostgreSQL URL: postgresql://user:password@host:port/name, with / @ : and ? in the "
        "password as %2F %40 %3A and %3F, and a port that is a number; several hosts are host:port,host:port"
    )
