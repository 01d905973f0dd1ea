"""Ends the runs whose end no host will report: runs on hosts that are down, runs of finished jobs, runs without an
owner, and runs whose completion never came or was lost with a Cuebot.

Always in this order: kill, have RQD confirm that the process does not run, and only then give its frame away. A host
that cannot be asked keeps its frames until it is DOWN, or has been out of reach so long that a person must decide (the
frame ends DEAD): a frame is never given to a second host while the first may still render it. The boot time that a host
reports is no proof: it is by the host's own clock, which may be hours ahead of ours, or be set while the frame runs.

Time is short: Redis hands the message out again when the task takes longer than the broker's visibility time-out. So a
host that is DOWN is first looked for, briefly and once, whatever the number of its frames; a host out of reach is asked
once a reap; and nothing is begun when the time of a reap is over or its process is to end. The next reap goes on with
what is left then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import structlog

from opencue_sched.domain.states import ExitStatus, FrameState, HardwareState
from opencue_sched.reports.completion import Releaser
from opencue_sched.reports.reported_runs import SETTLED_SECONDS
from opencue_sched.reports.run_ends import LostRun, RunVerdict
from opencue_sched.rqd.kill import Fate, RqdKiller
from opencue_sched.store import lost_runs
from opencue_sched.store.lost_runs import DEAF_FACTOR, EVERYTHING, GIVE_UP_SECONDS, LostRow, UpkeepScope, Why

_log = structlog.get_logger(__name__)

MOST_RUNS = 2000
"""How many runs one reap ends at most, which takes a few seconds after the last kill. Which are left for the next reap
is chosen at random."""

REAP_SECONDS = 30.0
"""How long after its begin a reap begins kills. The last kill takes up to twice ``rqd.timeout`` and a second more."""

LOOK_SECONDS = 2.0
"""How long a host that is DOWN already is looked for: two attempts of a lossy network to connect."""

ORPHAN_SECONDS = 300.0
"""A frame without a proc, or a proc on a host that neither reports nor is DOWN, is lost after this long. With less,
hosts are asked to kill frames that a slow report would have named; with more, their work is rendered again later."""

FRAMELESS_SECONDS = 60.0
"""A proc whose frame was taken off it (eaten, killed) is released after this long, if no completion does it."""

GIVE_UP_ORPHAN_SECONDS = 3600.0
"""A frame without a proc whose host does not confirm that it is gone is DEAD after this long."""

_KILL_THREADS = 32
"""How many hosts are asked at once, each by a thread that waits for the network only. In REAP_SECONDS they look for 480
DOWN hosts, each for up to LOOK_SECONDS; with fewer, more runs of a large outage wait for the next reap."""


@dataclass(frozen=True, slots=True)
class ReaperReport:
    """What one reap did."""

    hosts_down: tuple[str, ...] = ()
    procs_released: int = 0
    frames_waiting: int = 0
    frames_dead: int = 0
    deferred: int = 0
    """How many runs could not be confirmed dead, or not in time; the next reap tries them again."""


_ENDED = (RunVerdict.APPLIED, RunVerdict.RELEASED, RunVerdict.ORPHAN_APPLIED)
"""The verdicts on runs that a reap has ended."""
_STATUSES: Mapping[str, ExitStatus] = {
    Why.HOST_DOWN: ExitStatus.DOWN_HOST,
    Why.JOB_FINISHED: ExitStatus.FRAME_CLEARED,
    Why.NO_FRAME: ExitStatus.FRAME_CLEARED,
}
"""The exit status of a frame by why its run is lost; FRAME_ORPHAN for any other reason."""


def reap(
    releaser: Releaser,
    killer: RqdKiller,
    *,
    scope: UpkeepScope = EVERYTHING,
    stopping: Callable[[], bool] = lambda: False,
    most: int = MOST_RUNS,
) -> ReaperReport:
    """Mark silent hosts DOWN, then end the lost runs in ``scope``. Any number of processes may reap; each run is ended
    once.

    ``stopping`` says whether the process is to end, which ends the reap as its time does. At most ``most`` runs are
    ended.
    """
    until = releaser.clock() + REAP_SECONDS
    hosts_down = _mark_hosts_down(releaser, scope)
    with releaser.engine.connect() as connection:
        lost = lost_runs.lost_runs(
            connection,
            scope,
            limit=most,
            silent=ORPHAN_SECONDS,
            frameless=FRAMELESS_SECONDS,
            # No sooner: a launch may still be on its way, and a report still wait to be handled.
            unnamed=max(releaser.settings.lost_completion_grace, SETTLED_SECONDS),
        )
    # Runs with a proc first: a proc holds cores, a frame without one holds nothing.
    lost = sorted(lost, key=lambda run: run.why == Why.NO_PROC)
    hosts: dict[str, list[LostRow]] = {}
    for run in lost:
        if run.frame_id and run.host_name:
            hosts.setdefault(run.host_name, []).append(run)
    kill = partial(_kill_on, killer, lambda: releaser.clock() < until and not stopping())
    with ThreadPoolExecutor(_KILL_THREADS, thread_name_prefix="reaper") as threads:
        fates = {run: fate for known in threads.map(kill, hosts, hosts.values()) for run, fate in known.items()}
    requests = [request for run in lost if (request := _request(run, fates)) is not None]
    alive = sum(fate is Fate.RUNNING for fate in fates.values())
    ended = [outcome for outcome in releaser.end(requests) if outcome.verdict in _ENDED]
    return ReaperReport(
        tuple(hosts_down),
        sum(outcome.verdict is not RunVerdict.ORPHAN_APPLIED for outcome in ended),
        sum(outcome.state is FrameState.WAITING for outcome in ended),
        sum(outcome.state is FrameState.DEAD for outcome in ended),
        len(lost) - alive - len(ended),
    )


def _mark_hosts_down(releaser: Releaser, scope: UpkeepScope) -> list[str]:
    """Mark hosts DOWN that stopped reporting, and return their names. None is marked right after PostgreSQL was away,
    and later than usual if most hosts went silent: then it is more likely that the reports do not arrive."""
    after = releaser.settings.host_down_after
    with releaser.engine.begin() as connection:
        up, silent, database_age = lost_runs.hearing(connection, silent_after=after, scope=scope)
        if not silent or database_age < after:
            return []
        if silent > max(1, up // 2):
            _log.warning("most_hosts_silent", silent=silent, up=up)
            after *= DEAF_FACTOR
        down = lost_runs.mark_hosts_down(connection, silent_after=after, scope=scope)
    if down:
        _log.warning("hosts_down", hosts=down)
        releaser.publish_hosts(down)
    return down


def _kill_on(
    killer: RqdKiller, goes_on: Callable[[], bool], host_name: str, runs: Sequence[LostRow]
) -> dict[str, Fate]:
    """The fate of each frame's process on one host, by frame id. A frame for which there was no time has none."""
    fates: dict[str, Fate] = {}
    reachable = True
    if runs[0].host_state == HardwareState.DOWN and goes_on():
        reachable = killer.answers(host_name, LOOK_SECONDS)
    for run in runs:
        if not reachable:
            fates[run.frame_id] = Fate.UNREACHABLE
        elif goes_on():
            if run.why == Why.UNNAMED:
                fate = killer.confirm_gone(host_name, run.frame_id, run.proc_id)
            else:
                fate = killer.stop(host_name, run.frame_id, run.proc_id, f"{run.why}: it is lost")
            fates[run.frame_id] = fate
            reachable = fate is not Fate.UNREACHABLE
    return fates


def _request(run: LostRow, fates: Mapping[str, Fate]) -> LostRun | None:
    """The request that ends a lost run, or None to try again in the next reap.

    A frame that is known not to run waits again; of any other a person must decide, once it was silent long enough.
    """
    fate = fates.get(run.frame_id) if run.frame_id and run.host_name else Fate.NOT_RUNNING
    if fate is None or fate is Fate.RUNNING:
        return None
    gone = fate is Fate.UNREACHABLE and run.host_state == HardwareState.DOWN
    if fate is Fate.NOT_RUNNING or gone:
        state = FrameState.WAITING
    elif run.silent_for >= (GIVE_UP_SECONDS if run.proc_id else GIVE_UP_ORPHAN_SECONDS):
        state = FrameState.DEAD
    else:
        return None
    return LostRun(
        run.proc_id,
        run.frame_id,
        state,
        _STATUSES.get(run.why, ExitStatus.FRAME_ORPHAN),
        # A finished job's procs go though they report to the last.
        pinged_at=None if run.why == Why.JOB_FINISHED else run.pinged_at,
        host_state=run.host_state if run.why == Why.HOST_DOWN and fate is Fate.UNREACHABLE else None,
        reason=run.why,
    )
