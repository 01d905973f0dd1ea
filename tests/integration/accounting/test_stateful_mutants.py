"""Each rule of the protocol is needed: without it in the scripts or the code, the games find what goes wrong."""

from __future__ import annotations
import __future__

import inspect
import shutil
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import redis

from opencue_sched.accounting import age_marks, bootstrap, differences, foreign_decrements, recompute
from opencue_sched.clients import lua_scripts
from opencue_sched.clients.lua_scripts import load_script, lua_directory
from tests.integration.accounting import plots
from tests.integration.accounting.games import GENERATED, machine_on, play
from tests.integration.accounting.plots import Plot
from tests.integration.accounting.stepped_booker import Booker
from tests.integration.accounting.stepped_farm import SteppedFarm

GAMES, STEPS = 60, 30

MISCOUNTED = r"counts \(.*its entries"
UNCOUNTED = "running, or about to, and not counted"
GHOST = "released, and counted again"
DIVERGED = "differ after two recomputes"
LACKING = "came too late"
UNEQUAL = "in the end"
FORBIDDEN = "was accepted, although of"
ASTRAY = "has the machines"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A rule taken out: in the file ``where`` of lua/, or in the function, ``rule`` reads ``instead``.

    ``plot`` is the story that the games tell often; ``symptom`` what an invariant of the machine says in the end;
    ``kind`` the kind of store they are of.
    """

    where: str | Callable[..., Any]
    rule: str
    instead: str
    plot: Plot
    symptom: str = UNCOUNTED
    kind: str = "plain"


MUTANTS = {
    "no tombstone": Mutant(
        "includes/ledger.lua",
        "return call('SISMEMBER', 'acct:tomb:' .. bucket, id) == 1",
        "return false",
        plots.released_before_it_settles,
        GHOST,
    ),
    "no in-flight carry": Mutant(
        differences._judge, "(in_flight and too_old)", "in_flight", plots.in_flight_during_a_recompute
    ),
    "age judged by the clock at apply time": Mutant(
        recompute.reconcile,
        "is_too_old(record, seen, mark.seconds,",
        "is_too_old(record, seen_an_age_ago(ledger.client, mark, clock(), age_seconds), ledger.mark().seconds,",
        plots.recompute_that_stalls,
    ),
    "what was confirmed after the mark is removed": Mutant(
        differences._judge,
        "record.changed_seq <= mark_seq",
        "True",
        plots.booked_during_a_recompute,
    ),
    "anything absent is removed": Mutant(
        differences._judge,
        "if not (settled_before_mark or (in_flight and too_old)):",
        "if False:",
        plots.booked_during_a_recompute,
    ),
    "release that counts twice": Mutant(
        "includes/moves.lua",
        "    local entry = read_record(known[i])\n",
        "    known[i] = known[i] or call('HGET', 'acct:gone', id)\n"
        "    if known[i] then call('HSET', 'acct:gone', id, known[i]) end\n"
        "    local entry = read_record(known[i])\n",
        plots.released_twice,
        MISCOUNTED,
    ),
    "rollback that decrements after a flush": Mutant(
        "book.lua",
        "  local released = release({id})\n",
        "  local released = release({id})\n"
        "  if released[3] == 0 then\n"
        "    for _, key in ipairs(vertices(unpack(ARGV, 7, 12))) do\n"
        "      if key then count(key, cores, gpus, cores, gpus) end\n"
        "    end\n"
        "    for limit in string.gmatch(limits, '[^,]+') do count('acct:limit:' .. limit, -1) end\n"
        "  end\n",
        plots.lost_before_its_insert,
        MISCOUNTED,
    ),
    "bootstrap that does not wait": Mutant(
        bootstrap._Filler.fill, "self._wait()", "pass", plots.lost_before_its_commit
    ),
    "age judged by Redis TIME alone": Mutant(
        age_marks.is_too_old, " and record.changed_seq <= seen_seq", "", plots.clock_set_forward
    ),
    "unknown COMMIT rolled back": Mutant(
        Booker.work,
        "    if committed is None:\n        return\n",
        "    committed = committed or []\n",
        plots.committed_without_an_answer,
    ),
    "deadline that the client keeps": Mutant(
        SteppedFarm.end_transactions, "end_sessions(self._at_once, pids)", "pass", plots.stopped_before_its_commit
    ),
    "COMMIT that hangs and is not asked for": Mutant(
        recompute.reconcile, "frozenset[str]() if stalled else old", "old", plots.commit_that_hangs
    ),
    "bootstrap that does not wait for a COMMIT that hangs": Mutant(
        bootstrap._Filler._wait,
        "while may_still_commit(self._engine, self._age):",
        "while False:",
        plots.lost_while_a_commit_hangs,
    ),
    "booking that never grows too old": Mutant(
        age_marks.is_too_old,
        "mark_seconds - record.booked_at >= age_seconds",
        "False",
        plots.in_flight_during_a_recompute,
        DIVERGED,
    ),
    "wipe that an overtaken filler can do": Mutant(
        bootstrap._Filler._wipe,
        'self._ledger.call_under(id_calls("free", part, filling.text, "all"))',
        "self._client.unlink(*part)",
        plots.overtaken_filler,
    ),
    "successor of a dead filler that does not wait": Mutant(
        bootstrap._Filler.fill,
        "self._wait()",
        "stored.text.startswith('filling') or self._wait()",
        plots.filler_that_dies,
    ),
    "seat too many for a machine that holds none": Mutant(
        "includes/seats.lua", "if not holds then return use end", "", plots.booked_on_another_machine, FORBIDDEN
    ),
    "machines too many that go on": Mutant(
        "includes/seats.lua",
        "  if use <= maximum then return end\n  -- Ours",
        "  if true then return end\n  -- Ours",
        plots.artists_take_the_seats,
        FORBIDDEN,
    ),
    "machine that goes with any of its frames": Mutant(
        "includes/machines.lua",
        "if type(sum) == 'table' or sum > 0 then",
        "if type(sum) == 'table' or tonumber(more) > 0 then",
        plots.ended_beside_another,
        ASTRAY,
    ),
    "in flight that the swap does not carry": Mutant(
        differences.Pass.entries_now,
        "for proc_id, record in self.check.records.items()}",
        "for proc_id, record in self.check.records.items() if record.state == 'C'}",
        plots.in_flight_during_a_recompute,
        MISCOUNTED,
        "dual",
    ),
    "swap that leaves out what another consistency check reads": Mutant(
        foreign_decrements._stored,
        "check is not None and check.complete",
        "check is not None",
        plots.ended_while_another_takes_stock,
        MISCOUNTED,
        "dual",
    ),
    "swap although something moved": Mutant(
        "reseed_cas.lua", "if seq ~= ARGV[2] then", "if false then", plots.booked_before_a_swap, MISCOUNTED, "busy"
    ),
    "entry that takes its decrement with it": Mutant(
        "reconcile.lua",
        "move(id, old, -1, seq, nil, DUAL and state == '')",
        "move(id, old, -1, seq)",
        plots.decremented_before_its_entry_goes,
        LACKING,
        "busy",
    ),
    "lost decrement that is made up for without a grace": Mutant(
        "foreign.lua",
        "if delta > 0 and now - read[7] >= tonumber(ARGV[3]) then",
        "if delta > 0 then",
        plots.decremented_after_its_entry_went,
        LACKING,
        "busy",
    ),
    "lost decrement that is not made up for": Mutant(
        "foreign.lua",
        "if delta > 0 and now - read[7] >= tonumber(ARGV[3]) then",
        "if false then",
        plots.decremented_for_nothing,
        UNEQUAL,
        "busy",
    ),
    "foreign delta that is not given back": Mutant(
        "foreign.lua",
        "if delta < 0 and before < 0 then",
        "if false then",
        plots.decremented_for_nothing,
        UNEQUAL,
        "busy",
    ),
}


@pytest.fixture(params=MUTANTS.values(), ids=MUTANTS)
def mutant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Mutant]:
    """One rule is out until the test is over: production code is broken on purpose, as the games' control."""
    mutant: Mutant = request.param
    if isinstance(mutant.where, str):
        lua = shutil.copytree(lua_directory(), tmp_path / "lua")
        (lua / mutant.where).write_text(_without(mutant, (lua / mutant.where).read_text()))
        monkeypatch.setattr(lua_scripts, "lua_directory", lambda: lua)
        load_script.cache_clear()
    else:
        _replace(monkeypatch, mutant)
    yield mutant
    load_script.cache_clear()


def _without(mutant: Mutant, source: str) -> str:
    assert source.count(mutant.rule) == 1, f"{mutant.rule!r} is not in the source, or more than once"
    return source.replace(mutant.rule, mutant.instead)


def _replace(monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    """Give the function the code of its changed source, whoever has imported it."""
    function: Any = mutant.where
    source = _without(mutant, textwrap.dedent(inspect.getsource(function)))
    compiled = compile(source, f"<{function.__name__} without a rule>", "exec", __future__.annotations.compiler_flag)
    code = next(part for part in compiled.co_consts if isinstance(part, CodeType))
    monkeypatch.setattr(function, "__code__", code)


def test_a_ledger_without_one_of_its_rules_is_found_out(
    mutant: Mutant, database_url: str, redis_client: redis.Redis, settings_url: str
) -> None:
    with machine_on(database_url, settings_url) as machine:
        machine.plots, machine.kinds = (mutant.plot.__name__,), (mutant.kind,)
        with pytest.raises(AssertionError, match=mutant.symptom) as found:
            play(machine, games=GAMES, steps=STEPS, number=0, phases=GENERATED)
        print(f"found by game {machine.done['games']}: {found.value}")
