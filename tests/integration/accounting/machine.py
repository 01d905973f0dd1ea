"""The model-based test: everybody who touches the ledger, one boundary at a time, on real services.

Bookers, recomputes, fillers and loaders of caps run production code as actors (stepping.py). Time is the test's own: a
tick is longer than an age, so it makes entries older in Redis, moves the boot clock and ends open transactions, which
is what the server does to a booker that was stopped; but it lets a COMMIT take as long as the disk does
(stepped_disk.py). Rules come in their own number: what is there several times happens more often. Some games are of a
*dual* store, into which a Cuebot publishes plain decrements of what it has ended (stepped_cuebot.py); in some of those
something moves before every swap, so that none succeeds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, cast

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from opencue_sched.accounting import keys
from opencue_sched.accounting.bootstrap import StoreState, ensure_bootstrapped, server_run_id, store_state
from opencue_sched.accounting.caps import load_caps, make_ledger, reseed_limits
from opencue_sched.accounting.epoch import Epoch
from opencue_sched.accounting.keys import Booking
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.accounting.recompute import follow_layers, recompute
from opencue_sched.accounting.show_handover import hand_back, hand_over
from opencue_sched.errors import NotReady
from opencue_sched.settings import Accounting as AccountingSettings
from tests.integration.accounting.judging import Judged
from tests.integration.accounting.plots import AFTER, ALL, BEFORE, DUAL_PLOTS, PLOTS, Plot
from tests.integration.accounting.stepped_booker import DEADLINE, Attempt, Booker
from tests.integration.accounting.stepped_cuebot import Cuebot
from tests.integration.accounting.stepped_disk import SteppedDisk
from tests.integration.accounting.stepped_farm import CAPS, SteppedFarm
from tests.integration.accounting.stepped_store import check_counters, grow_older, look
from tests.integration.accounting.stepping import Actor, Clock, SteppedRedis
from tests.kit.import_notes import pass_quarantines

AGE, TICK = 40.0, 60
DUAL_PASSES = 4
"""After how many more, at most, the counters of a dual store are its ledger's although no swap succeeds."""

Steps = int | str
"""How far an actor goes: so many boundaries, or to either side of its next COMMIT (a snapshot ends with one too)."""

pick = st.integers(0, 11)
few = st.integers(0, 2)
some_kind: Any = st.runner().flatmap(lambda game: st.sampled_from(game.kinds))
told_often = st.runner().flatmap(lambda game: st.sampled_from(game.plots or sorted(game.stories)))
steps = st.sampled_from([1, 2, 4, BEFORE, BEFORE, AFTER, AFTER, ALL, ALL, ALL])
bookings: dict[str, Any] = {
    "job": few,
    "host": st.sampled_from([0, 0, 1]),
    "cores": st.sampled_from([1, 1, 2]),
    "gpus": st.sampled_from([0, 0, 0, 1]),
    "many": st.integers(1, 2),
}
somebody = precondition(lambda self: any(actor.alive for actor in self.actors))
booked = precondition(lambda self: self.attempts or self.foreign)
MEDDLING = ("host", "host", "job", "job", "foreign", "foreign", "flip")
DISASTERS = ("crash", "crash", "clock", "lost", "stale", "disk")


