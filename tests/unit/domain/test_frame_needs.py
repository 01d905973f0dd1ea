"""What a frame takes on a host, rule by rule, and the upstream traps that are not reproduced."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from opencue_sched.dispatch.headroom import subscriptions
from opencue_sched.domain.frame_needs import Dimension, Rules, fewest_cores, minimum_cores, reserve, smallest_need
from opencue_sched.domain.hosts import Host, Resources
from opencue_sched.domain.jobs import Layer
from opencue_sched.domain.states import ThreadMode
from opencue_sched.domain.units import cap_cores, enforced

GIB = 1024 * 1024  # in KB
RULES = Rules(memory_stranded_threshold_kb=2 * GIB)
UNCAPPED = math.inf


def layer(**changes: object) -> Layer:
    """A threadable layer of 1 core and 1 GiB."""
    base = Layer(
        id="layer",
        name="render",
        cores_min_centicores=100,
        cores_max_centicores=0,
        memory_min_kb=1 * GIB,
        gpus_min=0,
        gpu_memory_min_kb=0,
        tags=frozenset({"general"}),
        services=("default",),
        threadable=True,
        waiting_frames=10,
        frames=(),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def host(cores: int = 8, memory_gib: float = 32, *, idle: float | None = None, **changes: object) -> Host:
    """An idle host in thread mode AUTO; ``idle`` cores when it is partly busy."""
    base = Host(
        id="host",
        name="render01",
        facility_id="facility",
        alloc_id="alloc",
        tags=frozenset({"general"}),
        os_names=("linux",),
        thread_mode=ThreadMode.AUTO,
        total_centicores=cores * 100,
        idle_centicores=round((cores if idle is None else idle) * 100),
        total_memory_kb=round(memory_gib * GIB),
        idle_memory_kb=round(memory_gib * GIB),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def cores_of(answer: Resources | Dimension) -> int:
    assert isinstance(answer, Resources), answer
    return answer.cores


def refused(answer: Resources | Dimension) -> Dimension:
    assert isinstance(answer, Dimension), answer
    return answer


def ask(
    a_layer: Layer, a_host: Host, *, rules: Rules = RULES, os_name: str | None = None, left: float = UNCAPPED
) -> Resources | Dimension:
    return reserve(a_layer, a_host, rules, os_name=os_name, job_cores_left=left)


class TestMinimum:
    @pytest.mark.parametrize(
        ("centicores", "cores"),
        [
            (100, 1),
            (400, 4),
            (150, 2),
            (101, 2),
            (50, 1),
            (10, 1),
            (1, 1),
            (0, 8),
            (-100, 7),
            (-200, 6),
            (-50, 7),
            (-800, 0),
        ],
    )
    def test_minimum_in_whole_cores_of_an_eight_core_host(self, centicores: int, cores: int) -> None:
        assert minimum_cores(layer(cores_min_centicores=centicores), host(8)) == cores

    @pytest.mark.parametrize("centicores", [-400, 0, 50, 100, 1600])
    def test_a_layer_that_does_not_thread_takes_exactly_one_core(self, centicores: int) -> None:
        single = layer(cores_min_centicores=centicores, threadable=False, memory_min_kb=30 * GIB)
        assert cores_of(ask(single, host(8))) == 1

    def test_upstream_truncated_a_fractional_minimum_to_zero_and_took_the_whole_host(self) -> None:
        # A service minimum of 10 centicores became 0, "all cores". Here it is one core.
        assert cores_of(ask(layer(cores_min_centicores=10), host(64, 256))) == 1

    def test_upstream_never_found_a_host_for_a_negative_minimum(self) -> None:
        # The negative minimum was cast to an unsigned index key.
        all_but_two = layer(cores_min_centicores=-200)
        assert smallest_need(all_but_two).cores == 1
        assert cores_of(ask(all_but_two, host(8))) == 6

    def test_a_negative_minimum_is_taken_exactly_and_never_threaded_into_the_cores_it_leaves(self) -> None:
        greedy = Rules(memory_stranded_threshold_kb=1000 * GIB, selfish_services=frozenset({"default"}))
        for mode in ThreadMode:
            assert cores_of(ask(layer(cores_min_centicores=-200), host(8, thread_mode=mode), rules=greedy)) == 6

    def test_a_negative_minimum_larger_than_the_host_is_refused_for_good(self) -> None:
        assert ask(layer(cores_min_centicores=-800), host(8)) is Dimension.CORES

    def test_zero_takes_the_whole_host_and_waits_until_it_is_idle(self) -> None:
        whole = layer(cores_min_centicores=0)
        assert cores_of(ask(whole, host(8))) == 8
        assert ask(whole, host(8, idle=7)) is Dimension.CORES

    def test_a_fraction_of_an_idle_core_cannot_be_booked(self) -> None:
        assert refused(ask(layer(), host(8, idle=0.99))) is Dimension.CORES
        assert cores_of(ask(layer(), host(8, idle=1.99))) == 1


class TestThreadModes:
    def test_auto_gives_the_cores_whose_share_of_memory_the_frame_takes(self) -> None:
        # 8 cores and 32 GiB: 4 GiB a core.
        assert cores_of(ask(layer(memory_min_kb=3 * GIB), host())) == 1
        assert cores_of(ask(layer(memory_min_kb=12 * GIB), host())) == 3
        assert cores_of(ask(layer(memory_min_kb=15 * GIB), host())) == 3
        # The share of a core is rounded, not cut off: 256,001 KB here.
        small = host(4, total_memory_kb=1_024_003, idle_memory_kb=1_024_003)
        assert cores_of(ask(layer(memory_min_kb=512_001), small, rules=Rules(memory_stranded_threshold_kb=0))) == 1

    def test_auto_never_gives_less_than_the_minimum(self) -> None:
        assert cores_of(ask(layer(cores_min_centicores=500), host())) == 5

    @pytest.mark.parametrize(("left_kb", "cores"), [(2 * GIB, 8), (2 * GIB - 1, 8), (2 * GIB + 1, 1)])
    def test_auto_takes_all_idle_cores_when_the_memory_left_would_strand_them(self, left_kb: int, cores: int) -> None:
        # The comparison is <=, as in Cuebot.
        tight = host(8, 32, idle_memory_kb=1 * GIB + left_kb)
        assert cores_of(ask(layer(), tight)) == cores

    def test_a_selfish_service_takes_all_idle_cores(self) -> None:
        rules = Rules(memory_stranded_threshold_kb=0, selfish_services=frozenset({"houdini"}))
        assert cores_of(ask(layer(services=("maya", "houdini")), host(8, idle=6), rules=rules)) == 6
        assert cores_of(ask(layer(services=("maya",)), host(8, idle=6), rules=rules)) == 1

    def test_all_takes_every_idle_core_up_to_the_layers_maximum(self) -> None:
        mode_all = host(8, idle=6, thread_mode=ThreadMode.ALL)
        assert cores_of(ask(layer(), mode_all)) == 6
        assert cores_of(ask(layer(cores_max_centicores=400), mode_all)) == 4

    def test_all_takes_only_layers_that_thread(self) -> None:
        assert ask(layer(threadable=False), host(thread_mode=ThreadMode.ALL)) is Dimension.THREAD_MODE

    def test_variable_gives_a_threaded_frame_two_cores(self) -> None:
        variable = host(thread_mode=ThreadMode.VARIABLE)
        assert cores_of(ask(layer(cores_min_centicores=100), variable)) == 2
        assert cores_of(ask(layer(cores_min_centicores=200), variable)) == 2

    @pytest.mark.parametrize("centicores", [100, 150, 200])
    def test_variable_gives_a_small_frame_two_cores_whatever_memory_it_needs(self, centicores: int) -> None:
        heavy = layer(cores_min_centicores=centicores, memory_min_kb=20 * GIB)
        assert cores_of(ask(heavy, host(thread_mode=ThreadMode.VARIABLE))) == 2

    def test_variable_adds_nothing_to_what_a_frame_that_leaves_some_cores_alone_asks_for(self) -> None:
        assert cores_of(ask(layer(cores_min_centicores=-700), host(8, thread_mode=ThreadMode.VARIABLE))) == 1

    def test_variable_does_not_run_a_threaded_frame_on_one_core(self) -> None:
        assert refused(ask(layer(), host(8, idle=1, thread_mode=ThreadMode.VARIABLE))) is Dimension.CORES

    def test_variable_runs_a_frame_on_the_one_core_that_its_job_has_left(self) -> None:
        variable = host(thread_mode=ThreadMode.VARIABLE)
        assert cores_of(ask(layer(), variable, left=1)) == 1
        assert refused(ask(layer(cores_min_centicores=200), variable, left=1)) is Dimension.JOB_CORES

    def test_variable_above_two_cores_is_as_auto(self) -> None:
        variable = host(thread_mode=ThreadMode.VARIABLE)
        assert cores_of(ask(layer(cores_min_centicores=300), variable)) == 3
        assert cores_of(ask(layer(cores_min_centicores=300, memory_min_kb=20 * GIB), variable)) == 5

    def test_variable_leaves_a_layer_that_does_not_thread_alone(self) -> None:
        assert cores_of(ask(layer(threadable=False), host(8, idle=1, thread_mode=ThreadMode.VARIABLE))) == 1


class TestFitting:
    def test_the_layers_maximum_bounds_every_upgrade(self) -> None:
        rules = Rules(memory_stranded_threshold_kb=1000 * GIB)
        assert cores_of(ask(layer(cores_max_centicores=300), host(), rules=rules)) == 3
        assert cores_of(ask(layer(cores_max_centicores=300, memory_min_kb=24 * GIB), host())) == 3

    def test_the_layers_maximum_wins_over_its_minimum(self) -> None:
        assert cores_of(ask(layer(cores_min_centicores=400, cores_max_centicores=200), host())) == 2
        assert cores_of(ask(layer(cores_min_centicores=0, cores_max_centicores=400), host(8, idle=5))) == 4
        assert cores_of(ask(layer(cores_max_centicores=100), host(thread_mode=ThreadMode.VARIABLE))) == 1

    @pytest.mark.parametrize("centicores", [50, 100, 150, 400])
    def test_a_minimum_equal_to_the_maximum_stays_equal_after_rounding(self, centicores: int) -> None:
        fixed = layer(cores_min_centicores=centicores, cores_max_centicores=centicores)
        assert cores_of(ask(fixed, host())) == math.ceil(centicores / 100)

    def test_an_upgrade_shrinks_to_the_idle_cores(self) -> None:
        # The Rust scheduler rejects here; Cuebot shrinks.
        wide = layer(cores_min_centicores=200, memory_min_kb=20 * GIB)
        assert cores_of(ask(wide, host(8, 32, idle=8))) == 5
        assert cores_of(ask(wide, host(8, 32, idle=3))) == 3

    def test_shrinking_stops_at_the_minimum(self) -> None:
        assert refused(ask(layer(cores_min_centicores=400), host(8, idle=3))) is Dimension.CORES

    def test_upstream_let_a_threaded_frame_grab_a_whole_host_that_a_small_job_cap_then_rejected_for_ever(self) -> None:
        rules = Rules(memory_stranded_threshold_kb=1000 * GIB)
        assert cores_of(ask(layer(), host(64, 256), rules=rules, left=4)) == 4

    def test_the_jobs_remainder_never_cuts_below_the_minimum(self) -> None:
        wide = layer(cores_min_centicores=400)
        assert ask(wide, host(), left=3) is Dimension.JOB_CORES
        assert fewest_cores(wide, host()) == 4

    @pytest.mark.parametrize("minimum", [0, -100])
    def test_upstream_let_sentinel_minimums_slip_past_the_at_cap_test(self, minimum: int) -> None:
        # "0 < 0" is false, so a job with nothing left still took a whole host.
        sentinel = layer(cores_min_centicores=minimum)
        assert smallest_need(sentinel).cores > 0
        assert refused(ask(sentinel, host(), left=0)) is Dimension.JOB_CORES

    def test_a_job_cap_of_a_fraction_of_a_core_refuses_everything(self) -> None:
        assert refused(ask(layer(), host(), left=0.5)) is Dimension.JOB_CORES

    def test_a_fraction_left_under_the_job_cap_is_not_booked(self) -> None:
        rules = Rules(memory_stranded_threshold_kb=1000 * GIB)
        assert cores_of(ask(layer(), host(), rules=rules, left=2.5)) == 2


class TestMemoryAndGpus:
    def test_memory_and_gpus_reserved_are_the_layers_minimums(self) -> None:
        gpu_host = host(total_gpus=4, idle_gpus=4, total_gpu_memory_kb=48 * GIB, idle_gpu_memory_kb=48 * GIB)
        answer = ask(layer(memory_min_kb=3 * GIB + 7, gpus_min=2, gpu_memory_min_kb=8 * GIB), gpu_host)
        assert answer == Resources(cores=1, memory_kb=3 * GIB + 7, gpus=2, gpu_memory_kb=8 * GIB)

    def test_upstream_counted_1000_bytes_a_kb_and_lost_two_percent_of_the_memory(self) -> None:
        # What the database says is what is reserved, to the KB.
        answer = ask(layer(memory_min_kb=4_194_304), host())
        assert isinstance(answer, Resources)
        assert answer.memory_kb == 4_194_304
        assert cores_of(ask(layer(memory_min_kb=4_194_304), host(8, 4, idle=8))) == 8

    def test_least_memory_a_proc_reserves(self) -> None:
        answer = ask(layer(memory_min_kb=10), host())
        assert isinstance(answer, Resources)
        assert answer.memory_kb == 256_000

    @pytest.mark.parametrize(
        ("wants", "has", "dimension", "permanent"),
        [
            ({"memory_min_kb": 5 * GIB}, {"idle_memory_kb": 4 * GIB}, Dimension.MEMORY, False),
            ({"memory_min_kb": 33 * GIB}, {}, Dimension.MEMORY, True),
            ({"gpus_min": 1}, {}, Dimension.GPUS, True),
            ({"gpus_min": 1}, {"total_gpus": 1}, Dimension.GPUS, False),
            ({"gpu_memory_min_kb": 1}, {}, Dimension.GPU_MEMORY, True),
            ({"gpu_memory_min_kb": 1}, {"total_gpu_memory_kb": 1}, Dimension.GPU_MEMORY, False),
            ({"cores_min_centicores": 900}, {}, Dimension.CORES, True),
        ],
    )
    def test_each_dimension_is_refused_by_name(
        self, wants: dict[str, int], has: dict[str, int], dimension: Dimension, permanent: bool
    ) -> None:
        assert ask(layer(**wants), host(**has)) is dimension
        assert isinstance(ask(layer(**wants), host(**has).idle()), Dimension) is permanent

    def test_a_host_reporting_nonsense_takes_nothing_and_breaks_nothing(self) -> None:
        nonsense = host(0, 0, idle_memory_kb=-1)
        assert refused(ask(layer(memory_min_kb=0), nonsense)) is Dimension.CORES
        no_memory = host(8, 0)
        assert refused(ask(layer(memory_min_kb=0), no_memory)) is Dimension.MEMORY


class TestOs:
    def test_upstream_compared_the_hosts_list_of_os_whole(self) -> None:
        both = host(os_names=("rocky9", "linux"))
        assert isinstance(ask(layer(), both, os_name="linux"), Resources)
        assert refused(ask(layer(), both, os_name="windows")) is Dimension.OS

    @pytest.mark.parametrize("os_name", [None, ""])
    def test_a_job_without_an_os_runs_anywhere(self, os_name: str | None) -> None:
        assert isinstance(ask(layer(), host(os_names=()), os_name=os_name), Resources)


class TestCaps:
    def test_zero_and_negative_caps_of_folders_and_jobs_are_no_caps(self) -> None:
        assert enforced(cap_cores(0)) is enforced(cap_cores(-1)) is enforced(cap_cores(-100)) is None
        assert enforced(0) is enforced(-1) is enforced(None) is None

    def test_positive_caps_are_in_whole_cores_and_never_become_zero(self) -> None:
        assert enforced(cap_cores(250)) == 2
        assert enforced(cap_cores(50)) == 0.5
        assert enforced(3) == 3

    def test_a_burst_is_always_a_cap(self) -> None:
        rows = [SimpleNamespace(show_id="show", alloc_id=it, burst_centicores=it) for it in (0, -100, 1250)]
        capped = subscriptions(rows, lambda _: {})  # type: ignore[arg-type]
        assert [caps.cores.cap for caps in capped.values()] == [0, 0, 12]


layers = st.builds(
    layer,
    cores_min_centicores=st.integers(1, 400) | st.integers(-400, 800) | st.integers(-2000, 6400),
    cores_max_centicores=st.just(0) | st.integers(100, 1600) | st.integers(-100, 6400),
    memory_min_kb=st.integers(0, GIB) | st.integers(0, 4 * GIB) | st.integers(0, 64 * GIB),
    gpus_min=st.just(0) | st.integers(-1, 0) | st.integers(-1, 3),
    gpu_memory_min_kb=st.just(0) | st.integers(0, GIB) | st.integers(0, 4 * GIB),
    threadable=st.booleans(),
    services=st.sampled_from([("default",), ("selfish",), ("a", "selfish")]),
)


@st.composite
def hosts(draw: st.DrawFn) -> Host:
    total = draw(st.integers(800, 6400) | st.integers(400, 1600) | st.integers(0, 6400))
    memory = draw(st.integers(8 * GIB, 128 * GIB) | st.integers(4 * GIB, 16 * GIB) | st.integers(0, 128 * GIB))
    gpus = draw(st.integers(0, 4))

    def idle(whole: int) -> int:
        return draw(st.just(whole) | st.integers(whole // 2, whole) | st.integers(0, whole))

    return host(
        total_centicores=total,
        idle_centicores=idle(total),
        total_memory_kb=memory,
        idle_memory_kb=idle(memory),
        total_gpus=gpus,
        idle_gpus=idle(gpus),
        total_gpu_memory_kb=gpus * 8 * GIB,
        idle_gpu_memory_kb=idle(gpus * 8 * GIB),
        thread_mode=draw(st.just(ThreadMode.AUTO) | st.sampled_from(list(ThreadMode))),
    )


rules_values = st.builds(
    Rules,
    memory_stranded_threshold_kb=st.integers(0, 64 * GIB),
    selfish_services=st.sampled_from([frozenset(), frozenset({"selfish"})]),
)
remainders = st.just(UNCAPPED) | st.floats(1, 100) | st.floats(0, 100)


@given(layers, hosts(), rules_values, remainders)
def test_a_reservation_fits_the_host_and_the_job_and_covers_the_need(
    a_layer: Layer, a_host: Host, rules: Rules, left: float
) -> None:
    answer = ask(a_layer, a_host, rules=rules, left=left)
    assume(isinstance(answer, Resources))
    after = a_host.less(answer)
    assert min(after.idle_centicores, after.idle_memory_kb, after.idle_gpus, after.idle_gpu_memory_kb) >= 0
    assert 1 <= answer.cores <= left
    need = smallest_need(a_layer)
    assert answer.cores >= need.cores
    assert (answer.memory_kb, answer.gpus, answer.gpu_memory_kb) == (need.memory_kb, need.gpus, need.gpu_memory_kb)
    if a_layer.threadable and a_layer.cores_max_centicores > 0:
        assert answer.cores <= math.ceil(a_layer.cores_max_centicores / 100)
    if not a_layer.threadable:
        assert answer.cores == 1


@given(layers, hosts(), rules_values, remainders)
def test_a_refused_frame_is_refused_on_the_same_host_with_less_idle(
    a_layer: Layer, a_host: Host, rules: Rules, left: float
) -> None:
    assume(isinstance(ask(a_layer, a_host, rules=rules, left=left), Dimension))
    smaller = replace(
        a_host, idle_centicores=a_host.idle_centicores // 2, idle_memory_kb=a_host.idle_memory_kb // 2, idle_gpus=0
    )
    assert isinstance(ask(a_layer, smaller, rules=rules, left=left), Dimension)


@given(layers, hosts(), rules_values)
def test_what_the_idle_host_refuses_the_busy_one_refuses_too(a_layer: Layer, a_host: Host, rules: Rules) -> None:
    assume(isinstance(ask(a_layer, a_host.idle(), rules=rules), Dimension))
    assert isinstance(ask(a_layer, a_host, rules=rules), Dimension)
