"""What Cuebot does where there is none: reports, completions, the reaper, submission, administration of jobs."""
