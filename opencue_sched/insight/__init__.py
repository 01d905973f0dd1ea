"""Answers to people: why a frame waits, what a farm lacks, whether the books are right, what the fleet does.

Everything here reads; nothing changes a job, a host or a counter. The words are made here, and laid out by cli/ and
page/.
"""
