"""Reaches PostgreSQL and Redis, and reads what their errors say. No SQL, no keys, no rules of accounting."""
