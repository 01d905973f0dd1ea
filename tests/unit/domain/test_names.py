"""Names as people are told them."""

from __future__ import annotations

import pytest

from opencue_sched.domain.names import name_ranges


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ([], []),
        (["r03", "r01", "r02"], ["r01 to r03"]),
        (["r01", "r02"], ["r01", "r02"]),
        (["r09", "r10", "r11", "r11"], ["r09 to r11"]),
        (["r9", "r10", "r11"], ["r10", "r11", "r9"]),
        (["r01", "r02", "r03", "s04", "ws"], ["r01 to r03", "s04", "ws"]),
        (["10.0.0.1", "10.0.0.2", "10.0.0.3"], ["10.0.0.1 to 10.0.0.3"]),
    ],
)
def test_three_names_or_more_in_a_row_are_told_as_a_range(names: list[str], told: list[str]) -> None:
    assert name_ranges(names) == told
