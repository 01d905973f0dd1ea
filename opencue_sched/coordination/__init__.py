"""How the processes of a fleet share their work, all of it in Redis: the leader's lease, presence, permits of frames,
cluster postings, the jobboard, queues and messages.

Nothing here knows what a pass does, nor reads or writes what Redis counts: that is accounting/.
"""
