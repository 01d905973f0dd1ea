"""Fixtures of the tests of what is embedded."""

from __future__ import annotations

from tests.kit.simulated_hosts import channels, connect, farm  # noqa: F401 - fixtures
