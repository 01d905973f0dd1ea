"""Fixtures of the tests of clients."""

from __future__ import annotations

from tests.integration.accounting.conftest import settings_url, store, world  # noqa: F401 - fixtures
