"""What works with a board: records that end by themselves unless they are registered again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import redis

from opencue_sched.coordination.names import BoardKeys


class Entity(Protocol):
    """TaskFlow's entity: anything with these three."""

    @property
    def kind(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class RegisteredEntity:
    """An entity as a board remembers it."""

    kind: str
    name: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Entities:
    """The entities of one board."""

    def __init__(self, client: redis.Redis, keys: BoardKeys) -> None:
        self._client = client
        self._keys = keys

    def register(self, entity: Entity, *, ttl_seconds: float) -> None:
        """Remember ``entity`` for ``ttl_seconds``. Raises TypeError for metadata that JSON cannot hold."""
        key = self._keys.entity(entity.kind, entity.name)
        record = json.dumps({"kind": entity.kind, "name": entity.name, "metadata": dict(entity.metadata)})
        with self._client.pipeline(transaction=True) as pipe:
            pipe.set(key, record, px=max(1, round(ttl_seconds * 1000)))
            pipe.sadd(self._keys.of("entities"), key)
            pipe.execute()

    def all(self) -> list[Entity]:
        """Those that have not run out, by kind and name."""
        keys = sorted(cast("set[str]", self._client.smembers(self._keys.of("entities"))))
        records = cast("list[str | None]", self._client.mget(keys)) if keys else []
        gone = [key for key, record in zip(keys, records, strict=True) if record is None]
        if gone:
            self._client.srem(self._keys.of("entities"), *gone)
        return [RegisteredEntity(**json.loads(record)) for record in records if record is not None]
