"""The broker as Celery wants it named, from the one Redis URL of the settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from kombu.transport import TRANSPORT_ALIASES

_TRANSPORT = "opencue_sched.coordination.transport:Transport"
_GUARDED = {
    "redis": _TRANSPORT,
    "rediss": _TRANSPORT,
    "sentinel": "opencue_sched.coordination.transport:SentinelTransport",
}


def guard_transports() -> None:
    """Have kombu use our transports for Redis in this process. The URL keeps its scheme, which Flower looks at."""
    TRANSPORT_ALIASES.update(_GUARDED)


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """``url`` may contain a password: never log it."""

    url: str = field(repr=False)
    options: dict[str, object] = field(default_factory=dict)


def broker_settings(url: str) -> BrokerSettings:
    """Celery's broker settings for ``redis://``, ``rediss://``, ``unix://`` or our ``sentinel://a,b/service?db=0``."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return BrokerSettings(url.replace("unix://", "redis+socket://", 1))
    if parts.scheme != "sentinel":
        return BrokerSettings(url)
    credentials, at, nodes = parts.netloc.rpartition("@")
    database = parse_qs(parts.query).get("db", ["0"])[-1]
    urls = [f"sentinel://{credentials}{at}{node}/{database}" for node in nodes.split(",")]
    return BrokerSettings(";".join(urls), {"master_name": parts.path.strip("/")})
