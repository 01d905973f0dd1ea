"""Arrays as PostgreSQL reads them; what it makes of them, the tests of statements see."""

from __future__ import annotations

from opencue_sched.store.arrays import numbers, texts


def test_texts_are_quoted_so_that_none_ends_early() -> None:
    assert texts([]) == "{}"
    assert texts(iter(["a", "", "NULL", "b c,{}"])) == '{"a","","NULL","b c,{}"}'
    assert texts(['a"b', "c\\d", "e"]) == '{"a\\"b","c\\\\d","e"}'


def test_numbers_stand_as_they_are() -> None:
    assert numbers([]) == "{}"
    assert numbers(iter([1, -2, 2**62])) == "{1, -2, 4611686018427387904}"
