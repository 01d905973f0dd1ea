"""Layers whose memory is lowered when runs end, while another transaction changes them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from sqlalchemy import Engine, text

from opencue_sched.domain.jobs import MEMORY_FLOOR_KB
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.store.release import record_runs
from tests.kit.runs import FarmView

ASKED_KB = 4 * 1_048_576
PEAK_KB = 600_000
LOWERED_KB = PEAK_KB + MEMORY_FLOOR_KB


@pytest.fixture
def layers(view: FarmView) -> list[str]:
    """The ids of three layers that ask for 4 GB each, in their order."""
    with view.farm() as farm:
        farm.job([LayerSpec(memory_gb=4)] * 3)
    return [row.pk_layer for row in view.rows("SELECT pk_layer FROM layer ORDER BY pk_layer")]


def asked(view: FarmView) -> list[int]:
    """What the layers ask for, in the order of their ids."""
    return [row.int_mem_min for row in view.rows("SELECT int_mem_min FROM layer ORDER BY pk_layer")]


@contextmanager
def changed_meanwhile(engine: Engine, view: FarmView, layer: str, change: str, peaks: dict[str, int]) -> Iterator[None]:
    """While another transaction that changes the layer is open, and is waited for, runs with these peaks end; after
    it their transaction is committed."""

    def end() -> None:
        with engine.begin() as connection:
            record_runs(connection, [], [], peaks)

    with ThreadPoolExecutor(1) as threads:
        with engine.begin() as other:
            other.execute(text(f"UPDATE layer SET {change} WHERE pk_layer = :layer"), {"layer": layer})  # noqa: S608
            ended: Future[None] = threads.submit(end)
            view.wait_for_waiters(1)
            yield
        ended.result()


def test_layers_are_locked_in_the_order_of_their_ids(engine: Engine, view: FarmView, layers: list[str]) -> None:
    # Given runs of three layers that end, the last one named first, where another transaction changes the second
    peaks = dict.fromkeys(reversed(layers), PEAK_KB)
    with changed_meanwhile(engine, view, layers[1], "str_name = 'other'", peaks):
        # When that is waited for
        free = view.rows("SELECT pk_layer FROM layer FOR NO KEY UPDATE SKIP LOCKED")
    # Then the first layer was locked by then, the third was not
    assert [row.pk_layer for row in free] == layers[2:]
    assert asked(view) == [LOWERED_KB] * 3


@pytest.mark.parametrize(
    ("change", "after"),
    [
        pytest.param("b_optimize = false", ASKED_KB, id="to be lowered no more"),
        pytest.param("int_mem_min = 700000", 700_000, id="lowered further"),
        pytest.param("int_mem_min = 2000000", LOWERED_KB, id="lowered less"),
        pytest.param("str_name = 'other'", LOWERED_KB, id="another column"),
    ],
)
def test_a_layer_is_judged_by_what_it_asks_for_after_the_wait(
    engine: Engine, view: FarmView, layers: list[str], change: str, after: int
) -> None:
    # Given a layer that another transaction changes while runs of it end
    with changed_meanwhile(engine, view, layers[1], change, dict.fromkeys(layers, PEAK_KB)):
        pass
    # Then it is lowered if that is still allowed and still lowers it, and the others are in any case
    assert asked(view) == [LOWERED_KB, after, LOWERED_KB]


def test_a_layer_that_asks_for_no_more_than_its_frames_use_is_not_waited_for(
    engine: Engine, view: FarmView, layers: list[str]
) -> None:
    # Given a layer that asks for little, which another transaction changes
    view.run_sql("UPDATE layer SET int_mem_min = 700000 WHERE pk_layer = :layer", layer=layers[1])
    with engine.begin() as other, engine.begin() as connection:
        other.execute(text("UPDATE layer SET str_name = 'other' WHERE pk_layer = :layer"), {"layer": layers[1]})
        # When runs of it end, with no time to wait
        connection.execute(text("SET LOCAL lock_timeout = 1"))
        record_runs(connection, [], [], dict.fromkeys(layers, PEAK_KB))
    # Then they do, and the other layers are lowered
    assert asked(view) == [LOWERED_KB, 700_000, LOWERED_KB]
