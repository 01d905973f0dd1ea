"""Fixtures of the tests of jobs."""

from __future__ import annotations

from tests.integration.reports.conftest import changes, killer, ledger, view  # noqa: F401 - fixtures
