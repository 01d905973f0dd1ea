"""Reading the text of a job file, YAML or JSON, as text_file.py reads it.

A ``#`` after a space begins a comment in any YAML, so ``command: render #IFRAME# --out x`` would be ``render``. A
comment that begins like a token is an error where it cuts a value off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import IO

import yaml

from opencue_sched.domain.command import TOKEN
from opencue_sched.domain.job_spec import InvalidJobSpec, JobSpec
from opencue_sched.text_file import UnreadableFile, as_text, read_json, read_text, read_yaml, walk

_CUT_OFF = re.compile(rf"[ \t]+({TOKEN.pattern})")
_BLOCKS = ("|", ">")


def read_job_file(content: bytes | IO[bytes], *, default_user: str | None = None) -> JobSpec:
    """The job in a file, open or already read. Raises InvalidJobSpec with every problem, or the one that made it
    unreadable."""
    try:
        text = as_text(content) if isinstance(content, bytes) else read_text(content)
        data = _json(text) if text.lstrip().startswith("{") else read_yaml(text, _cut_off)
    except UnreadableFile as error:
        raise InvalidJobSpec(error.problems) from error
    return JobSpec.parse(data, default_user=default_user)


def _json(text: str) -> object:
    try:
        return read_json(text)
    except json.JSONDecodeError as error:
        problem = f"line {error.lineno}, column {error.colno}: not JSON: {error.msg}"
    try:
        return read_yaml(text, _cut_off)  # YAML's own {flow: mapping} begins with a brace as well
    except UnreadableFile as error:
        if "not YAML" not in str(error):
            raise
        raise InvalidJobSpec([problem]) from error


def _cut_off(root: yaml.Node, text: str) -> Iterator[str]:
    """A problem for each value that a comment beginning like a token cuts off."""
    for path, node in walk(root, "", set()):
        comment = None if node.style in _BLOCKS else _CUT_OFF.match(text, node.end_mark.index)
        if comment is not None:
            yield (
                f"line {node.end_mark.line + 1}: {path}: {comment[1]} and what follows is a comment here; put the text "
                "in quotes"
            )
