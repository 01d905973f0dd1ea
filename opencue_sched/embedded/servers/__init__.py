"""PostgreSQL and Redis from wheels, and a fleet, as processes of this machine that never outlive their owner."""
