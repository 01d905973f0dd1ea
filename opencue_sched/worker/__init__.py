"""What one process of a fleet is: its connections, Celery tasks and consumer, events, logs, metrics.

Makes everything once, after the fork, and hands it to tasks and threads. What the tasks do is in tasks/ and in the
packages below; nothing below this package imports celery.
"""
