"""Fixtures: simulated hosts, and connections to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from opencue_sched.embedded.rqds.simulated_rqd import SimulatedFarm, host_specs
from opencue_sched.rqd.channels import RqdChannels
from opencue_sched.settings import Rqd


@pytest.fixture
def farm() -> Iterator[SimulatedFarm]:
    """Three hosts of 8 cores, sim0001 to sim0003, whose frames run until they are ended."""
    with SimulatedFarm(host_specs(3, cores=8)) as farm:
        farm.behave(hang_ratio=1.0)
        yield farm


@pytest.fixture
def connect(farm: SimulatedFarm) -> Iterator[Callable[..., RqdChannels]]:
    """Makes RqdChannels to the farm with the given rqd settings; time-outs that a busy machine keeps."""
    with contextlib.ExitStack() as open_channels:

        def make(**changes: Any) -> RqdChannels:
            times = {"timeout": 20.0}
            return open_channels.enter_context(RqdChannels(Rqd(addresses=farm.addresses, **{**times, **changes})))

        yield make


@pytest.fixture
def channels(connect: Callable[..., RqdChannels]) -> RqdChannels:
    return connect()
