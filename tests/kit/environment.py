"""What this process finds in its environment, for code that reads its settings there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from opencue_sched.settings import Settings, get_settings


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """The settings of this process are read anew, with ``OPENCUE_SCHED_`` before these names, and once more after."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in values.items():
            environment.setenv(f"OPENCUE_SCHED_{name}", value)
        get_settings.cache_clear()
        try:
            yield
        finally:
            get_settings.cache_clear()


@contextmanager
def stores_of(settings: Settings, **values: str) -> Iterator[None]:
    """As variables, on the stores and with the instance name of ``settings``."""
    stores = {"DATABASE_URL": settings.sqlalchemy_url, "REDIS_URL": settings.redis_dsn, "INSTANCE": settings.instance}
    with variables(**stores, **values):
        yield
