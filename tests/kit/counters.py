"""A store that may be booked in, and the vertices to book against."""

from __future__ import annotations

import uuid
from collections.abc import Collection
from dataclasses import replace

import redis

from opencue_sched.accounting import keys
from opencue_sched.accounting.bootstrap import server_run_id
from opencue_sched.accounting.epoch import Epoch
from opencue_sched.accounting.keys import Booking
from opencue_sched.accounting.ledger import Change, Ledger
from opencue_sched.domain.caps import Vertices

VERTICES = Vertices("show", "alloc", "folder", "job", "layer", "dept")


def booking(
    cores: int = 1, gpus: int = 0, *, proc_id: str | None = None, machine: str = "", **changed: object
) -> Booking:
    """A booking with a new id; ``changed`` replaces vertices."""
    vertices = replace(VERTICES, **changed)  # type: ignore[arg-type]
    return Booking(proc_id or str(uuid.uuid4()), vertices, cores, gpus, machine)


class Store:
    """A Redis store under test: its client, a ledger on it, and short ways to write caps and read counters."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.ledger = Ledger(client, owner="test")
        self._version = 1

    def open(self, *, dual: bool = False) -> Epoch:
        epoch = Epoch.new(server_run_id(self.client), dual=dual)
        self.client.set(keys.EPOCH, epoch.text)
        self.ledger.learn_epoch()
        return epoch

    def caps(self, key: str, **fields: object) -> None:
        self._version += 1
        row = (key, [str(text) for pair in fields.items() for text in pair])
        self.ledger.write_caps(f"test|{self._version}", [row])

    def seed(self, *, burst: object = 1000, folder: object = -1, job: object = -1, **gpus: object) -> None:
        """Caps of VERTICES. GPUs: ``folder_gpus``, ``job_gpus``."""
        self.caps(keys.subscription("show", "alloc"), size=burst, burst=burst)
        self.caps(keys.folder("folder"), int_max_cores=folder, int_max_gpus=gpus.get("folder_gpus", -1))
        self.caps(keys.job("job"), int_max_cores=job, int_max_gpus=gpus.get("job_gpus", -1))

    def limit(self, limit_id: str, value: int, foreign: int = 0) -> None:
        self.caps(keys.limit(limit_id), int_max_value=value, int_foreign=foreign)

    def seats(
        self,
        limit_id: str,
        most: int,
        others: Collection[str] = (),
        *,
        terms: str = "HOST",
        maximum: int | None = None,
        after: int | None = None,
        past: Collection[str] = (),
    ) -> None:
        """A limit that ``most`` machines may hold (-1: any number); ``others`` hold it by what the ledger has not, and
        ``past`` without counting. ``after``: it was reported, and what was booked later counts beside the report."""
        self._version += 1
        limit = most if maximum is None else maximum
        fields: list[str | list[str]] = ["int_max_value", str(max(0, limit)), "int_foreign", "0"]
        fields += ["int_machines", str(most), "terms", terms, "after", "" if after is None else str(after)]
        self.ledger.write_caps(f"test|{self._version}", [(keys.limit(limit_id), [*fields, list(others), list(past)])])

    def frames(self, limit_id: str, most: int, settled: int = 0, after: int | None = None) -> None:
        """A limit of ``most`` frames (-1: any number) of which a licence server has reported ``settled``: what was
        booked later than ``after`` counts beside that. Without ``after`` it was never reported."""
        reported = {"terms": "FRAME reported", "int_frames": most, "int_settled": settled, "after": after}
        plain = {"terms": "", "int_frames": "", "int_settled": "", "after": ""}
        rest = plain if after is None else reported
        self.caps(keys.limit(limit_id), int_max_value=max(0, most), int_foreign=0, int_machines="", **rest)

    def age(self, proc_id: str, seconds: int) -> None:
        """As if a proc had been booked so long before: its entry is put aside with another time, and back."""
        (record,) = self.ledger.records_of([proc_id])
        parts = str(self.client.hget(keys.LEDGER, proc_id)).split("|", 3)
        parts[2] = str(record.booked_at - seconds)
        self.client.hset(keys.LEDGER, proc_id, "|".join(parts))
        for entry in (record.entry.rpartition("|")[0] + "|", record.entry):
            (now,) = self.ledger.records_of([proc_id])
            change = Change(proc_id, now.changed_seq, entry, now.state)
            self.ledger.apply([change], epoch=self.ledger.epoch())

    def now(self) -> int:
        """Redis TIME in seconds."""
        return int(self.client.time()[0])

    def machines(self, limit_id: str) -> set[str]:
        """The machines on which the ledger has frames under the limit."""
        return set(self.client.zrangebyscore(keys.MACHINES_PREFIX + limit_id, "(0", "+inf"))  # type: ignore[arg-type]

    def counter(self, key: str) -> tuple[int, int]:
        cores, gpus = self.client.hmget(key, "int_cores", "int_gpus")  # type: ignore[misc]
        return int(cores or 0), int(gpus or 0)

    def running(self, limit_id: str) -> int:
        return int(self.client.hget(keys.limit(limit_id), "int_running") or 0)  # type: ignore[arg-type]

    def seq(self) -> int:
        return int(self.client.get(keys.SEQ) or 0)  # type: ignore[arg-type]

    def ids(self) -> set[str]:
        return set(self.client.hkeys(keys.LEDGER))  # type: ignore[arg-type]
