"""The groups of the read for sm_90 wait for one another as they must, however they are scheduled.

What runs is their source, without a GPU; see ``hopper_groups``.
"""

from itertools import product
from types import SimpleNamespace

import pytest
from hopper_groups import Race, Run, Tensor
from hypothesis import given, settings
from hypothesis import strategies as st

COUNTS = st.lists(st.sampled_from((0, 1, 64, 65, 128, 200, 400)), min_size=1, max_size=7)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("quantized", [True, False])
@settings(max_examples=60, deadline=None)
@given(counts=COUNTS, programs=st.integers(1, 3), seed=st.integers(0, 1 << 30))
def test_outputs_see_all_their_tiles(quantized, splits, counts, programs, seed):
    for program in range(min(programs, len(counts) * splits)):
        Run(counts, quantized, splits, program, programs, seed).finish()


def two_barriers_for_three_places(run):
    return {
        "wait_empty": lambda empty, step: run.wait(empty[step & 1], ((step - 2) >> 1) & 1),
        "give_back": lambda empty, step, condition=True: run.arrive(
            empty[step & 1], pred=condition
        ),
    }


def places_given_back_at_once(run):
    return {"wait_empty": lambda empty, step: run.pause()}


def rows_not_waited_for(run):
    return {"wait_full": lambda full, step, condition=True: run.pause()}


def copies_not_waited_for(run):
    return {"fill_by_copies": lambda full, step: run.arrive(full[step & 3])}


def one_group_of_copies_too_few(run):
    copies = dict(vars(run.source["async_copy"]))
    copies["wait_group"] = lambda pending: run.wait_group(pending + 1)
    return {"async_copy": SimpleNamespace(**copies)}


def stores_not_waited_for(run):
    return {"tma": SimpleNamespace(store_wait=lambda _: None)}


def products_not_waited_for(run):
    return {"warpgroup_mma_wait": lambda pending, deps: deps[0]}


def one_place_for_what_has_grown(run):
    _, shared = run.groups[0].args
    first = shared.grown.index(0)
    shared.grown = SimpleNamespace(index=lambda _: first)
    return {}


def queries_in_the_place_of_the_last_tile(run):
    return {"other_place": lambda q_place, place: place}


def what_has_grown_overwritten(run):
    hand_over = run.source["hand_over"]

    def overwrite(s):
        for i in range(2):
            s.grown.index(i).store(Tensor())
        hand_over(s)

    return {"hand_over": overwrite}


def rows_of_another_tile(run):
    return {"zero": lambda number: number & 1}


FAULTS = [
    places_given_back_at_once,
    rows_not_waited_for,
    copies_not_waited_for,
    one_group_of_copies_too_few,
    stores_not_waited_for,
    products_not_waited_for,
    queries_in_the_place_of_the_last_tile,
    what_has_grown_overwritten,
    rows_of_another_tile,
]


@pytest.mark.parametrize(
    "fault, quantized",
    [
        *product(FAULTS, [True, False]),
        # With plain rows left waits for right in front of the softmax, and one place would do.
        (one_place_for_what_has_grown, True),
        # With quantized rows left waits for the next queries in between, and two barriers would do.
        (two_barriers_for_three_places, False),
    ],
)
def test_faults_are_seen(fault, quantized):
    with pytest.raises(Race):
        for seed in range(1000):
            run = Run([400, 65, 0, 200, 128, 64], quantized, 1, 0, 1, seed)
            run.source.update(fault(run))
            run.finish()
