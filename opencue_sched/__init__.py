"""opencue-sched: a frame scheduler for OpenCue farms that runs as a fleet of Celery workers."""

__version__ = "0.1.0"
