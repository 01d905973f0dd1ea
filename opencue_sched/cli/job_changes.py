"""The changes that keys of ``opencue-sched top`` make on a job."""

from __future__ import annotations

from enum import Enum

from sqlalchemy import Engine

from opencue_sched.cli.chosen_jobs import comment_on_jobs, commenting
from opencue_sched.cli.deferred import control, who_and_why
from opencue_sched.clients.postgres import ask
from opencue_sched.clients.store_errors import describe
from opencue_sched.domain.names import plural
from opencue_sched.domain.states import FrameState
from opencue_sched.store import jobs
from opencue_sched.store.shows import set_rows


class JobChange(Enum):
    """A change of a job; its value is the verb."""

    PAUSE = "pause"
    UNPAUSE = "unpause"
    KILL = "kill"
    RETRY = "retry"
    EAT = "eat"
    PRIORITY = "priority"

    @property
    def question(self) -> str:
        """The question that a person is asked first, with a place for the name: ``{job}``."""
        return _QUESTIONS.get(self, f"{self.value.capitalize()} {{job}}?")


_QUESTIONS = {
    JobChange.RETRY: "Retry the dead frames of {job}?",
    JobChange.EAT: "Eat the dead frames of {job}?",
    JobChange.PRIORITY: "Set the priority of {job} to {priority}?",
}


def change_job(engine: Engine, change: JobChange, job_id: str, *, priority: int) -> str:
    """Change a job, or for retry and eat its dead frames, as the command of that name does. Returns what became of the
    job, for people.

    ``priority`` is used for PRIORITY alone. Raises NoResultFound when the job is gone.
    """
    name = ask(engine, jobs.job_of, job_id).name
    if change in (JobChange.PAUSE, JobChange.UNPAUSE, JobChange.PRIORITY):
        return f"{name}: {_set(engine, change, job_id, priority)}"
    return f"{name}: {_end(engine, change, job_id)}"


def _set(engine: Engine, change: JobChange, job_id: str, priority: int) -> str:
    """Pause or unpause a job, or set its priority, with a comment that says so; returns what was done, in words."""
    did = f"priority {priority}" if change is JobChange.PRIORITY else f"{change.value}d"
    with engine.begin() as connection:
        if change is JobChange.PRIORITY:
            set_rows(connection, "job_resource", "pk_job", [job_id], {"int_priority": priority})
        else:
            set_rows(connection, "job", "pk_job", [job_id], {"b_paused": change is JobChange.PAUSE})
        comment_on_jobs(connection, [job_id], did, None)
    return did


def _end(engine: Engine, change: JobChange, job_id: str) -> str:
    """Kill the job, or retry or eat its dead frames."""
    dead = [frame.id for frame in ask(engine, jobs.frames_of, job_id, states=[FrameState.DEAD])]
    if change is not JobChange.KILL and not dead:
        return "no frame of it is dead"
    with control(engine) as (jobs_control, _):
        if change is JobChange.KILL:
            note = commenting(job_id, "killed", None, of_frames=False)
            result = jobs_control.kill_job(job_id, reason=who_and_why("killed", None), note=note)
            killed = "killed" if result.finished or result.refusal is None else "not killed"
            did = f"{killed}, {plural(len(result.changed), 'running frame')} stopped"
        else:
            change_frames = jobs_control.retry_frames if change is JobChange.RETRY else jobs_control.eat_frames
            verb = "retried" if change is JobChange.RETRY else "eaten"
            result = change_frames(dead, reason=who_and_why(verb, None), note=commenting(job_id, verb, None))
            did = f"{plural(len(result.changed), 'frame')} {verb}"
    if result.refusal is not None:
        did += f", but the database refused: {describe(result.refusal)}"
    if result.deferred:
        did += f", {len(result.deferred)} could not be confirmed dead: `opencue-sched explain` says where"
    return did
