"""What comes back from hosts, where no Cuebot takes it: reports, ends of frames, and what was lost on the way.

The report service with its threads, completions and the state of a frame after one, the reaper, and the upkeep that
goes with them: history, finished jobs, events of jobs, reports of licence servers. Launches and passes are in
dispatch/.
"""
