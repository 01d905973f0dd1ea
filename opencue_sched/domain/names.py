"""Names, and the widths of the columns that hold them (facts A)."""

from __future__ import annotations

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
HOST_TAG_WIDTH = 45


def frame_name(number: int, layer_name: str) -> str:
    """The name of a frame: ``0012-render``, and ``-012-render`` for frame -12 (Java's and Python's ``%04d`` agree)."""
    return f"{number:04d}-{layer_name}"


def os_names(text: str | None) -> tuple[str, ...]:
    """``host_stat.str_os`` as the list Cuebot reads it as: separated by commas, spaces around them ignored."""
    return tuple(name for name in (part.strip() for part in (text or "").split(",")) if name)
