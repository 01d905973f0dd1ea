"""The part of requirements.lock that a package needs to run: pins and hashes as they are.

``python image_requirements.py LOCK PACKAGE`` prints it, for an image of any Python 3.11. ``make lock`` writes the lock
files beside this script with it; it needs ``packaging`` and all of the lock.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYTHONS = ("3.11.0", "3.11.99")
"""The first and the last that the lock serves: what one of them needs is in the list."""
_BLOCK = re.compile(r"^(\S+)==\S+ \\\n(?:    --hash=\S+(?: \\)?\n)+", re.MULTILINE)


def needed(package: str) -> set[str]:
    """The names of everything ``package`` needs, however indirectly, and its own."""
    found = {package}
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
            if _applies(wanted, extra):
                canonical = canonicalize_name(wanted.name)
                found.add(canonical)
                waiting += [(canonical, asked_extra) for asked_extra in ("", *wanted.extras)]
    return found


def _applies(wanted: Requirement, extra: str) -> bool:
    environments = (
        {"extra": extra, "python_version": "3.11", "python_full_version": version, "implementation_version": version}
        for version in PYTHONS
    )
    return wanted.marker is None or any(wanted.marker.evaluate(environment) for environment in environments)


def requirements(lock: str, package: str) -> str:
    """The part of ``lock`` that is needed. Raises KeyError for what is needed and not locked."""
    blocks = {str(canonicalize_name(match[1])): match[0] for match in _BLOCK.finditer(lock)}
    names = needed(package) - {"opencue-sched"}  # which is not in the lock: its wheel is built
    return "".join(blocks[name] for name in sorted(names))


if __name__ == "__main__":
    sys.stdout.write(requirements(Path(sys.argv[1]).read_text(encoding="utf-8"), sys.argv[2]))
