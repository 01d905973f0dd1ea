"""The broker's name for Celery, and which values are messages."""

from __future__ import annotations

import json
import logging

import pytest
from celery.app.utils import filter_hidden_settings
from hypothesis import given
from hypothesis import strategies as st
from kombu import Connection

from opencue_sched.coordination.transport import (
    SentinelTransport,
    Transport,
    broker_settings,
    guard_transports,
    unreadable,
)
from opencue_sched.errors import InvalidInput


@pytest.mark.parametrize(
    ("url", "broker", "options"),
    [
        ("redis://:pw@h:6379/1", "redis://:pw@h:6379/1", {}),
        ("rediss://h/0?ssl_ca_certs=/ca.pem", "rediss://h/0", {}),
        ("REDISS://:pw@h/2?ssl_ca_certs=/ca.pem", "rediss://:pw@h/2", {}),
        ("unix:///run/redis.sock", "redis+socket:///run/redis.sock", {}),
        ("unix://:p%2Fw@/run/a.sock?db=2", "redis+socket://:p%2Fw@/run/a.sock?virtual_host=2", {}),
        (
            "sentinel://:pw@a:1,b/main?db=3&sentinel_password=pw2",
            "sentinel://:pw@a:1/3;sentinel://:pw@b:26379/3",
            {"master_name": "main", "sentinel_kwargs": {"username": None, "password": "pw2"}},
        ),
    ],
)
def test_one_redis_url_names_the_broker(url, broker, options):
    settings = broker_settings(url)
    assert settings.url == broker
    assert settings.options == options
    assert "pw" not in repr(settings)


@pytest.mark.parametrize(
    ("url", "tls"),
    [
        ("redis://h/0", None),
        ("redis://h/0?ssl_ca_certs=/ca.pem", None),
        ("rediss://h/0", {"ssl_cert_reqs": "required"}),
        ("rediss://h/0?ssl_ca_certs=/ca.pem", {"ssl_cert_reqs": "required", "ssl_ca_certs": "/ca.pem"}),
        ("rediss://h/0?ssl_cert_reqs=none", {"ssl_cert_reqs": "none"}),
        (
            "rediss://h/0?ssl_check_hostname=false",
            {"ssl_cert_reqs": "required", "ssl_check_hostname": False},
        ),
        ("sentinel://h/main?ssl=true&ssl_certfile=/c", {"ssl_cert_reqs": "required", "ssl_certfile": "/c"}),
        ("sentinel://h/main?ssl=false", None),
    ],
)
def test_certificates_are_verified_unless_the_url_says_otherwise(url, tls):
    settings = broker_settings(url)
    assert settings.use_ssl == tls
    if tls is not None and "master_name" in settings.options:
        assert settings.options["sentinel_kwargs"] == {"username": None, "password": None, "ssl": True, **tls}


@pytest.mark.parametrize("url", ["http://h/0", "h:6379", "sentinel://h", "sentinel://h/main?db=one"])
def test_what_is_no_redis_url_names_the_setting(url):
    with pytest.raises(InvalidInput, match=r"accounting\.redis_url"):
        broker_settings(url)


@pytest.mark.parametrize("option", ["ssl_cert_reqs=maybe", "ssl_check_hostname=maybe"])
def test_a_tls_option_that_is_none_names_the_setting(option):
    with pytest.raises(InvalidInput, match=r"accounting\.redis_url: ssl_"):
        broker_settings(f"rediss://h/0?{option}")


def test_redis_urls_lead_to_the_guarded_transports():
    guard_transports()
    for scheme, transport in (("redis", Transport), ("rediss", Transport), ("sentinel", SentinelTransport)):
        connection = Connection(f"{scheme}://localhost:1/0")
        assert connection.get_transport_cls() is transport
        assert connection.as_uri().startswith(f"{scheme}://")


def test_no_report_says_of_our_broker_that_its_tls_verifies_nothing(caplog):
    guard_transports()
    with caplog.at_level(logging.WARNING):
        shown = filter_hidden_settings({"broker_url": "rediss://:pw@h:6379/0"})
    assert shown == {"broker_url": "rediss://:********@h:6379/0"}
    assert "insecure" not in caplog.text


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
    place = {"exchange": "", "routing_key": "cue:q:work:type:dispatch"}
    envelope = {"body": "W10=", "headers": {}, "properties": {"delivery_tag": "t", "delivery_info": place}}
    assert unreadable(json.dumps(envelope)) == ""
