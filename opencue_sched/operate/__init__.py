"""What people touch: command line, audit, metrics, logs."""
