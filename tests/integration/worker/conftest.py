"""Fixtures of the worker's tests."""

from __future__ import annotations

from tests.integration.farm.conftest import view  # noqa: F401 - a fixture
