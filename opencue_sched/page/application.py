"""Flower's application, as this scheduler starts it: it answers by its own names, and says why it cannot listen."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NoReturn, cast

from flower.app import Flower
from tornado.httputil import HTTPHeaders, HTTPServerRequest
from tornado.web import OutputTransform, RequestHandler

from opencue_sched.errors import InvalidInput


def asks_for_a_password(options: Any) -> bool:
    """Whether Flower asks before it answers. It looks at ``auth`` and ``basic_auth``; an ``auth_provider`` alone asks
    nobody."""
    return bool(options.auth or any(options.basic_auth or ()))


def is_own_name(host: str, hosts: Collection[str]) -> bool:
    """Whether a page may be asked for by ``host``, in lower case and without a port: as localhost, by an address, or by
    one of ``hosts``. No other page can have such a name in a browser, whichever server answers for other names."""
    name = host.rstrip(".")
    if name == "localhost" or name in hosts:
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


_MENU = b'<ul class="app-nav navbar-nav">'
_FARM = b'<li class="nav-item"><a class="nav-link" href="%s">Farm</a></li>'


class FarmInMenu(OutputTransform):
    """Adds the farm page to the menu of Flower's own pages, which has no place for pages of others."""

    def __init__(self, prefix: str, request: HTTPServerRequest) -> None:
        # A relative address leads to the farm page behind any proxy, also one that takes a prefix away.
        page = request.path.lstrip("/").removeprefix(prefix.strip("/")).lstrip("/")
        self._above = b"../" * page.count("/")

    def transform_first_chunk(
        self,
        status_code: int,
        headers: HTTPHeaders,
        chunk: bytes,
        finishing: bool,  # noqa: ARG002 - tornado's signature
    ) -> tuple[int, HTTPHeaders, bytes]:
        """Tornado's hook: put the farm page into the menu, if the answer is a page of Flower's with one."""
        if headers.get("Content-Type", "").startswith("text/html") and _MENU in chunk:
            chunk = chunk.replace(_MENU, _MENU + _FARM % (self._above + b"farm"), 1)
            if "Content-Length" in headers:
                headers["Content-Length"] = str(len(chunk))
        return status_code, headers, chunk


class GuardedFlower(Flower):  # type: ignore[misc]
    """Flower that, where it asks for no password, answers what is asked of it by its own names alone: a page from
    elsewhere whose name was made to lead here could read everything otherwise (DNS rebinding)."""

    def __init__(self, *, hosts: Collection[str], refuse: Callable[[Exception], NoReturn], **given: Any) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._refuse = refuse
        super().__init__(**given)
        self.add_transform(cast(Any, partial(FarmInMenu, self.options.url_prefix or "")))

    def find_handler(self, request: HTTPServerRequest, **named: Any) -> Any:
        """Tornado's choice of a handler, or that which refuses."""
        if asks_for_a_password(self.options) or is_own_name(request.host_name, self._hosts):
            return super().find_handler(request, **named)
        return self.get_handler_delegate(request, _UnknownName)

    def start_http_server(self) -> Any:
        """Flower's start of its server; ends the process, with what to do, where the address cannot be had."""
        try:
            return super().start_http_server()
        except OSError as error:
            where = self.options.unix_socket or f"{self.options.address}, port {self.options.port}"
            reason = f"Flower cannot listen on {where} ({error.strerror}); choose another with --port or FLOWER_PORT"
            self._refuse(InvalidInput(reason))


class _UnknownName(RequestHandler):
    """Says why Flower does not answer by the name that it was asked for by."""

    def prepare(self) -> None:
        self.set_status(403)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.finish(
            "This Flower asks for no password, so it answers as localhost, by its address, and by the names in "
            f"OPENCUE_SCHED_PAGE__HOSTS alone. {self.request.host_name} is none of them.\n"
        )
