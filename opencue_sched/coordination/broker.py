"""The broker as Celery wants it named, from the one Redis URL of the settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from kombu.transport import TRANSPORT_ALIASES

from opencue_sched.domain.errors import InvalidInput
from opencue_sched.domain.redis_url import read_sentinel_url, tls_options, without_tls_options

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
    """``url`` may contain a password: never log it. ``use_ssl`` is Celery's ``broker_use_ssl``, None without TLS."""

    url: str = field(repr=False)
    options: dict[str, object] = field(default_factory=dict, repr=False)
    use_ssl: dict[str, str | bool] | None = None


def broker_settings(url: str) -> BrokerSettings:
    """Celery's broker settings for the URLs of domain/redis_url.py. Raises InvalidInput.

    TLS is given apart from the URL: kombu verifies no certificate for a ``rediss://`` that says nothing of it.
    """
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return BrokerSettings(url.replace("unix://", "redis+socket://", 1))
    if parts.scheme not in _GUARDED:
        raise InvalidInput("accounting.redis_url is not a Redis URL: redis://, rediss://, unix:// or sentinel://")
    if parts.scheme != "sentinel":
        return BrokerSettings(without_tls_options(url), use_ssl=tls_options(url))
    named = read_sentinel_url(url)
    credentials, at, _ = parts.netloc.rpartition("@")
    urls = [f"sentinel://{credentials}{at}{host}:{port}/{named.database}" for host, port in named.nodes]
    asking: dict[str, object] = {"username": named.sentinel_username, "password": named.sentinel_password}
    if named.tls is not None:
        asking |= {"ssl": True, **named.tls}
    options: dict[str, object] = {"master_name": named.service, "sentinel_kwargs": asking}
    return BrokerSettings(";".join(urls), options, named.tls)
