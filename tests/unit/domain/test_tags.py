"""Tags in every spelling."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencue_sched.domain.clusters import join_tags, normalise_tag, normalise_tags, spelled_tags

tag_names = st.text(alphabet="abcXYZ019_.-", min_size=1, max_size=12)


@pytest.mark.parametrize(
    "text",
    ["render|gpu", "render | gpu", "render| gpu", " render |gpu ", "render||gpu", "|render|gpu|", "gpu | render"],
)
def test_every_spelling_of_the_separator_gives_the_same_tags(text: str) -> None:
    assert normalise_tags(text) == {"render", "gpu"}


@pytest.mark.parametrize("text", ["", "   ", "|", " | | ", None])
def test_no_tags_is_an_empty_set_and_never_an_empty_tag(text: str | None) -> None:
    assert normalise_tags(text) == frozenset()


def test_spaces_inside_a_name_collapse_as_the_queries_compare_them() -> None:
    # Trap I-7: tag text is compared with all spaces removed.
    assert normalise_tags("big mem | general") == {"bigmem", "general"}
    assert normalise_tag("big mem") in normalise_tags("bigmem|general")


def test_a_layer_tag_with_a_comma_stays_one_tag_because_the_queries_do_not_split_it() -> None:
    assert normalise_tags("a,b") == {"a,b"}


def test_case_does_not_tell_tags_apart_but_of_letters_beyond_z() -> None:
    assert normalise_tags("GPU | gpu|Big Mem") == {"gpu", "bigmem"}
    assert normalise_tag("GRÖSSE İ") == "grÖsseİ"


def test_tags_are_told_as_they_are_spelled() -> None:
    assert spelled_tags(" Big Mem |gpu||") == {"bigmem": "Big Mem", "gpu": "gpu"}
    assert spelled_tags(None) == {}


@given(st.lists(tag_names, unique=True))
def test_joining_and_normalising_are_inverse(tags: list[str]) -> None:
    assert normalise_tags(join_tags(tags)) == {tag.lower() for tag in tags}
    assert list(spelled_tags(join_tags(tags)).keys()) == list(dict.fromkeys(tag.lower() for tag in tags))


def test_joined_tags_are_spelled_as_cuebot_spells_them() -> None:
    assert join_tags(["b", "a"]) == "b | a"
