"""A farm whose wide layer waits beside narrow ones, and the hosts that are reserved for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, text

from opencue_sched.dispatch.reservations import ReservationReport, keep_reservations
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostIds, LayerSpec
from opencue_sched.settings import Settings
from opencue_sched.store.schema import check_schema
from tests.kit.gathering import live_use

CORES = 16


def with_queue(settings: Settings, **queue: Any) -> Settings:
    return settings.model_copy(update={"queue": settings.queue.model_copy(update=queue)})


def run_reservation_task(engine: Engine, settings: Settings, **leader: Any) -> ReservationReport:
    with engine.connect() as connection:
        facts = check_schema(connection)
    return keep_reservations(engine, settings, facts, lambda _: live_use(engine), **leader)


@dataclass
class WideFarm:
    """Hosts of 16 cores that are full of frames of four cores, in the order of their names, and a job that waits with
    a layer of frames of ``wide`` cores."""

    engine: Engine
    settings: Settings
    made_hosts: list[HostIds]
    wide: str
    job: str
    narrow: str

    @classmethod
    def made(
        cls, engine: Engine, settings: Settings, *, hosts: int = 4, cores: float = 12, frames: int = 3, **job: Any
    ) -> WideFarm:
        with engine.begin() as connection:
            farm = Farm(connection)
            made = [
                farm.host(name=f"h{number}", cores=CORES, memory_gb=64, hostname_tag=False) for number in range(hosts)
            ]
            per_host = CORES // 4
            busy = farm.job([LayerSpec(frames=hosts * per_host + 20, cores=4, name="narrow")], name="busy")
            waits = farm.job([LayerSpec(frames=frames, cores=cores, name="wide")], name="waits", **job)
        here = cls(engine, settings, made, waits.layers[0].id, waits.id, busy.layers[0].id)
        for number, host in enumerate(made):
            here.fill(host.id, busy.layers[0].frames[number * per_host : (number + 1) * per_host])
        return here

    @property
    def hosts(self) -> list[str]:
        """The ids of the hosts."""
        return [host.id for host in self.made_hosts]

    def fill(self, host_id: str, frames: Sequence[str], *, cores: int = 4) -> None:
        """The frames have run on the host for a minute."""
        (host,) = (host for host in self.made_hosts if host.id == host_id)
        with self.engine.begin() as connection:
            procs = Farm(connection).run(frames, host, cores=cores)
            connection.execute(
                text(
                    "UPDATE proc SET ts_booked = ts_booked - interval '1 minute',"
                    " ts_dispatched = ts_dispatched - interval '1 minute' WHERE pk_proc = ANY(:procs)"
                ),
                {"procs": procs},
            )
            connection.execute(
                text("UPDATE frame SET ts_started = now() - interval '1 minute' WHERE pk_frame = ANY(:frames)"),
                {"frames": list(frames)},
            )

    def execute(self, sql: str, **parameters: Any) -> None:
        with self.engine.begin() as connection:
            connection.execute(text(sql), parameters)

    def rows(self, sql: str, **parameters: Any) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(text(sql), parameters))

    def drained(self, host: str) -> None:
        """Everything on the host has ended."""
        self.execute(
            "UPDATE frame SET str_state = 'SUCCEEDED' FROM proc WHERE proc.pk_frame = frame.pk_frame AND pk_host = :h",
            h=host,
        )
        self.execute("DELETE FROM proc WHERE pk_host = :h", h=host)
        self.execute("UPDATE host SET int_cores_idle = int_cores, int_mem_idle = int_mem WHERE pk_host = :h", h=host)

    def history(self, layer: str, seconds: float) -> None:
        """Frames of the layer have run so long."""
        self.execute(
            "UPDATE layer_usage SET int_frame_success_count = 10, int_clock_time_success = :seconds"
            " WHERE pk_layer = :layer",
            seconds=round(10 * seconds),
            layer=layer,
        )

    def keep(self, **leader: Any) -> ReservationReport:
        return run_reservation_task(self.engine, self.settings, **leader)

    def blocked(self, seconds: float, layer: str | None = None) -> None:
        """As if the layer had been blocked for so long, until now."""
        self.keep()
        self.execute(
            "UPDATE opencue_sched_blocked SET seconds = :seconds, seen = clock_timestamp() WHERE pk_layer = :layer",
            seconds=seconds,
            layer=layer or self.wide,
        )

    def asks(self) -> ReservationReport:
        """The layer has been blocked for the block time, and the reservation task sees it."""
        self.blocked(self.settings.queue.reservation_block_time)
        return self.keep()

    def blocked_seconds(self, layer: str | None = None) -> float | None:
        rows = self.rows("SELECT seconds FROM opencue_sched_blocked WHERE pk_layer = :layer", layer=layer or self.wide)
        return rows[0].seconds if rows else None

    def reservations(self) -> dict[str, Any]:
        """The rows of reservations by host, with how many seconds they live and until the host is free."""
        found = self.rows(
            """
            SELECT *, extract(epoch FROM until - clock_timestamp()) AS lives,
                   extract(epoch FROM free_at - clock_timestamp()) AS free_in
            FROM opencue_sched_hold
            """
        )
        return {row.pk_host: row for row in found}
