"""Placement: which waiting frame goes to which host, decided in memory.

``plan_pass`` (planner) reads a frozen ``Snapshot`` of the work and a ``HostPool`` and returns a ``Plan``; nothing here
writes to PostgreSQL or books in Redis. Hosts are kept in ``HostIndex`` trees (index) by facility, tag and allocation
(groups) and shared by the passes of a process through ``HostCache`` (cache, known), which ``HostChanges`` (changes)
keeps current. What may be decided differently (order, scoring, admission, fit) is a ``Policy`` (policy, strategy).
"""
