"""Every accounting script says in its header what it takes and gives, and is called exactly so."""

from __future__ import annotations

import re

import pytest

from opencue_sched.accounting import ledger as scripts
from opencue_sched.accounting.keys import EntryState
from opencue_sched.accounting.ledger import Change
from opencue_sched.clients.lua_scripts import load_script, lua_directory
from tests.kit.script_calls import BOOKING, CALLS


def header(name: str) -> str:
    lines = (lua_directory() / f"{name}.lua").read_text().splitlines()
    comment = []
    for line in lines:
        if not line.startswith("--") or line.startswith("--@"):
            break
        comment.append(line[2:].strip())
    return "\n".join(comment)


def section(text: str, name: str) -> str:
    """One section of a header: from its name to the next section's."""
    match = re.search(rf"^{name}\s+(.*?)(?=^(?:KEYS|ARGV|Returns|Invariants)|\Z)", text, re.MULTILINE | re.DOTALL)
    assert match, f"no {name} in the header"
    return match.group(1)


def fixed(text: str) -> int:
    """How many arguments a section numbers."""
    numbers = [int(number) for number in re.findall(r"(?:^|, |\n)(\d+) ", text)]
    assert numbers == list(range(1, len(numbers) + 1)), f"numbered {numbers}"
    return len(numbers)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_script_is_called_with_what_its_header_names(name: str) -> None:
    text = header(name)
    assert text.startswith(f"{name}: "), "the first line says what it is for"
    assert section(text, "Returns").strip()
    assert section(text, "Invariants:").strip()
    call, per_item = CALLS[name]
    assert fixed(section(text, "KEYS")) == len(call.keys)
    assert fixed(section(text, "ARGV")) + 2 * per_item == len(call.args)


def test_no_accounting_script_is_left_out() -> None:
    """A script that includes the ledger is called through ledger.py, and so is in CALLS."""
    with_ledger = {path.stem for path in lua_directory().glob("*.lua") if "--@include ledger" in path.read_text()}
    assert with_ledger <= CALLS.keys()


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_script_loads_with_its_includes(name: str) -> None:
    script = load_script(name)
    assert "--@include" not in script.text
    assert len(script.sha) == 40


def test_no_script_call_takes_more_than_its_bound() -> None:
    ids = [str(i) for i in range(1001)]
    calls = scripts.id_calls("release", ids, "e")
    assert [text for call in calls for text in call.args[1:]] == ids
    assert max(len(call.args) for call in calls) == 1 + scripts.PROCS_PER_CALL
    calls = scripts.id_calls("inventory", ids, "e")
    assert [text for call in calls for text in call.args[1:]] == ids
    assert max(len(call.args) for call in calls) == 1 + scripts.VERTICES_PER_CALL
    assert scripts.id_calls("release", [], "e") == []


def test_a_change_says_remove_add_and_move() -> None:
    changes = [Change("p", None, "e"), Change("q", 3, None), Change("r", 4, "e", EntryState.IN_FLIGHT)]
    (call,) = scripts.reconcile_calls("epoch", changes, "me")
    assert call.args[2:] == ("p", "", "C", "e", "q", "3", "", "", "r", "4", "F", "e")


def test_a_commit_confirms_whatever_entry_there_is() -> None:
    (call,) = scripts.settle_calls("e", [BOOKING], "me")
    assert call.args == ("e", "me", "p", "any", "C", BOOKING.packed())


def test_a_rollback_is_force_with_negated_amounts() -> None:
    call = scripts.rollback_call("e", BOOKING, "me")
    assert call.args == ("e", "force", "p", "me", "-4", "-1", "s", "a", "f", "j", "l", "d", "m,n", "")
