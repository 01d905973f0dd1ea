"""A headless Chromium, driven by its DevTools protocol through Tornado's WebSocket client."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from tornado.websocket import WebSocketClientConnection, websocket_connect

from tests.kit.polling import eventually

NAMES = ("chromium", "chromium-browser", "google-chrome")
REMEDY = "the farm page is tested in a real browser: apt-get install chromium"
ANSWER_SECONDS = 60


class Browser:
    """One page of one browser. ``events`` are what DevTools has told, in order, in its own words.

    Tests of one file share a browser, each in a `visit`: to start one costs as much as the whole visit of some.
    """

    def __init__(self) -> None:
        program = next(filter(None, map(shutil.which, NAMES)), None)
        assert program is not None, REMEDY
        self.events: list[dict[str, Any]] = []
        self._profile = tempfile.TemporaryDirectory(prefix="opencue-sched-browser-", ignore_cleanup_errors=True)
        profile = self._profile.name
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
        quiet = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-proxy-server")
        where = (f"--user-data-dir={profile}", "--remote-debugging-port=0")
        with (Path(profile) / "log").open("wb") as log:
            command = [program, *options, *quiet, *where, "about:blank"]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self._loop = asyncio.new_event_loop()
        self._number = 0
        self._socket: WebSocketClientConnection | None = None
        try:
            self._socket = self._loop.run_until_complete(self._connect())
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    async def _connect(self) -> WebSocketClientConnection:
        told = Path(self._profile.name) / "DevToolsActivePort"
        port, _ = eventually(lambda: told.exists() and told.read_text().split(), 60, "DevTools", told=self._log)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as answer:
            address = next(it["webSocketDebuggerUrl"] for it in json.load(answer) if it["type"] == "page")
        return await websocket_connect(address, max_message_size=64 << 20)

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of DevTools; its result."""
        return self._loop.run_until_complete(asyncio.wait_for(self._call(method, parameters), ANSWER_SECONDS))

    async def _call(self, method: str, parameters: dict[str, Any]) -> Any:
        assert self._socket is not None
        self._number += 1
        await self._socket.write_message(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = await self._socket.read_message()
            assert message is not None, f"the browser has ended\n{self._log()}"
            told = json.loads(message)
            if told.get("id") == self._number:
                assert "error" not in told, f"{method}: {told['error']}"
                return told["result"]
            self.events.append(told)

    @contextmanager
    def visit(self, *, width: int = 1280, height: int = 800) -> Iterator[Self]:
        """The page as that of a new browser with such a window. It is left in the end, while who serves it is there."""
        self.open("about:blank")
        self.resize(width, height)
        self.events.clear()
        try:
            yield self
        finally:
            # A browser that has died fails the next visit, and does not hide why this one failed.
            with suppress(Exception):
                self.open("about:blank")

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        eventually(lambda: self.script("document.readyState") == "complete", 30, address)

    def script(self, expression: str) -> Any:
        """The value of an expression in the page."""
        told = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def text(self, selector: str) -> str:
        """What is shown of the first element of this kind; empty when it is not there."""
        return str(self.script(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def texts(self, selector: str) -> list[str]:
        return list(self.script(f"[...document.querySelectorAll({json.dumps(selector)})].map((it) => it.innerText)"))

    def press(self, key: str, code: int = 0) -> None:
        """Press and release a key, named as DOM events name it, with its virtual key code."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        named = {"key": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **named, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height}
        self.call("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        """``dark`` or ``light``."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self) -> bytes:
        """A PNG of what is in view."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def requested(self) -> list[str]:
        """The addresses asked for so far."""
        sent = (it["params"]["request"] for it in self.events if it["method"] == "Network.requestWillBeSent")
        return [request["url"] for request in sent]

    def complaints(self) -> list[str]:
        """Exceptions of scripts and whatever the console lists as an error, such as a breach of the page's policy."""
        logged = [it["params"]["entry"] for it in self.events if it["method"] == "Log.entryAdded"]
        thrown = [it["params"]["exceptionDetails"] for it in self.events if it["method"] == "Runtime.exceptionThrown"]
        return [entry["text"] for entry in logged if entry["level"] == "error"] + [str(it) for it in thrown]

    def _log(self) -> str:
        return (Path(self._profile.name) / "log").read_text(errors="replace")[-3000:]

    async def _hang_up(self) -> None:
        # In the loop: outside it Tornado makes itself another, which nobody closes.
        if self._socket is not None:
            self._socket.close()

    def close(self) -> None:
        self._loop.run_until_complete(self._hang_up())
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # What Tornado's connection still has to do.
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()
        self._profile.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
