"""Filling the counters: always before the first booking of a fleet, and after Redis was lost.

A store is *open* when ``acct:epoch`` names this very Redis process. It is not open when it is empty, when Redis was
restarted or failed over (accounting.epoch deletes such an epoch), when another program damaged its keys
(accounting.damage closes it), or while a bootstrap fills it; then every script answers not_ready and nobody books. One
process fills, under a lease; its writes carry the filling epoch, so that a filler that lost its lease in a pause is
refused by the scripts themselves.

After a loss the store stays closed for one age before its filler takes a snapshot: by then nothing that was booked
before can still be committed, so the proc table is the whole truth. The successor of a filler that died waits as long.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import TypeVar, cast

import redis
import structlog
from sqlalchemy import Engine

from opencue_sched.accounting import keys
from opencue_sched.accounting.age_marks import DEFAULT_AGE_SECONDS
from opencue_sched.accounting.caps import cap_rows_of_shows, reseed_limits
from opencue_sched.accounting.damage import close_if_damaged
from opencue_sched.accounting.epoch import Epoch
from opencue_sched.accounting.imported_shows import note_imported
from opencue_sched.accounting.ledger import Ledger, answering, epoch_set_call, id_calls, stored_epoch
from opencue_sched.accounting.recompute import additions, entries_of, may_still_commit, recompute
from opencue_sched.clients.lua_scripts import call_script, call_scripts, chunks
from opencue_sched.clients.postgres import ask, repeatable_read
from opencue_sched.errors import InvalidInput, NotReady, StoreDamaged
from opencue_sched.store import accounting as store

log = structlog.get_logger(__name__)
_T = TypeVar("_T")

LEASE_SECONDS = 15.0
"""Lease of a process that fills the counters.

