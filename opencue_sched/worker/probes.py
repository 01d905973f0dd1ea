"""What a supervisor may ask of a worker, a beat or a report service: /livez and /readyz, beside its metrics.

A process whose loop is stuck looks alive from outside: its port is open and its presence may be young. So the loop
itself leaves a mark at each round, and the probes judge its age. A store that is away fails no /livez, for a restart
would not bring it back.
"""

from __future__ import annotations

from collections.abc import Iterable
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from opencue_sched.clock import boot_clock

STALLED_SECONDS = 120.0
"""Loops come round every 5 s at most; a round may wait for a store that hangs until its client gives up (the broker's
after 30 s, ours after 10 s), a few times in a row."""


class Pulse:
    """Knows whether the loop that this process is for goes round, for its probes. Thread-safe."""

    def __init__(self) -> None:
        self._beaten_at: float | None = None
        """When the loop last came round, by the boot clock; None while it does not run. Without a lock: the thread of
        the loop writes, the thread of the probes reads."""

    def beat(self) -> None:
        """Note that the loop has come round."""
        self._beaten_at = boot_clock()

    def rest(self) -> None:
        """Note that the loop does not run for a reason: it waits for its broker, which a restart would not bring."""
        self._beaten_at = None

    def problem(self, *, ready: bool) -> str:
        """Why a probe fails, or an empty text: the loop is stuck or, where ``ready`` is asked for, does not run."""
        beaten_at = self._beaten_at
        if beaten_at is None:
            return "not running yet, or waiting for its stores" if ready else ""
        silent = boot_clock() - beaten_at
        return f"the loop has not come round for {silent:.0f} s" if silent > STALLED_SECONDS else ""


PULSE = Pulse()


def with_probes(serve: WSGIApplication, pulse: Pulse = PULSE) -> WSGIApplication:
    """/livez and /readyz beside the metrics, in Kubernetes' words: 200, or 503 with the problem."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] not in ("/livez", "/readyz"):
            return serve(environ, start_response)
        problem = pulse.problem(ready=environ["PATH_INFO"] == "/readyz")
        start_response("503 Service Unavailable" if problem else "200 OK", [("Content-Type", "text/plain")])
        return [f"{problem or 'ok'}\n".encode()]

    return answer
