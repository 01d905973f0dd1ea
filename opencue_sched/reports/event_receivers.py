"""How an event of a job gets to whom the farm has told it to: posted to a URL, or given to a command.

A receiver gets the same event again after it was not sure that the first one came through: by its ``id`` it knows. What
a receiver answers is bounded in time and size, redirects are not followed, and no error says anything of a URL but its
host.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from opencue_sched import __version__
from opencue_sched.domain.receiver_url import ReceiverUrl, read_receiver_url
from opencue_sched.settings import PREFIX, Events

LARGEST_ANSWER_BYTES = 1024 * 1024
"""The largest answer that is taken from a receiver, whose content says nothing."""


class Receiver(Protocol):
    """Whom events are told to; ``shown`` is what may be said of it."""

    @property
    def shown(self) -> str: ...

    def deliver(self, message: bytes, seconds: float) -> str:
        """Hand over an event as JSON, within ``seconds``. Returns why that failed, or an empty text."""


def receiver_of(events: Events) -> Receiver | None:
    """The receiver that the settings name, if any."""
    if events.url is not None:
        return UrlReceiver(read_receiver_url(events.url.get_secret_value()))
    return CommandReceiver(events.command) if events.command else None


@dataclass(frozen=True, slots=True)
class UrlReceiver:
    """Posts each event; any answer from 200 to 299 means that it has come."""

    url: ReceiverUrl

    @property
    def shown(self) -> str:
        return self.url.shown

    def deliver(self, message: bytes, seconds: float) -> str:
        """See Receiver. The whole of it is bounded by ``seconds``: looking up the name, and an answer byte by byte."""
        from tornado.httpclient import HTTPClient, HTTPClientError, HTTPRequest

        request = HTTPRequest(
            self.url.address,
            method="POST",
            body=message,
            headers={"Content-Type": "application/json", "User-Agent": f"opencue-sched/{__version__}"},
            connect_timeout=seconds,
            request_timeout=seconds,
            follow_redirects=False,
            decompress_response=False,
            auth_username=self.url.user,
            auth_password=self.url.password,
        )
        client = HTTPClient(max_body_size=LARGEST_ANSWER_BYTES)
        try:
            code = client.fetch(request, raise_error=False).code
        except HTTPClientError as error:
            timed_out = error.code == _NO_ANSWER and "imeout" in str(error.message)
            return f"no answer within {seconds:g} s" if timed_out else "it hung up, or answered no HTTP"
        except OSError as error:
            return error.strerror or type(error).__name__
        finally:
            client.close()
        return "" if 200 <= code < 300 else f"it answered {code}"


_NO_ANSWER = 599
"""Tornado's status of a request that has no answer."""


@dataclass(frozen=True, slots=True)
class CommandReceiver:
    """Runs a program for each event, which has it on standard input; exit status 0 means that it has come.

    No shell reads the arguments, and the program does not get our settings, in which passwords are. What it writes to
    standard error is in the worker's own.
    """

    command: Sequence[str]

    @property
    def shown(self) -> str:
        return Path(self.command[0]).name

    def deliver(self, message: bytes, seconds: float) -> str:
        """See Receiver. A program that takes longer is killed with all that it has started."""
        ours = {name: value for name, value in os.environ.items() if not name.upper().startswith(PREFIX)}
        with tempfile.TemporaryFile() as standard_input:
            standard_input.write(message)
            standard_input.seek(0)
            try:
                process = subprocess.Popen(
                    self.command, stdin=standard_input, stdout=subprocess.DEVNULL, env=ours, start_new_session=True
                )
            except OSError as error:
                return error.strerror or type(error).__name__
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"it did not end within {seconds:g} s"
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status < 0:
            return f"it was ended by signal {-status}"
        return f"exit status {status}" if status else ""
