"""What a recompute has to find, one kind at a time: each does something wrong, and knows when it was put right."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.recovery_site import Site
from opencue_sched.accounting import keys
from opencue_sched.accounting.ledger import Ledger, book_call

Inject = Callable[[], Callable[[], bool]]
"""Does something wrong; what it returns says whether it was put right."""

_TABLE_IS_RIGHT = "SELECT int_cores = (SELECT sum(int_cores_reserved) FROM proc) FROM subscription"


def a_crashed_booking(site: Site) -> Inject:
    def crashed() -> Callable[[], bool]:
        booking = site.booking()
        ledger = Ledger(site.client, owner="died")
        ledger.call_under([book_call(ledger.epoch().text, "force", booking, ledger.owner)])
        return lambda: not site.has_entry(booking.proc_id)

    return crashed


def faults_of_the_ledger(site: Site) -> dict[str, Inject]:
    def lost_release() -> Callable[[], bool]:
        proc_id = site.delete(announced=False)
        return lambda: not site.has_entry(proc_id)

    def tampered() -> Callable[[], bool]:
        """With a count that none of the other faults changes."""
        site.client.hincrby(site.job_key, "int_gpus", 7)
        return lambda: site.client.hget(site.job_key, "int_gpus") == "0"

    def lost_entry() -> Callable[[], bool]:
        proc_id = site.procs[0]
        site.client.hdel(keys.LEDGER, proc_id)
        return lambda: site.has_entry(proc_id)

    return {
        "a release that never arrives": lost_release,
        "a counter somebody wrote to": tampered,
        "an entry somebody deleted": lost_entry,
    }


def faults_of_others(site: Site) -> dict[str, Inject]:
    def late_cuebot() -> Callable[[], bool]:
        proc_id = site.book_as_cuebot()
        return lambda: site.has_entry(proc_id)

    def decremented() -> Callable[[], bool]:
        site.sql("UPDATE subscription SET int_cores = int_cores - 100")
        return lambda: bool(site.scalar(_TABLE_IS_RIGHT))

    def moved() -> Callable[[], bool]:
        site.folders.reverse()
        site.sql("UPDATE job SET pk_folder = :folder WHERE pk_job = :job", folder=site.folders[0], job=site.job_id)
        counter = keys.folder(site.folders[0])
        return lambda: int(str(site.client.hget(counter, "int_cores") or 0)) >= len(site.procs)

    return {
        "a proc that a late Cuebot booked": late_cuebot,
        "a table that a Cuebot decremented": decremented,
        "a job that moved with all its procs": moved,
    }
