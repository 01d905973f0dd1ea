"""Which running frames of a dry-run farm are over, and in which order they end."""

from __future__ import annotations

from benchmarks.frame_ends import RunningFrames, RunningProc


def proc(number: int, booked_at: float = 100.0) -> RunningProc:
    return RunningProc(f"p{number}", f"f{number}", "h", "s", "j", "l", 100, 1024, 0, booked_at)


def test_frames_end_when_their_time_is_over_the_longest_overdue_first() -> None:
    # given three frames that run 3, 1 and 2 seconds, the last booked a second later
    seconds = {"p1": 3.0, "p2": 1.0, "p3": 2.0}
    frames = RunningFrames(lambda proc: seconds[proc.id])
    frames.add([proc(1), proc(2), proc(3, booked_at=101.0)])

    # then nothing is over before its time
    assert frames.next_due() == 101.0
    assert frames.take(100.9, most=10) == []

    # and what is over comes in the order of its end, no more than asked for
    assert [due for due, _ in frames.take(103.0, most=2)] == [101.0, 103.0]
    assert [taken.id for _, taken in frames.take(103.0, most=2)] == ["p3"]
    assert len(frames) == 0
    assert frames.next_due() is None


def test_a_frame_that_is_seen_again_is_not_new_and_is_asked_once_how_long_it_runs() -> None:
    asked: list[str] = []
    frames = RunningFrames(lambda proc: asked.append(proc.id) or 1.0)
    assert frames.add([proc(1)]) == [proc(1)]
    assert frames.add([proc(1), proc(2)]) == [proc(2)]
    assert asked == ["p1", "p2"]

    # and one that has ended is not new either: a look may have begun before its end
    frames.take(200.0, most=10)
    assert frames.add([proc(1)]) == []


def test_frames_whose_end_failed_are_due_as_they_were() -> None:
    frames = RunningFrames(lambda _: 1.0)
    frames.add([proc(1), proc(2)])
    taken = frames.take(200.0, most=10)
    frames.put_back(taken)
    assert frames.take(200.0, most=10) == taken
