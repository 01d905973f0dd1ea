"""Placement: which waiting frame goes to which host, decided in memory.

``plan_pass`` (planner) reads a frozen ``Snapshot`` of the work and a ``HostCache`` and returns a ``Plan``; nothing here
writes to PostgreSQL or books in Redis. What may be decided differently (admission, order of hosts, score) is a
``Policy``.
"""
