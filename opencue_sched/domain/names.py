"""Names, and the widths of the columns that hold them (facts A)."""

from __future__ import annotations

import re

from opencue_sched.domain.errors import InvalidInput

SHOW_NAME_WIDTH = 512
FACILITY_NAME_WIDTH = 36
DEPT_NAME_WIDTH = 36
FOLDER_NAME_WIDTH = 36
JOB_NAME_WIDTH = 255
SHOT_NAME_WIDTH = 64
USER_NAME_WIDTH = 32
JOB_OS_WIDTH = 12
LOG_DIR_WIDTH = 4000
LAYER_NAME_WIDTH = 256
LAYER_RANGE_WIDTH = 4000
LAYER_TAGS_WIDTH = 4000
LAYER_SERVICES_WIDTH = 128
COMMAND_WIDTH = 4000
ENVIRONMENT_WIDTH = 2048
LIMIT_NAME_WIDTH = 255
FRAME_NAME_WIDTH = 256
HOST_NAME_WIDTH = 45
HOST_TAG_WIDTH = 45
HOST_TAGS_WIDTH = 128
FRAME_HISTORY_HOST_WIDTH = 64

_FRAME_NAME = re.compile(r"^(-?[0-9]+)-(.+)$", re.DOTALL)


def frame_name(number: int, layer_name: str) -> str:
    """The name of a frame: ``0012-render``, and ``-012-render`` for frame -12 (Java's and Python's ``%04d`` agree)."""
    return f"{number:04d}-{layer_name}"


def parse_frame_name(name: str, layer_name: str | None = None) -> tuple[int, str]:
    """The number and the layer name in a frame name; ``layer_name``, when known, must be the one in it.

    OpenCue reads the number up to the first dash, so it cannot read a negative one (facts E). The dash that ends the
    number is the first one after a digit here, so negative frames work like any others.
    """
    match = _FRAME_NAME.match(name)
    if match is None or (layer_name is not None and match.group(2) != layer_name):
        expected = f"<number>-{layer_name or '<layer>'}"
        raise InvalidInput(f"frame name {name!r}: expected {expected}, such as {frame_name(1, layer_name or 'layer')}")
    return int(match.group(1)), match.group(2)


def os_names(text: str | None) -> tuple[str, ...]:
    """``host_stat.str_os`` as the list Cuebot reads it as: separated by commas, spaces around them ignored."""
    return tuple(name for name in (part.strip() for part in (text or "").split(",")) if name)


def service_names(text: str | None) -> tuple[str, ...]:
    """``layer.str_services`` split on commas, in order: the first is the layer's main service."""
    return tuple(name for name in (part.strip() for part in (text or "").split(",")) if name)