class Accounting(Judged):
    """Bound to services by ``bind``, which also counts what was done."""

    plots: ClassVar[tuple[str, ...]] = ()
    kinds: ClassVar[tuple[str, ...]] = ("plain", "plain", "plain", "plain", "dual", "busy")

    @initialize(seeded=st.booleans(), kind=some_kind)
    def begin(self, seeded: bool, kind: str) -> None:
        """An open store; its caps are loaded, or will be when somebody books."""
        self.done["games"] += 1
        self.client.watched = {}
        if kind != "plain":
            self.cuebot = Cuebot(self.client, self.farm.vertex_keys, busy=kind == "busy")
        self.farm.reset()
        self.client.flushdb()
        self.client.sent.clear()
        self.client.set(keys.EPOCH, Epoch.new(server_run_id(self.client), dual=self.cuebot is not None).text)
        self.workers = [
            make_ledger(self.farm.engine, self.client, owner=f"worker{i}", accounting=AccountingSettings())
            for i in range(2)
        ]
        if seeded:
            self._reseed()
        for worker in self.workers:
            worker.epoch()

    # Processes start, go on, or do not

    @rule(**bookings, steps=steps)
    def book(self, job: int, host: int, cores: int, gpus: int, many: int, steps: Steps) -> None:
        vertices = self.farm.vertices(job, host)
        attempts = []
        for _ in range(many):
            booking = Booking(self._new_id(), vertices, cores, gpus, self.farm.machines[host])
            attempts.append(Attempt(booking, self.farm.next_frame(job), self.farm.hosts[host].id, self.clock.now))
        booker = Booker(self.farm, self.clock, self._worker(), attempts)
        actor = self._start("booker", booker.work)
        self.bookers.append(booker)
        for attempt in attempts:
            attempt.actor = actor
            self.attempts[attempt.booking.proc_id] = attempt
        self._advance(actor, steps)

    @rule(**bookings, steps=steps)
    def book_too(self, **how: Any) -> None:
        self.book(**how)

    @rule(only=st.sampled_from([None, None, 0, 1]), steps=steps)
    def recompute(self, only: int | None, steps: Steps) -> None:
        worker, shows = self._worker(), None if only is None else [self.farm.shows[only].id]
        if self._count("recompute") < 2:
            self._advance(self._start("recompute", lambda: self._recomputes(worker, shows)), steps)

    @rule(kind=st.sampled_from(sorted(CAPS)), which=few, choice=pick, announced=st.booleans(), steps=steps)
    def change_cap(self, kind: str, which: int, choice: int, announced: bool, steps: Steps) -> None:
        worker, key = self._worker(), self.farm.change_cap(kind, which, CAPS[kind][choice % len(CAPS[kind])])
        if announced and key is not None:
            self._advance(self._start("caps", lambda: load_caps(self.farm.engine, worker, [key])), steps)

    @rule(
        which=st.integers(1, 2),
        artists=st.integers(0, 2),
        hosts=st.sets(st.integers(0, 1)),
        announced=st.booleans(),
        steps=steps,
    )
    def report(self, which: int, artists: int, hosts: set[int], announced: bool, steps: Steps) -> None:
        """A licence server says who holds a limit."""
        names = [f"artist{number}" for number in range(artists)] + [self.farm.hosts[host].name for host in hosts]
        self._change_limit(self.farm.report(self.farm.limits[which], names), announced, steps)

    @rule(announced=st.booleans(), steps=steps)
    def change_type(self, announced: bool, steps: Steps) -> None:
        """A limit of machines becomes one of frames, or the reverse."""
        self._change_limit(self.farm.change_type(), announced, steps)

    def _change_limit(self, key: str | None, announced: bool, steps: Steps) -> None:
        """As a worker that is told: caps first, then the frames that run under the limit."""
        worker, layers = self._worker(), [job.layers[0].id for job in self.farm.jobs]

        def work() -> None:
            load_caps(self.farm.engine, worker, [key or ""])
            if worker.limits_lacking_machines([(key or "").removeprefix(keys.LIMIT_PREFIX)]):
                follow_layers(self.farm.engine, worker, layers)

        if announced and key is not None:
            self._advance(self._start("caps", work), steps)

    @rule(steps=steps)
    def reseed_caps(self, steps: Steps) -> None:
        if self._count("caps") < 2:
            self._advance(self._start("caps", self._reseed), steps)

    @precondition(lambda self: self.closed)
    @rule(steps=steps)
    def bootstrap(self, steps: Steps) -> None:
        worker = self._worker()
        if self._count("filler") < 2:
            self._advance(self._start("filler", lambda: self._fills(worker)), steps)

    @somebody
    @rule(who=pick, steps=steps)
    def advance(self, who: int, steps: Steps) -> None:
        for actor in self._picked(who):
            self._advance(actor, steps)

    @somebody
    @rule(who=pick, steps=steps)
    def advance_too(self, who: int, steps: Steps) -> None:
        self.advance(who, steps)

    @somebody
    @rule(who=pick)
    def lose_an_answer(self, who: int) -> None:
        """The next script calls are sent twice; the answer to the next COMMIT does not arrive."""
        for actor in self._picked(who):
            actor.twice = actor.deaf = True

    @precondition(lambda self: self.client.sent)
    @rule(which=st.integers(0, 99))
    def repeat_a_call(self, which: int) -> None:
        """Redis executes a call a second time, long after the first."""
        self.client.execute_command(*self.client.sent[-1 - which % len(self.client.sent)])

    # Procs end, and the word of it

    @booked
    @rule(which=pick, told=st.sampled_from([True, True, False]), tagged=st.sampled_from([False, False, True]))
    def end_a_proc(self, which: int, told: bool, tagged: bool = True) -> None:
        """``told``: its release comes at once, else whenever it is released. In a dual store, if not ``tagged``, it is
        a Cuebot that ends it and publishes a decrement."""
        live = sorted(self.farm.live())
        if live:
            proc_id = live[which % len(live)]
            booking = self.farm.booking(proc_id) if self.cuebot and not tagged else None
            self.releases += self.farm.delete(proc_id)
            if self.cuebot and booking:
                self.cuebot.due[proc_id] = booking
            if told:
                self.release(len(self.releases) - 1, "once")

    @booked
    @rule(which=pick, told=st.sampled_from([True, True, False]), tagged=st.sampled_from([False, False, True]))
    def end_another(self, **how: Any) -> None:
        self.end_a_proc(**how)

    @precondition(lambda self: self.releases)
    @rule(which=pick, fate=st.sampled_from(["once", "once", "again", "lost"]))
    def release(self, which: int, fate: str) -> None:
        proc_id = self.releases[which % len(self.releases)]
        if fate != "again":
            self.releases.remove(proc_id)
        if fate == "lost":
            return
        if self.cuebot and proc_id in self.cuebot.due:
            self.cuebot.publish(proc_id)
            self.client.used += 1
        elif self._ready(lambda: self._worker().release([proc_id])):
            self.buried.add(proc_id)

    # What people and machines do

    @rule(what=st.sampled_from(MEDDLING), a=few, b=few)
    def meddle(self, what: str, a: int, b: int) -> None:
        """A host goes to another allocation, a job to another folder, somebody else books, show b is handed over."""
        if what == "host":
            self.farm.move_host(a % 2, b % 2)
        elif what == "job":
            self.farm.move_job(a % 2, b % 2)
        elif what == "foreign":
            self.foreign.add(self._new_id())
            self.farm.insert_foreign(f"p{self.ids}", a, b % 2, 1)
        elif not self.disk.slow:
            self._flip()

    @rule(what=st.sampled_from(DISASTERS), who=pick)
    def disaster(self, what: str, who: int) -> None:
        """A process is killed, Redis TIME is set forward, Redis restarts empty or as it was at the last tick, the disk
        is slow for the next COMMIT or is no more."""
        if what == "crash":
            for actor in self._picked(who):
                actor.kill()
        elif what == "disk":
            self.disk.change(self.newest("booker"), self.attempts.values())
        elif what == "clock":
            self._grow_older()
        else:
            self.client.flushdb()
            kept = self.backup.items() if what == "stale" else ()
            for key, value in kept:
                self.client.restore(key, 0, value)

    def lease_ends(self) -> None:
        """Nobody has renewed the lease of whoever fills the store."""
        self.client.delete(keys.BOOTSTRAP_LEASE)

    @rule(stalled=st.sampled_from([False, False, True]))
    def tick(self, stalled: bool) -> None:
        """More than an age passes. Who sleeps wakes up, unless ``stalled``: then everybody was stopped meanwhile."""
        waiting = any(a.name == "filler" and a.asleep_until > self.clock.now + 1 for a in self.actors if a.alive)
        if stalled or not waiting:
            self.lease_ends()
        self._pass_time()
        self.backup = self._backup()
        for actor in self.actors if not stalled else ():
            if actor.boundary == "sleep":
                self._advance(actor, ALL)

    @rule(plot=told_often, **bookings)
    def plot(self, plot: str, **how: Any) -> None:
        """A story that is seldom told by chance."""
        for _ in (PLOTS | DUAL_PLOTS)[plot](self, how):
            self._judge()

    @property
    def stories(self) -> dict[str, Plot]:
        return DUAL_PLOTS if self.cuebot else PLOTS

    def _pass_time(self) -> None:
        self.client.delete(keys.AUDIT)
        self._grow_older()
        self.clock.now += TICK
        self.farm.end_transactions([a.backend for a in self.attempts.values() if a.backend])

    def _grow_older(self) -> None:
        grow_older(self.client, TICK)
        if self.cuebot:
            self.cuebot.time_passes(TICK)

    def teardown(self) -> None:
        """Everybody dies, every message is lost; two recomputes later the ledger is the proc table.

        Where no swap succeeds the counters follow by and by: a decrement that was lost is made up for after its grace,
        and one for nothing given back, each at the end of a pass and after that of what it waits for.
        """
        for actor in self.actors:
            actor.kill()
        self.disk.answer()
        if not hasattr(self, "workers"):
            return
        self._judge()
        self._pass_time()
        self.lease_ends()
        ledger = self.workers[0]
        with suppress(NotReady):
            ledger.learn_epoch()
        if store_state(self.client) is not StoreState.OPEN:
            self._fills(ledger, wait_age=0)
        self._recomputes(ledger)
        if self._off():
            self._pass_time()
            self._recomputes(ledger)
        off = self._off()
        assert not off, f"ledger and proc table differ after two recomputes: {off}"
        if self.cuebot:
            self._follows(ledger)

    def _follows(self, ledger: Ledger) -> None:
        """The counters of a dual store become the ledger's."""
        seen = look(self.client, self.farm.vertex_keys)
        for _ in range(DUAL_PASSES):
            if seen.counters == seen.ours:
                return
            self._pass_time()
            self._recomputes(ledger)
            seen = look(self.client, self.farm.vertex_keys)
        check_counters(seen.counters, seen.ours, "in the end its entries")

    # How it is done

    def _new_id(self) -> str:
        self.ids += 1
        return f"p{self.ids}"

    def _worker(self) -> Ledger:
        """One of two processes, in turn: each has learnt the epoch at its own time."""
        self.workers.reverse()
        return self.workers[0]

    def _start(self, name: str, work: Callable[[], object]) -> Actor:
        def until_not_ready() -> None:
            if not self._ready(work) and name == "booker" and self._count("filler") < 2:
                filler = self._worker()
                self._start("filler", lambda: self._fills(filler))

        actor = Actor(name, until_not_ready)
        self.actors.append(actor)
        return actor

    def newest(self, name: str) -> Actor | None:
        """The last of that name that is alive."""
        return next((actor for actor in reversed(self.actors) if actor.name == name and actor.alive), None)

    def go_on(self, actor: Actor | None, steps: Steps = ALL, *, until: str = "", during: str = "") -> None:
        """Let an actor do so much more; or up to, or as long as it does, such a thing."""
        if actor is None:
            return
        if not (until or during):
            self._advance(actor, steps)
        while (until and actor.boundary != until) or (during and actor.boundary == during):
            if actor.asleep_until > self.clock.now or not actor.step():
                break

    def _advance(self, actor: Actor, steps: Steps) -> None:
        for _ in range(steps if isinstance(steps, int) else ALL):
            committing = actor.boundary == "COMMIT"
            if actor.asleep_until > self.clock.now or (steps == BEFORE and committing):
                break
            if not actor.step() or (steps == AFTER and committing):
                break

    def _picked(self, who: int) -> list[Actor]:
        """One of those that are alive, if any is."""
        self.actors = [actor for actor in self.actors if actor.alive]
        return [self.actors[who % len(self.actors)]] if self.actors else []

    def _count(self, name: str) -> int:
        return sum(actor.name == name and actor.alive for actor in self.actors)

    def _ready(self, call: Callable[[], object]) -> bool:
        try:
            call()
        except NotReady:
            return False
        return True

    def _recomputes(self, ledger: Ledger, shows: list[str] | None = None) -> None:
        how: dict[str, Any] = {"age_seconds": AGE, "clock": self.clock.monotonic, "write_tables": False}
        retries = 0 if self.cuebot and self.cuebot.busy else 1
        recompute(self.farm.engine, ledger, shows, cas_max_retries=retries, **how)

    def _fills(self, ledger: Ledger, wait_age: float = AGE) -> None:
        dual = self.cuebot is not None
        ensure_bootstrapped(self.farm.engine, ledger, dual=dual, wait_age=wait_age, sleep=self.clock.sleep)

    def _reseed(self) -> None:
        reseed_limits(self.farm.engine, self._worker(), [show.id for show in self.farm.shows])

    def _flip(self) -> None:
        """Show b goes to Cuebot, or comes back, by our command."""
        show = self.farm.shows[1].id

        def sleep(_: float) -> None:
            self.tick(stalled=False)
            pass_quarantines(self.client)

        run: dict[str, Any] = {"age_seconds": AGE, "sleep": sleep}
        if self.farm.managed(1):
            hand_back(self.farm.engine, self._worker(), show, wait_seconds=DEADLINE, **run)
            self.foreign |= {i for i, of in self.farm.live().items() if of == show}
        elif hand_over(self.farm.engine, self._worker(), show, wait_seconds=30, **run).store_ready:
            self.foreign -= {i for i, of in self.farm.live().items() if of == show and i in self.attempts}

    def _backup(self) -> dict[str, bytes]:
        spared = (keys.EPOCH, keys.BOOTSTRAP_LEASE, keys.AUDIT, keys.AUDIT_LOG)
        found = [key for key in cast("list[str]", self.client.keys(keys.EVERYTHING)) if key not in spared]
        with self.client.pipeline(transaction=False) as pipe:
            for key in found:
                pipe.dump(key)
            return dict(zip(found, pipe.execute(), strict=True))


def bind(farm: SteppedFarm, disk: SteppedDisk, client: SteppedRedis, clock: Clock) -> type[Accounting]:
    """The machine on these services."""
    done = dict.fromkeys(("games", "steps", "accepted"), 0)
    services = {"farm": farm, "disk": disk, "client": client, "clock": clock}
    bound = type("BoundAccounting", (Accounting,), {**services, "done": done})
    return cast("type[Accounting]", bound)
