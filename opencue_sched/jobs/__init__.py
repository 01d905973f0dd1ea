"""What people ask of jobs: job files, submission, and what is done to a job afterwards."""
