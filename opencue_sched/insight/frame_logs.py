"""The logs that RQDs write of frames, where their directory is visible on this machine, and how frames ended.

A log is what strangers' programs wrote: no more of it is read than asked for, and nothing in it reaches a terminal's
controls.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

from sqlalchemy import Connection

from opencue_sched.domain.frame_command import log_path
from opencue_sched.domain.states import exit_meaning, signal_words
from opencue_sched.store import jobs

BLOCK_BYTES = 65_536
"""How much of a log is read at once."""
_END_BYTES = 32_768
"""How much of a log's end is read for a death."""
_END_LINES = 5
"""How many lines of output are shown for a death."""
_FOOTER_BYTES = 4_096
"""The part of a log's end in which RQD's account of the run is looked for."""
_LINE_WIDTH = 400
"""How many characters of such a line are shown."""
_LOGS_READ = 5
"""How many kinds of deaths get the end of a log, the most frequent first; the logs' file server may be slow."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LINE_ENDS = re.compile(r"\r\n?")
# Controls but for tab and newline, and what turns the direction of writing.
_HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
# RQD of Python and of Rust: before the one and after the other is RQD's own account of the run, not the frame's output.
_HEADER = re.compile(r"\nenv +[^\n]*\n=+\n")
_FOOTER = re.compile(r"\n=+\r?\n(?:RenderQ Job Complete|Render Frame Completed)\s*\n")
_SIGNAL = re.compile(r"^exitSignal +(\d+)$", re.MULTILINE)
_KILL_MESSAGE = re.compile(r"^killMessage +(.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Deaths:
    """The dead frames of a layer with one exit status, and how the newest of them died."""

    layer_id: str
    frames: int
    """How many there are."""
    exit_status: int
    meaning: str
    """What the exit status says, in words."""
    frame: str
    """The name of the newest of these frames."""
    frame_id: str
    host: str | None
    """The name of the host on which the newest frame died."""
    log: str
    """The path of the newest frame's log."""
    lines: tuple[str, ...] | None
    """The last lines of that frame's output; None if the log is not visible here, or was not read."""

    def lines_for_people(self) -> list[str]:
        """Lines that name the frame, how it died, its log, and the log's end."""
        who = f"{self.frame} on {self.host or 'no host'}"
        if self.frames > 1:
            who = f"{self.frames} frames, at last {who}"
        hidden = " (not visible here)" if self.lines is None else ""
        end = [f"    | {line[:_LINE_WIDTH]}" for line in self.lines or ()]
        return [f"  dead: {who}, exit status {self.exit_status}: {self.meaning}", f"    log {self.log}{hidden}", *end]


def deaths_of(connection: Connection, job_id: str) -> list[Deaths]:
    """The kinds of deaths of a job's dead frames, by layer and exit status, the most frequent first."""
    return deaths_among(jobs.dead_frames(connection, job_id))


def deaths_among(dead: Sequence[jobs.DeadFrames]) -> list[Deaths]:
    """The kinds of deaths among the rows of `store.jobs.dead_frames`. Reads logs, whose file server may be slow, and
    nothing from the database."""
    deaths: list[Deaths] = []
    for row in dead:
        log = log_path(row.log_dir, row.job, row.name)
        tail = _tail_of(log) if len(deaths) < _LOGS_READ else None
        output, footer = tail or ("", "")
        meaning = exit_meaning(row.exit_status)
        if row.exit_status == 1 and (found := _SIGNAL.search(footer)):  # RQD's status of what a signal ended
            meaning = signal_words(int(found[1])) or meaning
        if found := _KILL_MESSAGE.search(footer):
            meaning += f"; RQD says: {found[1]}"
        lines = None if tail is None else tuple(_HEADER.split(output, 1)[-1].rstrip().splitlines()[-_END_LINES:])
        deaths.append(
            Deaths(row.layer_id, row.frames, row.exit_status, meaning, row.name, row.id, row.host, log, lines)
        )
    return deaths


def open_log(path: str, *, follow: bool = True) -> BinaryIO:
    """The log, for reading. Raises OSError when it is not visible here, is no file, or is a link that is not to be
    followed."""
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)  # a FIFO of this name would be waited for
    log = os.fdopen(os.open(path, flags), "rb")
    if not stat.S_ISREG(os.fstat(log.fileno()).st_mode):
        log.close()
        raise OSError(f"{path} is no file")
    return log


def seek_tail(log: BinaryIO, lines: int) -> int:
    """Go to where the last ``lines`` of a frame's output begin. RQD's account of the run, before and behind the output,
    counts for none. Returns the bytes from there to the end of the output."""
    log.seek(0)
    header = _HEADER.search(log.read(BLOCK_BYTES).decode("latin-1"))  # a character a byte
    begin = header.end() if header else 0
    size = log.seek(0, os.SEEK_END)
    start = log.seek(max(0, size - _FOOTER_BYTES))
    footer = _FOOTER.search(log.read(size - start).decode("latin-1"))
    end = position = start + footer.start() + 1 if footer else size
    while lines > 0 and position > 0:
        size = min(BLOCK_BYTES, position)
        position = log.seek(position - size)
        block = log.read(size)
        at = len(block) - (position + size == end)  # the newline at the very end begins no line
        while lines > 0 and (at := block.rfind(b"\n", 0, at)) >= 0:
            lines -= 1
        if lines == 0:
            position += at + 1
    return end - log.seek(min(end, max(begin, position)))


def harmless(text: str) -> str:
    """The text without colours, and with its controls in carets: what a terminal may be given."""
    text = _LINE_ENDS.sub("\n", _COLOUR.sub("", text))
    return _HARMFUL.sub(lambda control: f"^{chr(ord(control[0]) ^ 64)}" if ord(control[0]) < 128 else "\ufffd", text)


def end_of_log(path: str, most_bytes: int) -> str | None:
    """The end of a log, RQD's account of the run included, as a terminal or a browser may show it; None where it is not
    visible here.

    A person who submits jobs chooses the directory, and may write there: a symbolic link would show a stranger's files
    to those who look at the page.
    """
    try:
        with open_log(path, follow=False) as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - most_bytes))
            return harmless(log.read(most_bytes).decode(errors="replace"))
    except OSError:
        return None


def _tail_of(path: str) -> tuple[str, str] | None:
    """The end of a frame's output, and RQD's account of the run; None where the log is not visible here."""
    text = end_of_log(path, _END_BYTES)
    if text is None:
        return None
    output, *footer = _FOOTER.split(text, maxsplit=1)
    return output, "".join(footer)
