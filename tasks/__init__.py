"""One thin Celery task a job: no SQL, no Redis, no rules."""
