"""Standard input, output and error that were closed when the process began (``2>&-``), or whose disk is full."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def open_closed_streams() -> None:
    """Have what is written to closed streams dropped, and nothing read from them.

    Call it before anything is opened. The number of a closed stream is the lowest free one, so a connection would get
    it, and with it what libraries write to standard error.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - as long as the process


def cannot_be_written(error: BaseException) -> bool:
    """Whether an error says that there is no room for what was written."""
    return isinstance(error, OSError) and error.errno in _NO_ROOM


def drop_output() -> None:
    """Have what is still to be written to standard output and error dropped: at the end of the process it would fail
    once more, with lines of Python's own and another exit status."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
