"""What Celery's command line is guarded against: an open Flower, and a pool that is not the one asked for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from opencue_sched.celery import is_celery
from opencue_sched.errors import InvalidInput
from opencue_sched.page.flower import guard_flower

CELERY = "/venv/bin/celery"


@pytest.mark.parametrize(
    ("argv", "celery"),
    [
        ([CELERY, "-A", "opencue_sched", "flower"], True),
        (["/venv/lib/python3.11/site-packages/celery/__main__.py", "-A", "opencue_sched", "flower"], True),
        (["/venv/bin/pytest", "celery"], False),
        ([""], False),
        ([], False),
    ],
)
def test_only_celerys_command_is_meant(argv, celery):
    assert is_celery(argv) is celery


def flower(**given):
    """What Flower has made of its options; those not given as it has them by itself."""
    return SimpleNamespace(**{"address": "", "unix_socket": "", "basic_auth": [], "auth": "", **given})


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost"])
def test_loopback_needs_no_password(address):
    guard_flower(flower(address=address))


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.0.0.5", "flower.example", ""])  # noqa: S104
def test_elsewhere_it_asks_for_a_password(address):
    for open_to_all in ({}, {"basic_auth": [""]}, {"auth_provider": "flower.views.auth.GithubLoginHandler"}):
        with pytest.raises(InvalidInput, match=f"on {address or 'every address'} .*FLOWER_BASIC_AUTH"):
            guard_flower(flower(address=address, **open_to_all))
    guard_flower(flower(address=address, basic_auth=["artist:secret"]))
    guard_flower(flower(address=address, auth=".*@example.com"))


def test_a_socket_file_is_not_on_the_network():
    guard_flower(flower(unix_socket="/run/flower.sock"))
