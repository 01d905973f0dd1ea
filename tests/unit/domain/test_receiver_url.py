"""The URL that events of jobs are posted to, and what may be shown of it."""

from __future__ import annotations

import pytest

from opencue_sched.domain.receiver_url import read_receiver_url
from opencue_sched.errors import InvalidInput


def test_a_url_is_taken_apart_and_only_its_host_is_shown() -> None:
    url = read_receiver_url("https://me:a%2Fsecret@hooks.studio:8443/secret/path?key=secret")
    assert (url.user, url.password) == ("me", "a/secret")
    assert url.address == "https://hooks.studio:8443/secret/path?key=secret"
    assert url.shown == "https://hooks.studio:8443/***"
    assert "secret" not in repr(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [("http://[::1]:80/x", "http://[::1]:80/***"), ("https://hooks.studio", "https://hooks.studio/***")],
)
def test_other_urls_are_taken(url: str, shown: str) -> None:
    assert read_receiver_url(url).shown == shown


@pytest.mark.parametrize(
    "url",
    [
        "ftp://hush/",
        "hush",
        "https:///hush",
        "https://u:12#hush@h/",
        "https://u:12/hush@h/",
        "https://u:12?hush@h/",
        "https://h:hush/",
        "https://h/hu sh",
        "https://h/h\u00fcsh\u2026hush",
        "https://[hush/",
        "http://h/hush\r\nX: y",
    ],
)
def test_what_is_no_such_url_is_refused_and_not_quoted(url: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        read_receiver_url(url)
    assert "hush" not in str(refusal.value)
