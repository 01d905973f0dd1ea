"""What one process is: its connections, Celery tasks and consumer, events, logs, metrics."""
