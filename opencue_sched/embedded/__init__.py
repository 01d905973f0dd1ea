"""PostgreSQL and Redis from wheels, synthetic farms, a simulated RQD, the demo."""
