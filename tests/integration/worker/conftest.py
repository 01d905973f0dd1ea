"""Fixtures of the worker's tests."""

from __future__ import annotations
