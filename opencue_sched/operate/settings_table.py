"""The settings, as the table of the operator guide.

``python -m opencue_sched.operate.settings_table`` prints it; given a file, it is written between the markers there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ByteSize, SecretStr
from pydantic.fields import FieldInfo

from opencue_sched.settings import Settings

BEGIN = "<!-- settings: begin (generated, see opencue_sched/operate/settings_table.py) -->"
END = "<!-- settings: end -->"


def table() -> str:
    """One row a setting: its key in a file, its environment variable, its default and what it does."""
    lines = ["| key | environment | default | meaning |", "|---|---|---|---|"]
    for path, field in setting_fields():
        key, variable = ".".join(path), "OPENCUE_SCHED_" + "__".join(path).upper()
        lines.append(f"| `{key}` | `{variable}` | {_default(path, field)} | {field.description} |")
    return "\n".join(lines)


def setting_fields() -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every setting, by the names from its section down."""
    return _fields(Settings, ())


def _fields(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _fields(kind, (*path, name))
        else:
            yield (*path, name), field


def _default(path: tuple[str, ...], field: FieldInfo) -> str:
    if path == ("instance",):
        return "host name and process id"
    if path[:2] == ("queue", "stream"):
        return "not set (the reference: 3)"
    value: Any = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if value is None or value in ((), {}, ""):
        return "-"
    if isinstance(value, ByteSize):
        return f"{value.human_readable()}"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else f"{value}"


def write_into(document: Path) -> None:
    """Replace what stands between the markers."""
    text = document.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    document.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write_into(Path(sys.argv[1]))
    else:
        print(table())  # noqa: T201
