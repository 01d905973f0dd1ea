"""Placement: which waiting frame goes to which host, decided in memory.

``plan_pass`` (planner) reads a frozen ``Snapshot`` of the work and a ``HostCache`` and returns a ``Plan``; nothing here
writes to PostgreSQL or books in Redis. Hosts are kept in ``HostIndex`` trees (index) by facility, tag and allocation
(host_groups) and shared by the passes of a process through ``HostCache`` (host_cache), which ``HostChanges``
(host_groups) keeps current. What may be decided differently (admission, order of hosts, score) is a ``Policy``.
"""
