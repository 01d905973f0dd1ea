"""Passes that die at a chosen moment: each is a process that is forked here, and killed by SIGKILL.

    python -m tests.chaos.stepped_pass

Each line of standard input is a JSON object ``{"cluster": its payload, "die_after": n, "launch_last": whether}``, or
with a ``posting`` and the ``ticket`` of a message for it, from whose claim on everything is done. The pass is one of
the instance ``died``; ``division`` names those among which the hosts are divided, if they are. The launch, which
otherwise goes on beside the end of the pass, comes wholly before or wholly after that. The answer is a line with what
it had ``done`` that others can see, in order, and its exit ``status``. It dies right after the n-th of these things,
before it could do anything more; with n = 0 it goes to its end. They are the commands by which it changes anything in
Redis, one by one also where they are sent together (those of a transaction at its end), the COMMIT of what it booked,
its launches, and the message it sends in the end. Dying before the next of them leaves nothing else behind: PostgreSQL
rolls back what is not committed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import redis
import structlog
from redis.connection import AbstractConnection

from opencue_sched.clients.postgres import make_engine
from opencue_sched.coordination.keys import BoardKeys
from opencue_sched.coordination.postings import ClaimRenewer, ClusterPostings, decode_cluster
from opencue_sched.dispatch.commit import PlanSizes
from opencue_sched.dispatch.dispatcher import Dispatcher
from opencue_sched.placement.policy import MAX_FRAMES
from opencue_sched.rqd.channels import RqdChannels
from opencue_sched.settings import Rqd, get_settings
from tests.chaos.wire import Unwatched, commands_of
from tests.kit.in_turn import InTurn
from tests.kit.passes import passes

COMMIT, LAUNCH, SEND = "COMMIT", "launch", "send"
CLAIM_SECONDS = 30
"""Longer than any machine stands still."""
READS = {"GET", "HGETALL", "HMGET", "MGET", "TIME", "XRANGE", "XREVRANGE", "ZRANGE"}


class Steps:
    """What this process has done, told to ``out``; it dies after the n-th."""

    def __init__(self, out: int, die_after: int) -> None:
        self.out, self.left = out, die_after

    def done(self, what: str) -> None:
        os.write(self.out, f"{what}\n".encode())
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch_redis(self) -> None:
        send = AbstractConnection.send_packed_command
        witness = redis.ConnectionPool.from_url(get_settings().redis_dsn, connection_class=Unwatched)
        transaction: list[str] | None = None

        def changed(name: str) -> None:
            nonlocal transaction
            if name == "MULTI":
                transaction = []
            elif name == "EXEC" and transaction is not None:
                together, transaction = transaction, None
                if together:
                    self.done("+".join(together))
            elif name in READS:
                pass
            elif transaction is not None:
                transaction.append(name)
            else:
                self.done(name)

        def watched(connection: Any, packed: Any, *args: Any, **rest: Any) -> None:
            for name, command in commands_of(packed):
                send(connection, [command], *args, **rest)
                # Redis answers nobody before it has carried out what everybody else has sent it by then.
                redis.Redis(connection_pool=witness).ping()
                changed(name)

        AbstractConnection.send_packed_command = watched

    def watch_commits(self, dialect: Any) -> None:
        commit = dialect.do_commit

        def watched(connection: Any) -> None:
            with connection.cursor() as cursor:
                cursor.execute("SELECT txid_current_if_assigned()")
                (wrote,) = cursor.fetchone()
            commit(connection)
            if wrote is not None:
                self.done(COMMIT)

        dialect.do_commit = watched


class WatchedChannels(RqdChannels):
    """The way to RQDs of a pass that launches all its frames in one go."""

    def __init__(self, settings: Rqd, steps: Steps) -> None:
        super().__init__(settings)
        self.steps = steps

    def each(self, function: Any, items: Any) -> Any:
        answers = super().each(function, items)
        if answers:  # nothing is asked of RQDs that have taken their frames
            self.steps.done(LAUNCH)
        return answers


class RenewsNothing(ClaimRenewer):
    """Claims live long enough, and nothing is to happen between the steps."""

    def start(self) -> None:
        pass


def live(
    out: int,
    die_after: int,
    launch_last: bool,
    cluster: str = "",
    posting: str = "",
    ticket: int = 0,
    most_frames: int = MAX_FRAMES,
    division: Sequence[str] = (),
) -> None:
    settings = get_settings()
    engine = make_engine(settings, application_name="opencue-sched died")
    with passes(engine, settings, "died", division=tuple(division)) as here:
        postings = ClusterPostings(here.client, BoardKeys("cue", "clusters"))
        renewer = RenewsNothing(postings, ttl_seconds=CLAIM_SECONDS)
        steps = Steps(out, die_after)
        channels, sizes = WatchedChannels(settings.rqd, steps), PlanSizes()
        if most_frames < MAX_FRAMES:
            sizes.cancelled("", 2 * most_frames)  # as after a plan of twice as many that took too long
        runner = replace(here.runner, channels=channels, plan_sizes=sizes, launches=lambda: InTurn(last=launch_last))
        dispatcher = Dispatcher(settings, postings, renewer, runner, "died", lambda _: steps.done(SEND), lambda _: None)
        steps.watch_redis()
        steps.watch_commits(engine.dialect)
        if posting:
            dispatcher.dispatch(posting, ticket)
        else:
            runner.run([decode_cluster(cluster)], alive=lambda: True)


def forked(live: Callable[..., None], die_after: int, **what: Any) -> dict[str, Any]:
    """Run ``live`` as a process of its own; what it had ``done``, and its exit ``status``."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(readable)
        code = 1
        try:
            live(writable, die_after, **what)
            code = 0
        finally:
            os._exit(code)
    os.close(writable)
    with os.fdopen(readable, encoding="utf-8") as lines:
        done = lines.read().split("\n")[:-1]
    _, status = os.waitpid(pid, 0)
    return {"done": done, "status": os.waitstatus_to_exitcode(status)}


def answer_lines(live: Callable[..., None]) -> None:
    """Answer each line of standard input with what became of a process that it describes."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    for line in sys.stdin:
        print(json.dumps(forked(live, **json.loads(line))), flush=True)


if __name__ == "__main__":
    answer_lines(live)
