"""Fleets of two facilities on one database and one Redis."""

from __future__ import annotations

import json
import subprocess

from sqlalchemy import text

from opencue_sched.accounting.keys import LEDGER, unpack, unpack_entry
from opencue_sched.coordination.keys import BoardKeys, LeaderKeys
from opencue_sched.coordination.presence import list_members
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, LayerSpec
from opencue_sched.insight.audit import run_audit
from tests.chaos.conftest import Site
from tests.chaos.planted_site import celery, last_sweep, steer
from tests.kit.polling import eventually


def heard_by_celery(site: Site, command: str, **environment: str) -> set[str]:
    """The nodes that answer to ``celery control``, of all that there are."""
    said = celery(site, "control", "--timeout", "3", "--json", command, **environment)
    return {node for reply in json.loads(said) for node in reply}


def resumes(site: Site, node: str, **environment: str) -> bool:
    """Whether a node hears that it is to go on, in the time of ``celery control``; no other one may."""
    try:
        heard = heard_by_celery(site, "resume_dispatch", **environment)
    except subprocess.CalledProcessError:  # nobody answered
        return False
    assert heard == {node}
    return True


# A lease that a beat of a slow machine does not lose by itself.
LASTING = {
    "OPENCUE_SCHED_COORDINATION__LEASE_TTL": "10s",
}


def test_fleets_of_different_facilities_do_not_disturb_each_other(site):
    """Two fleets on one database and one Redis: each books its own, leads itself, and goes on when the other stands."""
    allocs, facilities = {}, {}
    with site.engine.begin() as connection:
        farm = Farm(connection, seed=1)
        show = farm.show("show", managed=True)
        for name in ("Alpha", "beta"):
            fleet = name.lower()
            alloc = farm.alloc(f"{fleet}tag", facility=name)
            allocs[fleet], facilities[fleet] = alloc.id, farm.facility(name)
            farm.subscription(show, alloc, burst=1000)
            farm.hosts([HostSpec(name=f"{fleet}-host", alloc=alloc, cores=8)])

    def add(fleet: str, name: str, frames: int) -> None:
        with site.engine.begin() as connection:
            layer = LayerSpec(frames=frames, tags=f"{fleet}tag")
            Farm(connection).job([layer], show=show, facility_id=facilities[fleet], name=f"{fleet}-{name}")

    def on(fleet: str) -> int:
        """Frames that run on the fleet's host, booked by it and nobody else."""
        query = text("SELECT p.pk_proc FROM proc p JOIN host h USING (pk_host) WHERE h.str_name = :host")
        with site.engine.connect() as connection:
            procs = connection.execute(query, {"host": f"{fleet}-host"}).scalars().all()
        for proc in procs:
            record = unpack(proc, site.client.hget(LEDGER, proc))
            alloc = unpack_entry(proc, record.entry).vertices.alloc_id
            assert (record.owner, alloc) == (f"w-{fleet}", allocs[fleet])
        return len(procs)

    def lease(fleet: str) -> str | None:
        return site.client.get(LeaderKeys("cue", f"beat.{fleet}").lease)

    def ticks(fleet: str) -> int:
        return last_sweep(site, f"beat.{fleet}")

    for name in ("Alpha", "beta"):
        add(name.lower(), "first", 3)
        scope = {"OPENCUE_SCHED_SCHEDULER__FACILITY": name, **LASTING}
        site.fleet.worker(f"w-{name.lower()}", **scope)
        site.fleet.beat(f"b-{name.lower()}", **scope)
    eventually(lambda: (on("alpha"), on("beta")) == (3, 3), 90, "both facilities' frames")
    assert {actor.group for actor in list_members(site.client, "cue").of("dispatch")} == {"alpha", "beta"}
    boards = {fleet: BoardKeys("cue", f"clusters.{fleet}") for fleet in allocs}
    names = {fleet: set(site.client.hkeys(board.of("names"))) for fleet, board in boards.items()}
    assert names["alpha"] and names["beta"] and not names["alpha"] & names["beta"]
    eventually(lambda: lease("alpha") and lease("beta"), 30, "two leaders")
    assert lease("alpha") != lease("beta")

    # What is said to the one, by either command line, is not heard by the other.
    for fleet in names:
        scope = {"OPENCUE_SCHED_SCHEDULER__FACILITY": fleet}
        node = f"w-{fleet}@localhost"
        assert json.loads(steer(site, "pause", "--json", **scope).stdout) == {node: {"ok": "paused"}}
        eventually(lambda scope=scope, node=node: resumes(site, node, **scope), 30, "an answer")
        steer(site, "sleep", "--cluster", sorted(names[fleet])[0], "--for", "0", **scope)
    eventually(lambda: {actor.state for actor in list_members(site.client, "cue").of("dispatch")} == {"working"}, 30)

    # The one stands still, past its lease; the other neither notices nor takes over anything.
    before = lease("beta")
    for process in ("w-alpha", "b-alpha"):
        site.fleet.processes[process].pause()
    for fleet in ("alpha", "beta"):
        add(fleet, "second", 2)
    eventually(lambda: on("beta") == 5, 30, "the other fleet's frames")
    eventually(lambda: lease("alpha") is None, 30, "the end of the lease")
    began = ticks("beta"), ticks("alpha")
    eventually(lambda: ticks("beta") >= began[0] + 2, 30, "two more sweeps")
    assert (lease("beta"), ticks("alpha"), on("alpha"), lease("alpha")) == (before, began[1], 3, None)
    for process in ("w-alpha", "b-alpha"):
        site.fleet.processes[process].resume()
    eventually(lambda: on("alpha") == 5, 60, "the frames that waited")
    eventually(lambda: ticks("alpha") > began[1], 30, "its own sweeps")
    assert lease("beta") == before
    assert on("beta") == 5
    for process in ("w-alpha", "w-beta"):
        log = site.fleet.log(process).read_text()
        assert "former_leader" not in log
        assert "fenced_off" not in log
    eventually(lambda: not run_audit(site.engine, site.client, site.settings).failed, 60, "a clean audit")
