"""The URL to which events of jobs are posted: ``http://`` or ``https://[user:password@]host[:port]/path?query``.

Tokens stand in the path or the query of such URLs, so nothing but the scheme, the host and the port is ever shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit, urlunsplit

from opencue_sched.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class ReceiverUrl:
    """A receiver's URL in its parts."""

    address: str = field(repr=False)
    """The URL without user and password. A secret all the same: tokens stand in it."""
    user: str | None = field(repr=False)
    password: str | None = field(repr=False)
    shown: str
    """Scheme, host and port, for people."""


def read_receiver_url(url: str) -> ReceiverUrl:
    """Read a receiver's URL. Raises InvalidInput, which quotes nothing of the URL."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise InvalidInput("this is not a URL") from None
    if parts.scheme not in ("http", "https") or not host:
        raise InvalidInput("it must be a URL that begins with http:// or https:// and names a host")
    if not url.isascii() or any(character.isspace() or not character.isprintable() for character in url):
        raise InvalidInput("it has a character that must be written with % in a URL")
    if "@" in parts.path + parts.query or parts.fragment:
        # The character may stand in a password, the rest of which would be taken for the host and the port.
        raise InvalidInput("write @ as %40 and # as %23, and in a password also / as %2F and ? as %3F")
    place = parts.netloc.rpartition("@")[2]
    user, password = (None if part is None else unquote(part) for part in (parts.username, parts.password))
    address = urlunsplit((parts.scheme, place, parts.path or "/", parts.query, ""))
    where = f"[{host}]" if ":" in host else host
    return ReceiverUrl(address, user, password, f"{parts.scheme}://{where}{f':{port}' if port else ''}/***")
