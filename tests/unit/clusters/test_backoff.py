from opencue_sched.clusters.backoff import MemoryBackOff, SleepReason, sleep_seconds
from opencue_sched.settings import Queue


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_sleep_lasts_as_long_as_its_reason_asks() -> None:
    queue = Queue(cluster_empty_sleep=30, cluster_saturated_sleep=5)

    assert sleep_seconds(SleepReason.EMPTY, queue) == 30
    assert sleep_seconds(SleepReason.SATURATED, queue) == 5
    assert sleep_seconds(SleepReason.QUERY_ERROR, queue) == 30


def test_a_sleeping_cluster_wakes_by_itself_when_its_time_is_over() -> None:
    clock = FakeClock()
    back_off = MemoryBackOff(clock)
    back_off.sleep("a", 5)
    back_off.sleep("b", 30)

    clock.now += 4
    assert back_off.remaining(["a", "b", "c"]) == {"a": 1.0, "b": 26.0}
    clock.now += 1
    assert back_off.remaining(["a", "b", "c"]) == {"b": 25.0}


def test_a_new_sleep_replaces_the_old_one_even_when_shorter() -> None:
    clock = FakeClock()
    back_off = MemoryBackOff(clock)
    back_off.sleep("a", 30)
    back_off.sleep("a", 5)

    assert back_off.remaining(["a"]) == {"a": 5.0}


def test_wake_and_retain_forget_only_what_they_name() -> None:
    back_off = MemoryBackOff(FakeClock())
    for key in "abc":
        back_off.sleep(key, 30)

    back_off.wake(["a", "never-slept"])
    assert set(back_off.remaining("abc")) == {"b", "c"}
    back_off.retain(["c"])
    assert set(back_off.remaining("abc")) == {"c"}
