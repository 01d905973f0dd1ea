"""How PostgreSQL and Redis are reached, and what their errors say. No SQL, no keys, no rules of accounting."""