With 100,000 procs half a second passed between renewals at most, a second and a half on a machine
four times overloaded; one that is slower than its lease is interrupted by the next, which may be as slow."""
_POLL_SECONDS = 0.25
"""The time between two looks of a process that waits for the filler. It books nothing meanwhile, so a longer time is
lost as a whole; a look is one round trip to Redis."""
_RENEWAL_SECONDS = 2.0
"""The time between two renewals of the lease by a process that waits: several of them may fail within LEASE_SECONDS."""
ROWS_PER_RENEWAL = 2000
"""How many rows or entries are handled before the lease is renewed. With more, a slow machine may lose the lease
between two renewals; with fewer, filling takes more round trips."""
_SCAN_COUNT = 1000
"""How many keys one step of a SCAN looks at."""


class StoreState(StrEnum):
    """``LOST``: no epoch, or one of another Redis process. ``FILLING``: a bootstrap is under way, or died."""

    OPEN = "open"
    FILLING = "filling"
    LOST = "lost"


class Action(StrEnum):
    """What ensure_bootstrapped did: found the store open, waited for another filler, reconciled, or filled it."""

    VERIFIED = "verified"
    WAITED = "waited"
    RECONCILED = "reconciled"
    FILLED = "filled"


def store_state(client: redis.Redis) -> StoreState:
    """Whether the store may be booked in. Raises NotReady when Redis does not answer."""
    stored = stored_epoch(client)
    if stored is None or Epoch(stored).run_id != server_run_id(client):
        return StoreState.LOST
    return StoreState.OPEN if Epoch.parse(stored) else StoreState.FILLING


def server_run_id(client: redis.Redis) -> str:
    """The id of the Redis process itself: another one after every restart and failover."""
    with answering(client):
        return str(cast("dict[str, object]", client.info("server"))["run_id"])


def ensure_bootstrapped(
    engine: Engine,
    ledger: Ledger,
    *,
    fleet_start: bool = False,
    dual: bool = False,
    wait_age: float = DEFAULT_AGE_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
) -> Action:
    """Return when the store may be booked in. Blocks while it is filled, by this process or another.

    ``fleet_start``: no other worker is alive, so caps and ledger are reconciled even though an epoch is there.
    ``dual``: release_feed is cuebot-redis. ``wait_age`` is accounting.in_flight_age, seconds.
    """
    started = time.monotonic()
    filler = _Filler(engine, ledger, dual=dual, wait_age=wait_age, sleep=sleep)
    action = Action.VERIFIED
    while True:
        with answering():
            close_if_damaged(ledger.client)
        state = store_state(ledger.client)
        with answering(ledger.client):
            others_done = action is Action.WAITED and not ledger.client.exists(keys.BOOTSTRAP_LEASE)
        if state is StoreState.OPEN and (others_done or not fleet_start):
            if ledger.learn_epoch().dual != dual:
                raise InvalidInput(
                    "accounting.release_feed differs from the running fleet's: cuebot-redis needs every worker to use "
                    "it. Stop all workers before changing it."
                )
            return action
        with filler as leading:
            if leading:
                done = filler.reconcile() if state is StoreState.OPEN else filler.fill()
                if done is not None:
                    log.info("bootstrapped", action=done, seconds=time.monotonic() - started)
                    return done
                continue
        action = Action.WAITED
        sleep(_POLL_SECONDS)


class _Filler:
    """One process's attempt to fill or reconcile the store, under the bootstrap lease."""

    def __init__(
        self, engine: Engine, ledger: Ledger, *, dual: bool, wait_age: float, sleep: Callable[[float], None]
    ) -> None:
        self._engine = engine
        self._ledger = ledger
        self._client = ledger.client
        self._dual = dual
        self._age = wait_age
        self._sleep = sleep
        self._token = f"{ledger.owner}|{uuid.uuid4().hex}"

    def __enter__(self) -> bool:
        return self._take()

    def __exit__(self, *_: object) -> None:
        with answering(self._client):
            call_script(self._client, "lease_drop", [keys.BOOTSTRAP_LEASE], [self._token])

    def reconcile(self) -> Action | None:
        """The fleet starts on an open store: caps and ledger are brought up to date, nothing is rebuilt. None when the
        store turns out to be damaged: then it is closed."""
        if self._ledger.learn_epoch().dual != self._dual and (filled := self.fill(close_open=True)):
            return filled
        try:
            reseed_limits(self._engine, self._ledger)
            recompute(self._engine, self._ledger, age_seconds=self._age)
        except StoreDamaged:
            return None
        return Action.RECONCILED

    def fill(self, *, close_open: bool = False) -> Action | None:
        """Fill the store and open it; None when another process does, or has opened it meanwhile."""
        run_id = server_run_id(self._client)
        if not self._take():
            return None
        stored = Epoch(stored_epoch(self._client) or "")
        if Epoch.parse(stored.text) and stored.run_id == run_id and not close_open:
            return None
        filling = Epoch.new(run_id, dual=self._dual, state="filling")
        if not self._replace(stored, filling):
            return None
        known = ask(self._engine, store.managed_show_versions)
        log.warning("store_closed", reason="its counters are filled from PostgreSQL", waits_seconds=self._age)
        self._wait()
        self._wipe(filling)
        with repeatable_read(self._engine) as connection:
            version = store.caps_version(connection)
            entries = entries_of(self._renewing(store.procs(connection), every=ROWS_PER_RENEWAL))
            imported = store.managed_show_versions(connection)
            rows = cap_rows_of_shows(connection, self._ledger, imported, imported)
        for part in self._renewing(chunks(rows, ROWS_PER_RENEWAL)):
            self._ledger.write_caps(version, part, epoch=filling)
        for changes in self._renewing(chunks(additions(entries), ROWS_PER_RENEWAL)):
            self._ledger.apply(changes, epoch=filling)
        opened = Epoch.new(run_id, dual=self._dual)
        if not self._replace(filling, opened):
            return None
        self._ledger.learn_epoch()
        with answering(self._client):
            self._client.set(keys.RECOMPUTED_AT, self._client.time()[0])
        # A Cuebot may still take a show that was handed over meanwhile for its own: such a show is left to the worker
        # that would book there, which imports it.
        note_imported(self._client, {show: version for show, version in imported.items() if known.get(show) == version})
        return Action.FILLED

    def _wait(self) -> None:
        """Wait until the store has been closed for an age and PostgreSQL has ended every earlier COMMIT, and keep the
        lease meanwhile."""
        # The wait is measured by a clock of this machine, because Redis TIME may jump. It begins after the store was
        # closed, because others booked until then.
        open_again = time.monotonic() + self._age
        while (left := open_again - time.monotonic()) > 0:
            self._renew()
            self._sleep(min(left, _RENEWAL_SECONDS))
        while may_still_commit(self._engine, self._age):
            self._renew()
            self._sleep(_RENEWAL_SECONDS)
        self._renew()

    def _wipe(self, filling: Epoch) -> None:
        """Drop what an older process of Redis left (a stale replica, say). Raises NotReady when we were overtaken."""
        spared = {keys.EPOCH, keys.SEQ, keys.BOOTSTRAP_LEASE}
        with answering(self._client):
            stored = set(self._client.scan_iter(match=keys.EVERYTHING, count=_SCAN_COUNT))
        for part in chunks(list(stored - spared), _SCAN_COUNT):
            self._ledger.call_under(id_calls("free", part, filling.text, "all"))

    def _replace(self, seen: Epoch, wanted: Epoch) -> bool:
        """Put another epoch in the place of the one that was seen; returns whether that was still there."""
        with answering(self._client):
            (answer,), _ = call_scripts(self._client, [epoch_set_call(seen.text, wanted.text)])
        return int(answer) == 1

    def _take(self) -> bool:
        """Take the lease, or renew the one that this process has; returns whether it has the lease now."""
        arguments: list[str | int] = [self._token, round(LEASE_SECONDS * 1000)]
        with answering(self._client):
            return bool(call_script(self._client, "lease_take", [keys.BOOTSTRAP_LEASE], arguments))

    def _renew(self) -> None:
        """Keep the lease; take it again if it ran out on a slow machine and no other process has it now.

        A process that had it in between has made another filling epoch, so the scripts refuse what we write.
        """
        if not self._take():
            raise NotReady("the bootstrap lease was lost in a pause; another process goes on")

    def _renewing(self, steps: Iterable[_T], *, every: int = 1) -> Iterator[_T]:
        """Yield the steps of some work; the lease is renewed before the first step, then before one in ``every``."""
        for number, step in enumerate(steps):
            if number % every == 0:
                self._renew()
            yield step
