"""What each message and each periodic job does: read the arguments, call, record, return a summary. No SQL, no Redis,
no rules.

Beats and clients know the tasks and never run one, so what needs gRPC is imported when a task is run.
"""
