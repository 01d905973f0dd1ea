"""PostgreSQL and Redis from wheels, synthetic farms, simulated and real RQDs, the demo.

Shared by tests, benchmarks and the command `demo`. No process of a farm imports anything of this package.
"""
