"""Opens a board by name and configuration, through the entry points ``opencue_sched.jobboards``.

``fetch("mine", {"board": "redis", "host": "redis", "namespace": "cue"})``, or the same as a URI:
``fetch("mine", "redis://redis:6379/0?namespace=cue&claim_ttl=30")``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import redis

from opencue_sched.coordination.board_errors import NotFound
from opencue_sched.coordination.jobboard import DEFAULT_CLAIM_SECONDS, JobBoard
from opencue_sched.domain.redis_url import UNDECODABLE

GROUP = "opencue_sched.jobboards"
_TEXTS = ("host", "password", "username", "unix_socket_path")
_TLS = ("ssl_keyfile", "ssl_certfile", "ssl_cert_reqs", "ssl_ca_certs")
_CLIENT = (*_TEXTS, *_TLS, "port", "db", "socket_timeout", "socket_connect_timeout", "ssl")
_OWN = ("board", "url", "namespace", "claim_ttl", "clustered")
_TRUE = ("1", "true", "yes", "on")


def fetch(name: str, conf: Mapping[str, Any] | str, namespace: str = GROUP, **kwargs: Any) -> Any:
    """The board ``name``. ``conf`` names the backend in ``board``, or is a URI whose scheme does; ``kwargs`` (such as
    ``client`` and ``persistence``) go to the backend. ``namespace`` is the group of entry points.

    Raises NotFound for a backend that is not installed, ValueError for a configuration that makes no sense.
    """
    settings = _from_uri(conf) if isinstance(conf, str) else dict(conf)
    kind = settings.get("board")
    if not kind:
        raise ValueError("the configuration of a board names its backend: {'board': 'redis', ...}")
    found = list(entry_points(group=namespace, name=str(kind)))
    if not found:
        known = sorted({entry.name for entry in entry_points(group=namespace)})
        raise NotFound(f"no board backend {kind!r} in {namespace}; there are: {', '.join(known) or 'none'}")
    return found[0].load()(name, settings, **kwargs)


def open_redis_board(
    name: str, conf: Mapping[str, Any], *, client: redis.Redis | None = None, **kwargs: Any
) -> JobBoard:
    """The entry point ``redis``."""
    unknown = set(conf) - {*_CLIENT, *_OWN}
    if unknown:
        raise ValueError(f"a redis board has no settings {', '.join(sorted(unknown))}")
    return JobBoard(
        client if client is not None else _client(conf),
        str(conf.get("namespace", "cue")),
        name=name,
        claim_ttl=float(conf.get("claim_ttl", DEFAULT_CLAIM_SECONDS)),
        clustered=_true(conf.get("clustered", False)),
        **kwargs,
    )


def _client(conf: Mapping[str, Any]) -> redis.Redis:
    """What a URL says of itself wins over the rest of ``conf``; whether by TLS, only its scheme says."""
    url = str(conf.get("url") or "")
    options: dict[str, Any] = {"decode_responses": True, "encoding_errors": UNDECODABLE}
    options["socket_timeout"] = float(conf.get("socket_timeout", 5.0))
    for option, convert in (("port", int), ("db", int), ("socket_connect_timeout", float)):
        if option in conf:
            options[option] = convert(conf[option])
    tls = url.startswith("rediss:") if url else _true(conf.get("ssl", False))
    options |= {name: conf[name] for name in (*_TEXTS, *(_TLS if tls else ())) if conf.get(name)}
    return redis.Redis.from_url(url, **options) if url else redis.Redis(ssl=tls, **options)


def _from_uri(uri: str) -> dict[str, Any]:
    parts = urlsplit(uri)
    if not parts.scheme:
        raise ValueError(f"{uri!r} is no board URI: it starts with the backend, as in redis://host:6379/0")
    conf: dict[str, Any] = dict(parse_qsl(parts.query))
    conf["board"] = "redis" if parts.scheme in ("redis", "rediss", "unix") else parts.scheme
    if conf["board"] == "redis" and (parts.netloc or parts.path):
        conf["url"] = uri.partition("?")[0]
    return conf


def _true(value: Any) -> bool:
    return value if isinstance(value, bool) else str(value).lower() in _TRUE
