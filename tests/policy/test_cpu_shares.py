"""Which engine gets which CPUs: what holds for every machine, and examples to read."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tokenpath.policy.cpu_shares import Cpu, Division, Share, divide


def machine(*cores_of_nodes: int, smt: int = 1) -> list[Cpu]:
    """Numbered as Linux does it: first one thread of every core, then the second of each."""
    cores = [node for node, count in enumerate(cores_of_nodes) for _ in range(count)]
    return [
        Cpu(number=thread * len(cores) + core, core=core, node=node)
        for thread in range(smt)
        for core, node in enumerate(cores)
    ]


@st.composite
def problems(draw) -> tuple[list[Cpu], list[int | None], int, bool]:
    nodes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    whole = machine(*nodes, smt=draw(st.sampled_from([1, 2])))
    # An affinity mask may have left any part of the machine.
    cpus = draw(st.lists(st.sampled_from(whole), min_size=1, unique=True))
    wanted = draw(st.lists(st.none() | st.integers(1, 6), max_size=6))
    limit = draw(st.integers(1, 2 * len(cpus)))
    return cpus, wanted, limit, draw(st.booleans())


def sets(division: Division) -> list[set[int]]:
    return [set(share.cpus) for share in division.shares]


def demanded(wanted) -> int:
    return sum(threads or 1 for threads in wanted)


@given(problems())
def test_each_gets_what_it_wants_and_no_more_runs_than_can(problem):
    cpus, wanted, limit, leave_rest = problem
    division = divide(cpus, wanted, limit=limit, leave_rest=leave_rest)
    assert division.capacity == min(limit, len(cpus))
    for share, threads in zip(division.shares, wanted, strict=True):
        assert share.threads == threads or (threads is None and share.threads >= 1)
        assert set(share.cpus) <= {cpu.number for cpu in cpus}
        assert list(share.cpus) == sorted(set(share.cpus))
    assert division.oversubscribed == (demanded(wanted) > division.capacity)
    if not division.oversubscribed:
        for share in division.shares:
            assert share.threads <= len(share.cpus)


@given(problems())
def test_shares_are_disjoint_while_possible_and_use_everything(problem):
    cpus, wanted, limit, leave_rest = problem
    division = divide(cpus, wanted, limit=limit, leave_rest=leave_rest)
    everything = {cpu.number for cpu in cpus}
    if division.oversubscribed:
        assert all(its == everything for its in sets(division))
        return
    for one, other in itertools.combinations(sets(division), 2):
        assert not one & other
    if wanted and (None in wanted or not leave_rest):
        assert set().union(*sets(division)) == everything


@given(problems())
def test_a_core_is_shared_only_when_there_are_fewer_cores_than_threads(problem):
    cpus, wanted, limit, leave_rest = problem
    division = divide(cpus, wanted, limit=limit, leave_rest=leave_rest)
    cores = {cpu.number: cpu.core for cpu in cpus}
    if division.oversubscribed or demanded(wanted) > len(set(cores.values())):
        return
    owners: dict[int, set[int]] = {}
    for index, share in enumerate(division.shares):
        own = {cores[number] for number in share.cpus}
        for core in own:
            owners.setdefault(core, set()).add(index)
        if wanted[index] is None and len(own) > 1:
            assert share.threads <= len(own)
    assert all(len(its) == 1 for its in owners.values())


def spans(cpus, share: Share) -> bool:
    return len({cpu.node for cpu in cpus if cpu.number in share.cpus}) > 1


@given(problems())
def test_no_automatic_share_spans_nodes_if_there_is_one_for_each(problem):
    cpus, wanted, limit, leave_rest = problem
    division = divide(cpus, wanted, limit=limit, leave_rest=leave_rest)
    if division.oversubscribed:
        return
    automatic = [s for s, t in zip(division.shares, wanted, strict=True) if t is None]
    theirs = {number for share in automatic for number in share.cpus}
    nodes = {cpu.node for cpu in cpus if cpu.number in theirs}
    if len(automatic) >= len(nodes):
        assert not any(spans(cpus, share) for share in automatic)


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
)
def test_as_few_numbered_shares_as_possible_span_nodes(nodes, sizes):
    if sum(sizes) > sum(nodes):
        return
    cpus = machine(*nodes)
    division = divide(cpus, sizes, limit=len(cpus), leave_rest=True)
    spanning = sum(spans(cpus, share) for share in division.shares)

    def fits(places) -> bool:
        return all(
            sum(size for size, place in zip(sizes, places, strict=True) if place == node) <= room
            for node, room in enumerate(nodes)
        )

    anywhere = [None, *range(len(nodes))]
    possible = itertools.product(anywhere, repeat=len(sizes))
    assert spanning == min(places.count(None) for places in possible if fits(places))


@given(st.integers(1, 64), st.integers(1, 64))
def test_on_one_node_automatic_shares_differ_by_one_core_at_most(cores, engines):
    division = divide(machine(cores), [None] * engines, limit=cores)
    if not division.oversubscribed:
        threads = [share.threads for share in division.shares]
        assert sum(threads) == cores
        assert max(threads) - min(threads) <= 1


def test_one_engine_has_the_machine():
    assert divide(machine(2), [None], limit=2).shares == (Share(2, (0, 1)),)


def test_two_engines_on_two_cpus_have_one_each():
    division = divide(machine(2), [None, None], limit=2)
    assert division.shares == (Share(1, (0,)), Share(1, (1,)))


def test_three_engines_on_two_cpus_run_everywhere_and_it_is_said():
    division = divide(machine(2), [None] * 3, limit=2)
    assert division.shares == (Share(1, (0, 1)),) * 3
    assert (division.oversubscribed, division.threads, division.capacity) == (True, 3, 2)


def test_an_engine_has_one_thread_for_each_core_and_may_use_both_of_its_hardware_threads():
    assert divide(machine(4, smt=2), [None], limit=8).shares == (Share(4, tuple(range(8))),)
    two = divide(machine(4, smt=2), [None, None], limit=8)
    assert two.shares == (Share(2, (0, 1, 4, 5)), Share(2, (2, 3, 6, 7)))


def test_alone_on_a_core_an_engine_uses_both_hardware_threads():
    assert divide(machine(1, smt=2), [None], limit=2).shares == (Share(2, (0, 1)),)
    assert divide(machine(1, smt=2), [None], limit=1).shares == (Share(1, (0, 1)),)


def test_the_rest_is_for_those_that_named_no_number():
    division = divide(machine(8), [2, None, None], limit=8)
    assert division.shares == (Share(2, (0, 1)), Share(3, (2, 3, 4)), Share(3, (5, 6, 7)))


def test_engines_stay_within_nodes():
    three = divide(machine(4, 4), [None] * 3, limit=8)
    assert three.shares == (Share(2, (0, 1)), Share(2, (2, 3)), Share(4, (4, 5, 6, 7)))
    # The best order is not always the largest into the tightest.
    packed = divide(machine(10, 10), [5, 4, 4, 3, 2, 2], limit=20)
    assert not any(spans(machine(10, 10), share) for share in packed.shares)


def test_fewer_engines_than_nodes_have_whole_nodes():
    division = divide(machine(2, 2, 2, 2), [None, None], limit=8)
    assert division.shares == (Share(4, (0, 1, 4, 5)), Share(4, (2, 3, 6, 7)))


def test_a_quota_bounds_threads_and_not_where_they_run():
    division = divide(machine(8), [None, None], limit=3)
    assert division.shares == (Share(2, (0, 1, 2, 3)), Share(1, (4, 5, 6, 7)))
    assert not division.oversubscribed


def test_a_number_alone_may_leave_the_rest_to_others():
    assert divide(machine(4), [1], limit=4, leave_rest=True).shares == (Share(1, (0,)),)
    assert divide(machine(4), [1], limit=4).shares == (Share(1, (0, 1, 2, 3)),)
