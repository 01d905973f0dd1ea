"""The doors: one thin Celery task per job. No SQL, no Redis, no rules."""
