"""What people ask of jobs: job files, submission, and what is done to a job afterwards.

Kills, retries, eaten frames, dependencies. Where a frame must be ended on its host this package uses rqd/ and reports/;
it knows nothing of plans and passes.
"""
