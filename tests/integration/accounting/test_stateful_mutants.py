"""Each rule of the protocol is needed: without it in the scripts or the code, the games find what goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import pytest
import redis

from opencue_sched.accounting import age_marks, bootstrap, differences, foreign_decrements, recompute
from tests.integration.accounting import plots, stepped_booker, stepped_farm
from tests.integration.accounting.games import GENERATED, machine_on, play
from tests.integration.accounting.plots import Plot
from tests.kit.mutants import changed_code, changed_script

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
    """A rule taken out: in the file ``where`` of lua/, or in the module, ``rule`` reads ``instead``.

    ``plot`` is the story that the games tell often; ``symptom`` what an invariant of the machine says in the end;
    ``kind`` the kind of store they are of.
    """

    where: str | ModuleType
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
    "no in-flight carry": Mutant(differences, "in_flight and too_old", "in_flight", plots.in_flight_during_a_recompute),
    "age judged by the clock at apply time": Mutant(
        recompute,
        "is_too_old(record, seen, mark.seconds,",
        "is_too_old(record, seen_an_age_ago(ledger.client, mark, clock(), age_seconds), ledger.mark().seconds,",
        plots.recompute_that_stalls,
    ),
    "what was confirmed after the mark is removed": Mutant(
        differences,
        "seq > mark_seq",
        "False",
        plots.booked_during_a_recompute,
    ),
    "anything absent is removed": Mutant(
        differences,
        "if in_flight or changed_since_mark:",
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
    "bootstrap that does not wait": Mutant(bootstrap, "self._wait()", "pass", plots.lost_before_its_commit),
    "age judged by Redis TIME alone": Mutant(
        age_marks, " and record.changed_seq <= seen_seq", "", plots.clock_set_forward
    ),
    "unknown COMMIT rolled back": Mutant(
        stepped_booker,
        "        if committed is None:\n            return\n",
        "        committed = committed or []\n",
        plots.committed_without_an_answer,
    ),
    "deadline that the client keeps": Mutant(
        stepped_farm, "end_sessions(self._at_once, pids)", "pass", plots.stopped_before_its_commit
    ),
    "COMMIT that hangs and is not asked for": Mutant(
        recompute, "frozenset[str]() if stalled else old", "old", plots.commit_that_hangs
    ),
    "bootstrap that does not wait for a COMMIT that hangs": Mutant(
        bootstrap,
        "while may_still_commit(self._engine, self._age):",
        "while False:",
        plots.lost_while_a_commit_hangs,
    ),
    "booking that never grows too old": Mutant(
        age_marks,
        "mark_seconds - record.booked_at >= age_seconds",
        "False",
        plots.in_flight_during_a_recompute,
        DIVERGED,
    ),
    "wipe that an overtaken filler can do": Mutant(
        bootstrap,
        'self._ledger.call_under(id_calls("free", part, filling.text, "all"))',
        "self._client.unlink(*part)",
        plots.overtaken_filler,
    ),
    "successor of a dead filler that does not wait": Mutant(
        bootstrap,
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
        differences,
        "for proc_id, record in self.check.records.items()}",
        "for proc_id, record in self.check.records.items() if record.state == 'C'}",
        plots.in_flight_during_a_recompute,
        MISCOUNTED,
        "dual",
    ),
    "swap that leaves out what another consistency check reads": Mutant(
        foreign_decrements,
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
def mutant(request: pytest.FixtureRequest) -> Iterator[Mutant]:
    """One rule is out until the test is over."""
    mutant: Mutant = request.param
    changes = {mutant.rule: mutant.instead}
    where = mutant.where
    with changed_script(where, changes) if isinstance(where, str) else changed_code(where, changes):
        yield mutant


def test_a_ledger_without_one_of_its_rules_is_found_out(
    mutant: Mutant, database_url: str, redis_client: redis.Redis, settings_url: str
) -> None:
    with machine_on(database_url, settings_url) as machine:
        machine.plots, machine.kinds = (mutant.plot.__name__,), (mutant.kind,)
        with pytest.raises(AssertionError, match=mutant.symptom) as found:
            play(machine, games=GAMES, steps=STEPS, number=0, phases=GENERATED)
        print(f"found by game {machine.done['games']}: {found.value}")
