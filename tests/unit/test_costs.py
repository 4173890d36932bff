"""The predictions of `unisono plan`: copies of the gradient, memory by part, time, candidates."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest

from unisono.cli.planning.device_rows import device_lines, duration, small_devices
from unisono.cli.planning.plan_command import bytes_of_text
from unisono.config import CommandLine
from unisono.costs.candidates import Candidate, candidate, ranked
from unisono.costs.device_costs import costs_on, offers_of, smallest_need
from unisono.costs.device_table import KNOWN, Device, DeviceFileError, read_devices
from unisono.costs.memory_model import MeasuredPeaks, memory_of, moments
from unisono.costs.placements import Placement, counts_up_to, placements
from unisono.costs.recorded_costs import RecordedCosts, RoundBytes, StateBytes, StepSeconds, costs_of, step_seconds
from unisono.costs.time_model import ShortRuns, rounds_of_busiest, seconds_of
from unisono.errors import SettingsError
from unisono.plan.assignment import assign_evenly
from unisono.plan.reduction_tree import copies, subtrees

MB = 10**6
COSTS = RecordedCosts(
    state=StateBytes(100 * MB, MB, 100 * MB, 200 * MB, ((40 * MB, 40 * MB), (40 * MB, 40 * MB), (20 * MB, 20 * MB))),
    rounds=RoundBytes(activations=50 * MB, first=120 * MB, following=60 * MB, update=5 * MB, layers={}),
    process=300 * MB,
    peak=0,
    shard_imports=10 * MB,
    micro_batches=(1,) * 8,
    samples=64,
    seconds=StepSeconds(0.1, 0.02, 0.01),
    flops=0,
    threads=1,
)
REPLICAS, SHARDS, BY_STEP = Placement(2), Placement(1, 2), Placement(1, 2, by_layer=False)
GROUPS = Placement(2, 2)
RUNS = ShortRuns(
    COSTS.seconds,
    {
        REPLICAS: StepSeconds(0.11, 0.03, 0.05),
        Placement(4): StepSeconds(0.22, 0.06, 0.1),
        SHARDS: StepSeconds(0.17, 0.02, 0.02),
        BY_STEP: StepSeconds(0.11, 0.02, 0.09),
        GROUPS: StepSeconds(0.3, 0.04, 0.06),
    },
    cores=2,
)


@pytest.mark.parametrize("virtual_ranks", [1, 2, 3, 6, 8, 13, 32])
def test_the_exchange_never_holds_more_copies_than_the_tree_needs(virtual_ranks: int) -> None:
    for size in range(1, virtual_ranks + 1):
        for span in assign_evenly(virtual_ranks, size):
            for pieces in (1, 2):
                found = moments(virtual_ranks, span, [pieces] * virtual_ranks, size)
                assert len(found) == pieces * (span[1] - span[0])
                kept = len(subtrees(virtual_ranks, *span)) - 1  # flat copies stay allocated from step to step
                most = max(moment.copies + moment.appears for moment in found)
                assert most <= copies(virtual_ranks, *span) + kept


def test_one_virtual_rank_on_one_process_has_the_gradients_of_autograd() -> None:
    assert [tuple(moment) for moment in moments(1, (0, 1), [2], 1)] == [(0, True), (1, False)]


def test_a_virtual_rank_without_samples_is_left_out() -> None:
    assert len(moments(4, (0, 4), [1, 0, 1, 0], 1)) == 2


def test_shards_divide_what_they_say() -> None:
    whole, parts = memory_of(COSTS, REPLICAS), memory_of(COSTS, SHARDS)
    assert (whole.parameters, whole.optimizer) == (100 * MB, 200 * MB)
    assert (parts.parameters, parts.optimizer, parts.gradients) == (50 * MB, 100 * MB, 50 * MB)
    by_step = memory_of(COSTS, BY_STEP)
    assert by_step.gathered == 100 * MB
    assert by_step.optimizer == 100 * MB
    many = replace(COSTS, state=replace(COSTS.state, groups=((8 * MB, 8 * MB),) * 12 + ((4 * MB, 4 * MB),)))
    assert memory_of(many, SHARDS).total < memory_of(many, BY_STEP).total


def test_one_process_is_predicted_as_it_was_measured() -> None:
    measured = memory_of(COSTS).total + 7 * MB
    costs = replace(COSTS, peak=measured)
    assert memory_of(costs).total == measured
    assert memory_of(costs, REPLICAS).unexplained == 7 * MB


def test_what_several_processes_needed_is_added() -> None:
    plain = replace(COSTS, peak=memory_of(COSTS).total + 7 * MB)
    replicas, shards = memory_of(plain, REPLICAS).total + 3 * MB, memory_of(plain, SHARDS).total - 2 * MB
    peaks = MeasuredPeaks(plain, None, {REPLICAS: replicas, SHARDS: shards})
    assert memory_of(plain, REPLICAS, peaks).total == replicas
    assert memory_of(plain, SHARDS, peaks).total == shards
    assert memory_of(plain, peaks=peaks).total == plain.peak
    for other in (BY_STEP, Placement(4)):
        assert memory_of(plain, other, peaks) == memory_of(plain, other)
    again = replace(plain, rounds=replace(RoundBytes(10 * MB, 80 * MB, 20 * MB, 5 * MB, {})), peak=0)
    assert memory_of(again, replace(REPLICAS, recompute=True), peaks).unexplained == 3 * MB


def test_recomputation_on_more_processes_needs_what_two_needed() -> None:
    plain = replace(COSTS, peak=memory_of(COSTS).total + 7 * MB)
    again = replace(plain, rounds=RoundBytes(10 * MB, 80 * MB, 20 * MB, 5 * MB, {}))
    recomputed, four = replace(REPLICAS, recompute=True), Placement(4)
    found = {REPLICAS: 3 * MB, four: 4 * MB, SHARDS: MB}
    peaks = {each: memory_of(plain, each).total + more for each, more in found.items()}
    peaks[recomputed] = memory_of(again, recomputed).total - 5 * MB
    measured = MeasuredPeaks(plain, again, peaks)
    assert memory_of(plain, REPLICAS, measured).total == peaks[REPLICAS]
    assert memory_of(again, recomputed, measured).total == peaks[recomputed]
    assert measured.beyond(replace(four, recompute=True)) == -5 * MB
    assert measured.beyond(GROUPS) == 0
    assert measured.beyond(replace(SHARDS, recompute=True)) == MB, "without a measurement of two shards"
    shards = replace(SHARDS, recompute=True)
    peaks |= {shards: memory_of(again, shards).total - 2 * MB, GROUPS: memory_of(plain, GROUPS).total + 6 * MB}
    assert memory_of(again, shards, measured).total == peaks[shards]
    assert measured.beyond(replace(GROUPS, recompute=True)) == -2 * MB
    assert measured.beyond(Placement(recompute=True)) == 0, "one process with recomputation was measured itself"
    on_host = replace(SHARDS, offload=True)
    peaks[on_host] = memory_of(plain, on_host).total + 9 * MB
    assert measured.beyond(replace(on_host, recompute=True)) == -2 * MB


def test_shards_on_the_host_take_no_memory_of_a_device() -> None:
    on_host = replace(SHARDS, offload=True)
    assert memory_of(COSTS, on_host) == memory_of(COSTS, SHARDS), "on a CPU it is the same memory"
    found, before = memory_of(replace(COSTS, on_cpu=False), on_host), memory_of(COSTS, SHARDS)
    assert (found.parameters, found.optimizer, found.gradients) == (0, 0, 0)
    assert before.total - found.total == before.parameters + before.optimizer + before.gradients
    by_step = memory_of(replace(COSTS, on_cpu=False), replace(BY_STEP, offload=True))
    assert (by_step.parameters, by_step.optimizer, by_step.gradients) == (0, 0, 100 * MB)


def test_what_was_measured_is_predicted_as_it_was() -> None:
    assert seconds_of(COSTS, RUNS, Placement()) == pytest.approx(8 * 0.1 + 0.02 + 0.01)
    assert seconds_of(COSTS, RUNS, REPLICAS) == pytest.approx(4 * 0.11 + 0.03 + 0.05)
    assert seconds_of(COSTS, RUNS, SHARDS) == pytest.approx(4 * 0.17 + 0.02 + 0.02)
    assert seconds_of(COSTS, RUNS, BY_STEP) == pytest.approx(4 * 0.11 + 0.02 + 0.09)
    assert seconds_of(COSTS, RUNS, GROUPS) == pytest.approx(2 * 0.3 + 0.04 + 0.06)


def test_recomputation_that_was_measured_is_predicted_as_it_was() -> None:
    recomputed, took = replace(REPLICAS, recompute=True), StepSeconds(0.2, 0.03, 0.04)
    runs = replace(RUNS, together={**RUNS.together, recomputed: took})
    assert seconds_of(COSTS, runs, recomputed) == pytest.approx(4 * 0.2 + 0.03 + 0.04)
    assert seconds_of(COSTS, runs, REPLICAS) == seconds_of(COSTS, RUNS, REPLICAS)


def test_two_processes_show_how_long_recomputation_takes_on_more() -> None:
    two = {replace(REPLICAS, recompute=True): 0.2, replace(SHARDS, recompute=True): 0.26}
    runs = replace(RUNS, together={**RUNS.together, **{each: StepSeconds(t, 9.0, 9.0) for each, t in two.items()}})
    again = replace(COSTS, seconds=StepSeconds(0.13, 0.02, 0.01))
    four = seconds_of(again, runs, Placement(4, recompute=True))
    assert four == pytest.approx(2 * (0.22 + 2 * 0.09) + 0.06 + 0.1), "a process of four is twice as slow"
    groups = seconds_of(again, runs, replace(GROUPS, recompute=True))
    assert groups == pytest.approx(2 * (0.3 + 2 * 0.09) + 0.04 + 0.06)
    by_step = seconds_of(again, runs, replace(BY_STEP, recompute=True))
    assert by_step == pytest.approx(4 * (0.11 + 1.1 * 0.03) + 0.02 + 0.09), "that pair was not measured"


def test_recomputation_makes_micro_batches_longer() -> None:
    again = replace(COSTS, seconds=StepSeconds(0.13, 0.02, 0.01))  # with recomputation
    found = {each: seconds_of(again, RUNS, replace(each, recompute=True)) for each in RUNS.together}
    assert found[REPLICAS] == pytest.approx(4 * (0.11 + 1.1 * 0.03) + 0.03 + 0.05)
    assert found[SHARDS] == pytest.approx(4 * (0.17 + 1.1 * 0.03) + 0.02 + 0.02)
    assert found[GROUPS] == pytest.approx(2 * (0.3 + 2.2 * 0.03) + 0.04 + 0.06)
    alone = replace(RUNS, together={GROUPS: RUNS.together[GROUPS]})  # no replicas: four processes share two cores
    slowed = seconds_of(again, alone, replace(GROUPS, recompute=True))
    assert slowed == pytest.approx(2 * (0.3 + 2 * 0.03) + 0.04 + 0.06)
    assert seconds_of(again, RUNS, Placement(recompute=True)) == pytest.approx(8 * 0.13 + 0.02 + 0.01)


def test_a_time_that_was_not_measured_is_not_known() -> None:
    assert seconds_of(COSTS, RUNS, Placement(3)) is None
    assert seconds_of(replace(COSTS, seconds=None), RUNS, Placement()) is None
    assert seconds_of(replace(COSTS, seconds=None), RUNS, replace(REPLICAS, recompute=True)) is None
    assert seconds_of(COSTS, replace(RUNS, together={}), SHARDS) is None


def test_placements_are_typed_as_they_are() -> None:
    assert [each.layout for each in (Placement(), REPLICAS, SHARDS, GROUPS)] == [
        {},
        {"replicate": "2"},
        {"shard": "2"},
        {"replicate": "2", "shard": "2"},
    ]
    assert BY_STEP.layout == {"shard": "2", "reshard": "step"}
    for each in placements(4, offload=True):
        assert {f"parallel.{name}={value}" for name, value in each.layout.items() if name != "replicate"} == {
            text for text in each.sets if "activation" not in text
        }


def test_the_slowest_process_decides() -> None:
    step = {"data": 0.1, "forward": 1.0, "backward": 2.0, "update": 0.5, "seconds": 4.0}
    slow = {**step, "forward": 2.0, "update": 0.25}
    found = step_seconds([{"steps": [step] * 3}, {"steps": [slow] * 3}], 2)
    assert astuple(found) == pytest.approx((4.1 / 2, 0.5, 0.0))


def test_the_busiest_process_decides() -> None:
    assert rounds_of_busiest((1,) * 8, Placement(3)) == 3
    assert rounds_of_busiest((2,) * 8, Placement(1, 3)) == 6


def test_candidates_cover_the_counts_of_processes() -> None:
    assert counts_up_to(6) == [1, 2, 4, 6]
    found = list(placements(4))
    assert len(found) == len(set(found))
    assert {each.processes for each in found} == {1, 2, 4}
    assert Placement(2, 2, by_layer=True) in found
    on_host = set(placements(4, offload=True)) - set(found)
    assert {replace(each, offload=False) for each in on_host} == {each for each in found if each.shards > 1}
    assert Placement(1, 2, recompute=True, offload=True).sets == (
        "parallel.shard=2",
        "parallel.offload=true",
        "parallel.activation_checkpoint=full",
    )
    assert str(Placement(2, 2, offload=True)) == "2 replicas, 2 shards, offload"
    assert Placement(1, 2, by_layer=False, recompute=True).sets == (
        "parallel.shard=2",
        "parallel.reshard=step",
        "parallel.activation_checkpoint=full",
    )


def test_the_quickest_that_fits_comes_first() -> None:
    found = [candidate(Placement(size), COSTS, RUNS) for size in (1, 2, 4)]
    assert [each.placement.processes for each in ranked(found)] == [2, 4, 1]
    least = min(each.memory.total for each in found if each.memory is not None)
    limits = dict.fromkeys((1, 2, 4), least)
    assert [each.placement.processes for each in ranked(found, limits)] == [4]
    unknown = Candidate(Placement(), None, None, 64)
    assert unknown.fits(1)  # what is not known is not excluded


def test_records_become_costs() -> None:
    step = {"data": 0.1, "forward": 1.0, "backward": 2.0, "exchange": 0.5, "update": 0.25, "other": 0.0}
    step |= {"rounds": 2, "seconds": 3.85}
    groups = [[60, 60], [40, 30]]
    state = {"parameters": 100, "buffers": 1, "gradients": 90, "optimizer": 180, "groups": groups}
    timed = {
        "steps": [{**step, "forward": 9.0}] * 2 + [step],
        "memory": {"start": 1000, "peak": 2000, "shard_imports": 5},
        "device": "cpu",
        "state": state,
        "micro_batches": [1, 1],
        "samples": 4,
        "threads": 1,
        "recompute": "none",
        "precision": "fp32",
        "epoch_steps": 10,
        "total_steps": 30,
    }
    costs = costs_of(timed, None)
    assert costs.process == 1000 - 101
    assert costs.seconds is not None
    assert costs.seconds.round == pytest.approx(1.55)
    assert costs.step_seconds == pytest.approx(2 * 1.55 + 0.25 + 0.5)
    assert costs.state.groups == ((60, 60), (40, 30))
    assert candidate(Placement(), costs, RUNS).memory is None


def test_sizes_are_decimal_and_garbage_is_refused() -> None:
    line = CommandLine(("unisono", "plan", "train.py", "--memory", "x"))
    assert [bytes_of_text(text, line) for text in ("24GB", "1.5 mb", "1000")] == [24 * 10**9, 1_500_000, 1000]
    for text in ("much", "0", "-1GB", "24XB"):
        with pytest.raises(SettingsError, match=r"Next: unisono plan train\.py --memory 24GB"):
            bytes_of_text(text, line)


def test_a_file_adds_to_what_is_known_of_a_device() -> None:
    text = """
    [[device]]
    name = "a10"
    count = 4
    price = 0.9

    [[device]]
    name = "ours"
    memory = "16GB"
    speed = 0.5
    link = 1e9
    """
    a10, ours = read_devices(text)
    assert a10 == replace(KNOWN["a10"], count=4, price=0.9)
    assert (ours.memory, ours.speed, ours.link, ours.price, ours.count) == (16 * 10**9, 0.5, 1e9, None, 1)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("devices = 3", "A file of devices has tables"),
        ("[[device]", "It is no TOML"),
        ("[[device]]\nmemory = 3", "A device has no name"),
        ('[[device]]\nname = "this"', "A device has no name"),
        ('[[device]]\nname = "ours"', "ours has no memory"),
        ('[[device]]\nname = "ours"\nmemori = 3', "ours has an unknown key memori"),
        ('[[device]]\nname = "ours"\nmemory = "3 bananas"', "ours has an invalid value for memory: 3 bananas"),
        ('[[device]]\nname = "a10"\ncount = 1.5', "a10 has an invalid value for count: 1.5"),
        ('[[device]]\nname = "a10"\nprice = -1', "a10 has an invalid value for price: -1"),
        ('[[device]]\nname = "a10"\nspeed = true', "a10 has an invalid value for speed: True"),
        ('[[device]]\nname = "a10"\n[[device]]\nname = "a10"', "Two devices are called a10"),
    ],
)
def test_a_wrong_file_of_devices_says_what_is_wrong(text: str, wrong: str) -> None:
    with pytest.raises(DeviceFileError) as caught:
        read_devices(text)
    assert caught.value.args[0].startswith(wrong)
    assert all(caught.value.args)


def test_the_time_on_a_device_follows_from_its_rates() -> None:
    costs = replace(COSTS, flops=10**12, precision="bf16", total_steps=3600)
    device = Device("d", 2, 80 * 10**9, 1e12, 5e12, 1e12, 1e9, utilization=0.5, price=2.0)
    one = costs_on(device, costs)
    update = (2 * 300 + 100) * MB / 1e12
    assert one.seconds is not None
    assert astuple(one.seconds) == pytest.approx((0.4, update, 0.0))
    assert costs_on(replace(device, speed=4.0), costs).seconds == StepSeconds(0.025, 0.005, 0.0025)
    assert costs_on(device, replace(costs, flops=0)).seconds is None
    offers = {str(each.candidate.placement): each for each in offers_of(device, costs, None)}
    two = offers["2 replicas"]
    assert two.candidate.seconds == pytest.approx(4 * 0.4 + update + 100 * MB / 1e9)
    assert two.cost == pytest.approx((two.candidate.seconds or 0) * 2 * 2.0)  # 3600 steps, two devices
    shards = offers["2 shards"].candidate
    assert shards.seconds == pytest.approx(4 * (0.4 + 0.5 * 300 * MB / 1e9) + update / 2)
    assert shards.memory is not None
    assert shards.memory.parameters == 50 * MB
    assert smallest_need(device, costs, None)[0] == min(
        each.candidate.memory.total for each in offers.values() if each.candidate.memory is not None
    )
    assert offers_of(replace(device, memory=MB), costs, None) == []


def test_the_table_of_devices_names_the_quickest_and_the_cheapest() -> None:
    costs = replace(COSTS, flops=10**12, total_steps=7200)
    quick = Device("quick", 2, 80 * 10**9, 1e14, link=1e12, price=8.0)
    slow = Device("slow", 1, 80 * 10**9, 5e13, price=1.0)
    offers = [offer for device in (quick, slow) for offer in offers_of(device, costs, None)]
    lines = list(device_lines(offers, lambda offer: CommandLine(("unisono", "run", offer.device.name))))
    assert "7200 steps" in lines[1]
    assert lines[-4].startswith("Quickest: 2 x quick, 2 replicas, 0:12:")
    assert lines[-3].strip() == "unisono run quick"
    assert lines[-2].startswith("Cheapest: 1 x slow, 1 replica, 0:48:00, 0.8.")
    tiny = replace(slow, name="tiny", memory=MB)
    (note,) = small_devices([quick, tiny, Device("this")], costs, None, offers)
    assert note.startswith("Nothing fits on tiny: the least is ")
    assert duration(100_000) == "1 day, 3:46:40"
