"""What holds a whole job back, as its rows and its show's say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opencue_sched.domain.states import JobState
from opencue_sched.domain.units import CENTICORES_PER_CORE
from opencue_sched.operate.waiting_words import listed
from opencue_sched.store.waiting import Quarantine, Situation, Subscribed


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason. ``decides``: nothing can be booked while it holds, whatever else is true."""

    code: str
    text: str
    decides: bool = False


def job_reasons(
    situation: Situation,
    subscriptions: Sequence[Subscribed],
    quarantine: Quarantine | None,
    *,
    facility_scope: str | None,
    scope_exists: bool,
) -> tuple[Reason, ...]:
    """In the order in which somebody would have to change things. ``facility_scope`` is scheduler.facility."""
    reasons = _of_the_job(situation, quarantine)
    reasons += _of_the_show(situation)
    if facility_scope is not None and not scope_exists:
        reasons.append(
            Reason("facility", f"scheduler.facility names {facility_scope!r}, which is no facility", decides=True)
        )
    elif facility_scope is not None and facility_scope != situation.facility:
        reasons.append(
            Reason(
                "facility",
                f"the job is in facility {situation.facility}; this scheduler works on {facility_scope} only",
                decides=True,
            )
        )
    reasons += _of_subscriptions(situation, subscriptions)
    reasons += _of_caps(situation)
    return tuple(reasons)


def _of_the_job(situation: Situation, quarantine: Quarantine | None) -> list[Reason]:
    reasons = []
    if situation.state == JobState.FINISHED.value:
        reasons.append(Reason("finished", "the job is finished", decides=True))
    elif situation.state != JobState.PENDING.value:
        reasons.append(Reason("state", f"the job is {situation.state}, not PENDING", decides=True))
    if situation.paused:
        text = f"the job is paused; `opencue-sched job unpause {situation.name}`"
        reasons.append(Reason("paused", text, decides=True))
    if not situation.auto_book:
        reasons.append(Reason("auto_book", "booking is off for the job (b_auto_book)", decides=True))
    if quarantine is not None:
        until = quarantine.until.astimezone().strftime("%H:%M:%S")
        text = f"the job is in quarantine until {until}, because booking it failed: {quarantine.reason}"
        reasons.append(Reason("quarantined", text, decides=True))
    return reasons


def _of_the_show(situation: Situation) -> list[Reason]:
    show = situation.show
    reasons = []
    if not situation.show_active:
        text = f"show {show} is not active; `opencue-sched show active {show} on`"
        reasons.append(Reason("show_inactive", text, decides=True))
    if not situation.show_managed:
        text = f"show {show} is not managed by this scheduler; `opencue-sched show managed {show} on`"
        reasons.append(Reason("show_unmanaged", text, decides=True))
    if not situation.show_booking:
        text = f"booking is off for show {show}; `opencue-sched show booking {show} on`"
        reasons.append(Reason("show_booking", text, decides=True))
    if situation.show_paused:
        reasons.append(Reason("show_paused", f"show {show} is paused", decides=True))
    return reasons


def _of_subscriptions(situation: Situation, subscriptions: Sequence[Subscribed]) -> list[Reason]:
    show = situation.show
    here = [one for one in subscriptions if one.facility_id == situation.facility_id]
    create = f"`opencue-sched subscription create {show} ALLOCATION CORES`"
    if not subscriptions:
        return [Reason("no_subscription", f"show {show} has no subscription; {create}", decides=True)]
    if not here:
        text = f"show {show} has no subscription in facility {situation.facility}, where the job is; {create}"
        return [Reason("no_subscription", text, decides=True)]
    usable = [one for one in here if one.burst_centicores >= CENTICORES_PER_CORE]
    if not usable:
        return [Reason("burst_zero", f"the burst of show {show} is {_small_bursts(here)}", decides=True)]
    if all(one.cores >= one.burst_centicores // CENTICORES_PER_CORE for one in usable):
        full = listed([f"{one.allocation} ({one.cores} of {_burst(one)} cores)" for one in usable])
        return [Reason("burst", f"show {show} is at its burst in {full}", decides=True)]
    return []


def _small_bursts(subscriptions: Sequence[Subscribed]) -> str:
    """Bursts that have no room for one core, and where."""
    if all(one.burst_centicores <= 0 for one in subscriptions):
        return f"0 in {listed([one.allocation for one in subscriptions])}"
    return f"below one core in {listed([f'{one.allocation} ({_burst(one)} cores)' for one in subscriptions])}"


def _burst(subscription: Subscribed) -> str:
    """In cores."""
    return f"{subscription.burst_centicores / CENTICORES_PER_CORE:g}"


def _of_caps(situation: Situation) -> list[Reason]:
    """Caps that are used up. GPUs concern only layers that want some, so they decide nothing by themselves."""
    reasons = []
    job_cap, folder_cap = situation.max_centicores, situation.folder_max_centicores
    if 0 < job_cap < (situation.cores + 1) * CENTICORES_PER_CORE:
        text = f"the job uses {situation.cores} of the {job_cap / CENTICORES_PER_CORE:g} cores it may"
        reasons.append(Reason("job_cap", f"{text}; `opencue-sched job max-cores`", decides=True))
    if 0 < folder_cap < (situation.folder_cores + 1) * CENTICORES_PER_CORE:
        cap = f"{folder_cap / CENTICORES_PER_CORE:g}"
        text = f"folder {situation.folder} uses {situation.folder_cores} of the {cap} cores it may"
        reasons.append(Reason("folder_cap", text, decides=True))
    if 0 < situation.max_gpus <= situation.gpus:
        reasons.append(Reason("job_gpu_cap", f"the job uses {situation.gpus} of the {situation.max_gpus} GPUs it may"))
    if 0 < situation.folder_max_gpus <= situation.folder_gpus:
        text = f"folder {situation.folder} uses {situation.folder_gpus} of the {situation.folder_max_gpus} GPUs it may"
        reasons.append(Reason("folder_gpu_cap", text))
    return reasons
