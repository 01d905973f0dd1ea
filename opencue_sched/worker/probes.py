"""What a supervisor may ask of a worker, a beat or a report service: /livez and /readyz, beside its metrics.

Each of these processes has one loop that its work depends on: the consumer's timer in a worker, Celery's ticks in a
beat, the wait for an order to stop in a report service. A process whose loop is stuck looks alive from outside: its
port is open, and its presence in Redis may have been refreshed just now. So the loop itself notes each of its rounds,
and the probes judge how long ago the last one was. A store that is away fails no /livez, for a restart would not bring
the store back.
"""

from __future__ import annotations

from collections.abc import Iterable
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from opencue_sched.clock import boot_clock

STALLED_SECONDS = 120.0
"""A loop whose last round is longer ago than this counts as stuck. A round comes at least every 5 s, but may wait a few
times in a row for a store that hangs until the client of the store gives up, which takes up to 30 s each time."""


class Pulse:
    """Remembers when the loop of this process made its last round, and tells the probes what follows. Thread-safe."""

    def __init__(self) -> None:
        self._beaten_at: float | None = None
        """The time of the last round, by the boot clock; None while the loop does not run. It needs no lock: only the
        thread of the loop writes it, and the threads of the probes read it once for each answer."""

    def beat(self) -> None:
        """Note that the loop makes a round."""
        self._beaten_at = boot_clock()

    def rest(self) -> None:
        """Note that the loop does not run, for a reason that a restart would not mend: the broker is away."""
        self._beaten_at = None

    def problem(self, *, ready: bool) -> str:
        """Why a probe fails, or an empty text. /livez fails when the loop is stuck; /readyz (``ready``) also when the
        loop does not run."""
        beaten_at = self._beaten_at
        if beaten_at is None:
            return "not running yet, or waiting for its stores" if ready else ""
        silent = boot_clock() - beaten_at
        return f"the loop has not come round for {silent:.0f} s" if silent > STALLED_SECONDS else ""


PULSE = Pulse()
"""The pulse of this process. Its loop calls ``beat``: in celery.py, beat.py or reports/service.py."""


def with_probes(serve: WSGIApplication, pulse: Pulse = PULSE) -> WSGIApplication:
    """An application that answers /livez and /readyz by ``pulse``, as Kubernetes asks, and leaves all else to
    ``serve``. A probe is answered with 200, or with 503 and the problem."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] not in ("/livez", "/readyz"):
            return serve(environ, start_response)
        problem = pulse.problem(ready=environ["PATH_INFO"] == "/readyz")
        start_response("503 Service Unavailable" if problem else "200 OK", [("Content-Type", "text/plain")])
        return [f"{problem or 'ok'}\n".encode()]

    return answer
