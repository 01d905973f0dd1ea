"""The end of the children of Celery's prefork pool, which waits for what they have in hand without end."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from typing import Any


def children_end(pool: Any, seconds: float) -> bool:
    """Have the children end when they have done what is in hand; whether all have within ``seconds``."""
    stopping = threading.Thread(target=pool.stop, name="pool-stop", daemon=True)
    stopping.start()
    stopping.join(seconds)
    return not stopping.is_alive()


def kill_children(pool: Any) -> None:
    """End them at once, whatever they are at."""
    for pid in pool.info["processes"]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
