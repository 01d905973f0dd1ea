"""The broker's name for Celery, and which values are messages."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu import Connection

from opencue_sched.coordination.broker import broker_settings, guard_transports
from opencue_sched.coordination.transport import SentinelTransport, Transport, unreadable


@pytest.mark.parametrize(
    ("url", "broker", "options"),
    [
        ("redis://:pw@h:6379/1", "redis://:pw@h:6379/1", {}),
        ("rediss://h/0", "rediss://h/0", {}),
        ("unix:///run/redis.sock", "redis+socket:///run/redis.sock", {}),
        ("sentinel://:pw@a:1,b:2/main?db=3", "sentinel://:pw@a:1/3;sentinel://:pw@b:2/3", {"master_name": "main"}),
    ],
)
def test_one_redis_url_names_the_broker(url, broker, options):
    settings = broker_settings(url)
    assert settings.url == broker
    assert settings.options == options
    assert "pw" not in repr(settings)


def test_redis_urls_lead_to_the_guarded_transports():
    guard_transports()
    for scheme, transport in (("redis", Transport), ("rediss", Transport), ("sentinel", SentinelTransport)):
        connection = Connection(f"{scheme}://localhost:1/0")
        assert connection.get_transport_cls() is transport
        assert connection.as_uri().startswith(f"{scheme}://")


json_values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_no_odd_value_passes_for_a_message(value):
    assert unreadable(json.dumps(value))


@given(st.text())
def test_no_odd_text_passes_for_a_message(text):
    assert unreadable(text)


def test_an_envelope_passes():
    envelope = {"body": "W10=", "headers": {}, "properties": {"delivery_tag": "t", "delivery_info": {}}}
    assert unreadable(json.dumps(envelope)) == ""
