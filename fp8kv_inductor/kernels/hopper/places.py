"""Three places in shared memory that queries and tiles take in turn, and their barriers.

The steps of a program are what ``gather`` puts there: the tiles of its first item, the queries of
the next one, the tiles of that, and so on. An item's queries keep one place, its tiles take the
other two in turn; the next queries take that of the last tile but one, and their first tile that of
the old queries. Places are given back in the order in which steps take them: a tile's for two steps
later, but at the end of an item, whose last tile is step n, that of its queries for step n + 2 and
that of the tile for n + 3.

Queries and tiles fit into the same place, because a tile has as many rows as a block of heads.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

PLACES = gl.constexpr(3)
Q_PLACE = gl.constexpr(2)
"""Where the first queries are; tiles begin with place 0."""
BARRIERS = gl.constexpr(4)
"""Of each kind: step n + 1's place may be given back before step n - 1 has taken its own, and be
filled before left has seen that step n - 1's is full."""


@gluon.jit
def other_place(q_place, place):
    """Of the tile before and of the tile behind the one in ``place``."""
    return 0 + 1 + 2 - q_place - place


@gluon.jit
def fill(full, step):
    """Tell that half of a step is there."""
    mbarrier.arrive(full.index(step & 3), count=1)


@gluon.jit
def fill_by_copies(full, step):
    """Tell that half of a step is there, once the copies that threads have started are."""
    async_copy.mbarrier_arrive(full.index(step & 3))
    mbarrier.arrive(full.index(step & 3), count=1)


@gluon.jit
def wait_full(full, step, condition=True):
    """Wait until half of a step is there."""
    mbarrier.wait(full.index(step & 3), (step >> 2) & 1, pred=condition)


@gluon.jit
def wait_empty(empty, step):
    """Wait until half of the place that a step takes has been given back; two were always free."""
    mbarrier.wait(empty.index(step & 3), ((step - 2) >> 2) & 1)


@gluon.jit
def give_back(empty, step, condition=True):
    """Give half of a place back, which ``step`` will take."""
    mbarrier.arrive(empty.index(step & 3), count=1, pred=condition)
