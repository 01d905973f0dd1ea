"""Keys, entries, epochs, caps, ages and sums: the pure parts of accounting."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencue_sched.accounting import keys
from opencue_sched.accounting.age_marks import is_too_old
from opencue_sched.accounting.consistency import ConsistencyCheck, EntryChange, drift, entry_at
from opencue_sched.accounting.epoch import Epoch
from opencue_sched.accounting.foreign_decrements import counters
from opencue_sched.accounting.keys import Booking, EntryState, Record, amounts, read_caps, unpack, unpack_entry
from opencue_sched.domain.caps import Vertices
from opencue_sched.errors import InvalidInput

VERTICES = Vertices("s", "a", "f", "j", "l", "d", ("n2", "n1"))
ENTRY = "4|1|s|a|f|j|l|d|n1,n2"


class TestKeys:
    def test_names_are_those_of_the_reference(self) -> None:
        assert keys.counted(VERTICES) == (
            *("acct:sub:s:a", "acct:folder:f", "acct:job:j", "acct:layer:l", "acct:point:d:s"),
            *("acct:limit:n2", "acct:limit:n1"),
        )
        assert keys.capped(VERTICES) == (
            *("acct:sub:s:a", "acct:folder:f", "acct:job:j"),
            *("acct:limit:n2", "acct:limit:n1"),
        )

    def test_an_empty_id_is_no_vertex(self) -> None:
        assert keys.counted(Vertices("s", "", "", "", "", "")) == ()

    @pytest.mark.parametrize("key", keys.counted(VERTICES))
    def test_every_vertex_key_is_read_back(self, key: str) -> None:
        found = keys.parse(key)
        assert found is not None
        kind, ids = found
        assert key == ":".join(("acct", kind.value, *ids))

    @pytest.mark.parametrize(
        "key", ["acct:seq", "acct:ledger", "acct:epoch", "acct:tomb:5", "acct:sub:s", "acct:job:a:b", "cue:job:x", ""]
    )
    def test_other_keys_are_no_vertices(self, key: str) -> None:
        assert keys.parse(key) is None


class TestEntries:
    def test_an_entry_is_one_line_with_sorted_limits(self) -> None:
        assert Booking("p", VERTICES, 4, 1).packed() == ENTRY

    def test_a_record_is_read_back(self) -> None:
        assert unpack("p", f"1|F|1700000000|17|me|{ENTRY}") == Record(
            "p", EntryState.IN_FLIGHT, 1700000000, 17, "me", ENTRY
        )
        assert unpack_entry("p", ENTRY).vertices.limit_ids == ("n1", "n2")
        assert unpack("p", f"1|C|1700000000|17|me|{ENTRY}").show_id == "s"

    @pytest.mark.parametrize(
        "record", ["", "2|F|1|1|me|" + ENTRY, "1|X|1|1|me|" + ENTRY, "1|F|x|1|me|" + ENTRY, "1|F|1|1|me|4|1|s"]
    )
    def test_a_record_of_something_else_is_refused(self, record: str) -> None:
        with pytest.raises(InvalidInput, match=r"proc p\b"):
            unpack("p", record)

    def test_an_entry_adds_cores_to_vertices_and_a_frame_to_limits(self) -> None:
        assert {key: (cores, gpus) for key, cores, gpus in amounts(ENTRY)} == {
            **dict.fromkeys(["acct:sub:s:a", "acct:folder:f", "acct:job:j", "acct:layer:l", "acct:point:d:s"], (4, 1)),
            **dict.fromkeys(["acct:limit:n1", "acct:limit:n2"], (1, 0)),
        }


class TestEpochs:
    def test_an_open_epoch_names_its_redis_process(self) -> None:
        epoch = Epoch.new("run7")
        assert Epoch.parse(epoch.text) == epoch
        assert (epoch.run_id, epoch.dual) == ("run7", False)

    def test_no_two_generations_are_alike(self) -> None:
        assert Epoch.new("run") != Epoch.new("run")

    def test_a_dual_epoch_says_so_and_still_names_its_process(self) -> None:
        epoch = Epoch.new("run7", dual=True)
        assert (epoch.run_id, epoch.dual, Epoch.parse(epoch.text)) == ("run7", True, epoch)

    @pytest.mark.parametrize(
        "text",
        [None, "", "open", "open|x", Epoch.new("run", state="filling").text],
        ids=["missing", "empty", "cut", "short", "filling"],
    )
    def test_nothing_else_is_open(self, text: str | None) -> None:
        assert Epoch.parse(text) is None

    def test_text_that_is_no_epoch_has_no_process(self) -> None:
        assert Epoch("junk").run_id == ""


class TestCaps:
    def test_missing_fields_mean_unseeded(self) -> None:
        assert read_caps("acct:sub:s:a", ["3", "0", None]) is None
        assert read_caps("acct:job:j", ["3", "0", "5", None]) is None

    def test_a_burst_is_a_cap_even_when_it_is_zero(self) -> None:
        caps = read_caps("acct:sub:s:a", ["3", "1", "0"])
        assert caps is not None
        assert (caps.cores, caps.max_cores, caps.max_gpus) == (3, 0, None)

    def test_folder_and_job_caps_of_zero_and_below_are_unlimited(self) -> None:
        caps = read_caps("acct:folder:f", [None, None, "-1", "0"])
        assert caps is not None
        assert (caps.max_cores, caps.max_gpus) == (None, None)

    def test_a_limit_is_lowered_by_foreign_frames(self) -> None:
        caps = read_caps("acct:limit:n", ["2", "3", "10", ""])
        assert caps is not None
        assert (caps.frames, caps.max_frames, caps.max_cores) == (2, 7, None)

    def test_a_limit_that_counts_machines_bounds_no_frames(self) -> None:
        caps = read_caps("acct:limit:n", ["2", "3", "10", "10"])
        assert caps is not None
        assert (caps.counts_machines, caps.frames, caps.max_frames) == (True, 2, None)


class TestAge:
    record = Record("p", EntryState.IN_FLIGHT, 1000, 17, "me", ENTRY)

    @pytest.mark.parametrize(
        ("redis_time", "seen_seq", "old"),
        [(1040, 17, True), (1039, 17, False), (1040, 16, False), (9999, 16, False), (9999, -1, False)],
    )
    def test_both_clocks_must_say_so_of_the_entry_as_it_is(self, redis_time: int, seen_seq: int, old: bool) -> None:
        assert is_too_old(self.record, seen_seq, redis_time, age_seconds=40) is old

    def test_only_a_booking_in_flight_grows_too_old(self) -> None:
        settled = replace(self.record, state=EntryState.CONFIRMED)
        assert not is_too_old(settled, 17, 9999, age_seconds=40)


def check(records: dict[str, str], events: list[EntryChange], **counted: tuple[int, int, int]) -> ConsistencyCheck:
    """``counted``: job id to (sequence number of the reading, cores, GPUs)."""
    return ConsistencyCheck(
        Epoch("open|g|r"),
        {i: Record(i, EntryState.CONFIRMED, 0, 0, "me", entry) for i, entry in records.items()},
        {keys.job(job): (seq, (cores, gpus)) for job, (seq, cores, gpus) in counted.items()},
        events,
        True,
    )


class TestStock:
    def test_an_entry_is_known_at_any_moment_from_its_events(self) -> None:
        came, went = EntryChange(5, True, "p", "e"), EntryChange(9, False, "p", "e")
        assert [entry_at([came, went], seq) for seq in (4, 5, 8, 9)] == [None, "e", "e", None]
        assert [entry_at([went], seq) for seq in (8, 9)] == ["e", None]
        moved = [EntryChange(5, False, "p", "old"), EntryChange(5, True, "p", "new")]
        assert [entry_at(moved, seq) for seq in (4, 5)] == ["old", "new"]

    def test_counters_that_agree_do_not_drift(self) -> None:
        assert drift(check({"p": "4|1||||j|||"}, [], j=(3, 4, 1))) == {}

    def test_what_is_off_is_told_by_how_much(self) -> None:
        assert drift(check({"p": "4|1||||j|||"}, [], j=(3, 9, 0), k=(3, 2, 0))) == {
            keys.job("j"): (5, -1),
            keys.job("k"): (2, 0),
        }

    def test_a_booking_after_the_reading_is_not_held_against_it(self) -> None:
        assert drift(check({"p": "4|0||||j|||"}, [EntryChange(4, True, "p", "4|0||||j|||")], j=(3, 0, 0))) == {}

    def test_a_release_after_the_reading_is_not_either(self) -> None:
        assert drift(check({}, [EntryChange(4, False, "p", "4|0||||j|||")], j=(3, 4, 0))) == {}

    @given(
        history=st.lists(st.tuples(st.sampled_from("pqr"), st.integers(1, 4)), max_size=12),
        begin=st.integers(0, 12),
        reading=st.integers(0, 12),
        scans=st.lists(st.integers(0, 12), min_size=3, max_size=3),
    )
    def test_the_sum_is_exact_wherever_the_scan_and_the_reading_fall(
        self, history: list[tuple[str, int]], begin: int, reading: int, scans: list[int]
    ) -> None:
        """Entries come and go; the log starts at ``begin``, ids are scanned and the counter read at later steps."""
        states: list[dict[str, str]] = [{}]
        events: list[EntryChange] = []
        for seq, (proc_id, cores) in enumerate(history, start=1):
            now = dict(states[-1])
            entry = f"{cores}|0||||j|||"
            if proc_id in now:
                events.append(EntryChange(seq, False, proc_id, now.pop(proc_id)))
            else:
                now[proc_id] = entry
                events.append(EntryChange(seq, True, proc_id, entry))
            states.append(now)

        def later(step: int) -> int:
            return min(max(step, begin), len(history))

        scanned = {p: states[later(at)][p] for p, at in zip("pqr", scans, strict=True) if p in states[later(at)]}
        cores = sum(int(entry.split("|")[0]) for entry in states[later(reading)].values())
        logged = [event for event in events if event.seq > begin]
        assert drift(check(scanned, logged, j=(later(reading), cores, 0))) == {}


class TestCas:
    def test_stored_vertices_without_entries_are_zero_and_limits_are_left_out(self) -> None:
        assert {key: (c, g) for key, c, g in counters(["4|1|||f|j|||n1", "2|0|||f||||"], ["acct:job:gone"])} == {
            "acct:folder:f": (6, 1),
            "acct:job:j": (4, 1),
            "acct:job:gone": (0, 0),
        }
