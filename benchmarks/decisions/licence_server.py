"""The licence servers of a scenario: they grant and deny seats, and say every few seconds who holds them.

The farm's frames ask when they are found running, and give back when they end; artists take what is free. Nothing here
reads what the scheduler counts.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Self

from sqlalchemy import Engine, text

from benchmarks.decisions.record import Layer
from benchmarks.decisions.scenario import Licence
from opencue_sched.reports.limit_reports import Holder, report_limits
from opencue_sched.store import shows

REPORT_SECONDS = 4.0
SETTLE_WINDOW_SECONDS = 10.0
"""What `accounting.limit_settle_window_seconds` is in every scenario."""

_LIMIT = text("SELECT pk_limit_record FROM limit_record WHERE str_name = :name")


class LicenceServer:
    """All licensed products of a scenario. Use it as a context manager: it reports from the beginning to the end.

    ``seated`` and ``denials`` are what happened so far, with the time in epoch seconds: product, seats of the farm and
    of artists; product and layer. ``reports`` are those that were taken: when the server was asked, and the product.
    ``reporting``: whether reports are sent.
    """

    def __init__(self, engine: Engine, products: Mapping[str, Licence]) -> None:
        self._engine = engine
        self._products = {name: licence for name, licence in products.items() if licence.seats is not None}
        self._lock = threading.Lock()
        self._held: dict[str, tuple[str, tuple[str, ...]]] = {}
        """Host and products of each proc that was granted. Under the lock, as all that follows."""
        self._denied: dict[str, int] = {}
        self._on_hosts: dict[str, Counter[str]] = {name: Counter() for name in self._products}
        """Frames that were granted each product, by host."""
        self._artists = dict.fromkeys(self._products, 0)
        self.seated: list[tuple[float, str, int, int]] = []
        self.denials: list[tuple[float, str, str]] = []
        self.reports: list[tuple[float, str]] = []
        self.reporting = True
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="licence-server", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def ask(self, proc_id: str, host: str, layer: Layer) -> bool:
        """A frame wants a seat of each product of its layer; whether it got them. All or none."""
        products = tuple(name for name in layer.licences if name in self._products)
        with self._lock:
            for name in products:
                if not self._serves(name, host):
                    self.denials.append((time.time(), name, layer.id))
                    self._denied[proc_id] = self._products[name].exit_status or 1
                    return False
            self._held[proc_id] = host, products
            for name in products:
                self._on_hosts[name][host] += 1
                self._note(name)
        return True

    def give_back(self, proc_id: str) -> int:
        """A frame ends; the exit status of one that was denied, 0 of any other."""
        with self._lock:
            host, products = self._held.pop(proc_id, ("", ()))
            for name in products:
                self._on_hosts[name][host] -= 1
                self._note(name)
            return self._denied.get(proc_id, 0)

    def artists_come(self, product: str, count: int) -> None:
        """So many artists take a seat each, if it is free."""
        with self._lock:
            seats = self._products[product].seats or 0
            self._artists[product] += max(0, min(count, seats - self._farms(product) - self._artists[product]))
            self._note(product)

    def artists_go(self, product: str) -> None:
        """Each artist who has a seat gives it back."""
        with self._lock:
            self._artists[product] = 0
            self._note(product)

    def set_most(self, product: str, most: int) -> None:
        """Another maximum of the limit, as `limit set` writes it."""
        with self._engine.begin() as connection:
            limit_id = connection.execute(_LIMIT, {"name": product}).scalar_one()
            shows.set_rows(connection, "limit_record", "pk_limit_record", [limit_id], {"int_max_value": most})

    def _serves(self, product: str, host: str) -> bool:
        licence = self._products[product]
        if licence.machines and self._on_hosts[product][host] > 0:
            return True
        return self._farms(product) + self._artists[product] < (licence.seats or 0)

    def _farms(self, product: str) -> int:
        held = self._on_hosts[product]
        return len(+held) if self._products[product].machines else held.total()

    def _note(self, product: str) -> None:
        self.seated.append((time.time(), product, self._farms(product), self._artists[product]))

    # What is told of it

    def _tell(self) -> None:
        due = time.monotonic()
        while not self._stopping.wait(max(0.0, due - time.monotonic())):
            due += REPORT_SECONDS
            if self.reporting:
                self._report()
            for product, licence in self._products.items():
                if licence.set_to_free and self.reporting:
                    self._set_to_free(product, licence)

    def _report(self) -> None:
        held: dict[str, list[Holder]] = {}
        with self._lock:
            asked_at = datetime.now(UTC)
            for product in (name for name, licence in self._products.items() if licence.reported):
                farm = [Holder(host, tokens, "farm") for host, tokens in (+self._on_hosts[product]).items()]
                artists = [Holder(f"artist{number}", 1, "artist") for number in range(self._artists[product])]
                held[product] = farm + artists
        if not held:
            return
        for said in report_limits(self._engine, held, asked_at=asked_at, source="benchmark"):
            if said.outcome == "taken":
                self.reports.append((asked_at.timestamp(), said.limit))

    def _set_to_free(self, product: str, licence: Licence) -> None:
        """As a script does that knows how many seats are free and how many the farm has."""
        with self._lock:
            others = self._artists[product]
        self.set_most(product, (licence.seats or 0) - others - licence.spare)
