"""A session that hears what our triggers say."""

from __future__ import annotations

import json
import select
import time
from collections.abc import Collection
from typing import Any

import psycopg2
from sqlalchemy import Engine, make_url, text

_PAYLOAD_LIMIT_BYTES = 7900


class Listener:
    """A session that listens to some of our channels."""

    def __init__(self, url: str, channels: Collection[str]) -> None:
        target = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
        self._connection = psycopg2.connect(target)
        self._connection.autocommit = True
        with self._connection.cursor() as cursor:
            for channel in (*channels, "test_end"):
                cursor.execute(f"LISTEN {channel}")

    def heard(self, engine: Engine) -> dict[str, list[dict[str, Any]]]:
        """Payloads by channel of everything committed so far (a marker sent last says that all have arrived)."""
        with engine.begin() as connection:
            connection.execute(text("SELECT pg_notify('test_end', '')"))
        deadline = time.monotonic() + 30
        heard: dict[str, list[dict[str, Any]]] = {}
        while time.monotonic() < deadline:
            select.select([self._connection], [], [], 1)
            self._connection.poll()
            while self._connection.notifies:
                notice = self._connection.notifies.pop(0)
                if notice.channel == "test_end":
                    return heard
                assert len(notice.payload.encode()) < _PAYLOAD_LIMIT_BYTES
                heard.setdefault(notice.channel.removeprefix("opencue_sched_"), []).append(json.loads(notice.payload))
        raise AssertionError("the marker never arrived")

    def close(self) -> None:
        self._connection.close()
