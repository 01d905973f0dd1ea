"""Of requirements.lock, what the installed package needs to run: pins and hashes as they are, without the tools.

``python image_requirements.py LOCK`` prints it. Used while the image is built; needs ``packaging`` and all of the lock.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGE = "opencue-sched"
_BLOCK = re.compile(r"^(\S+)==\S+ \\\n(?:    --hash=\S+(?: \\)?\n)+", re.MULTILINE)


def needed(package: str = PACKAGE) -> set[str]:
    """The names of everything ``package`` needs on this machine, however indirectly."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    waiting = [(package, "")]
    while waiting:
        asked = waiting.pop()
        if asked in seen:
            continue
        seen.add(asked)
        name, extra = asked
        for text in distribution(name).requires or ():
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                canonical = canonicalize_name(wanted.name)
                found.add(canonical)
                waiting += [(canonical, one) for one in ("", *wanted.extras)]
    return found


def requirements(lock: str) -> str:
    """The part of ``lock`` that is needed. Raises KeyError for what is needed and not locked."""
    blocks = {str(canonicalize_name(match[1])): match[0] for match in _BLOCK.finditer(lock)}
    return "".join(blocks[name] for name in sorted(needed()))


if __name__ == "__main__":
    sys.stdout.write(requirements(Path(sys.argv[1]).read_text(encoding="utf-8")))
