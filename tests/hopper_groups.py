"""Runs the three groups of ``kernels/hopper`` on threads, one at a time, in a random order.

Their source is executed as it is, with stand-ins for what Gluon provides. A tensor is the set of
names of the tiles and queries that it was computed from, so that outputs can be checked for having
seen all of theirs and nothing else. Barriers, asynchronous copies, products and stores behave as on
a GPU: each may take until somebody waits for it. Whoever overwrites what is still being read, reads
what has not arrived, or waits for ever, fails.
"""

import functools
import operator
import random
import threading
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

from triton.runtime.jit import JITFunction

from fp8kv_inductor.kernels.hopper import gather, halves, items, outputs, places, query
from fp8kv_inductor.kernels.hopper.layouts import BLOCK_H, HALF, TILE


class Race(AssertionError):
    """Shared memory was not what somebody took it for, or nobody can go on."""


class Number(int):
    """A scalar."""

    def to(self, *_: Any, **__: Any) -> "Number":
        return self


def _number(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(first: Number, second: Any) -> Any:
        result = function(int(first), int(second)) if isinstance(second, int) else NotImplemented
        return result if result is NotImplemented else Number(result)

    return method


class Tensor:
    """The names of all that a tensor was computed from."""

    shape = (64, 64)
    type = SimpleNamespace(layout=None)
    dtype: Any = SimpleNamespace(element_ty=SimpleNamespace(primitive_bitwidth=8))
    random = random.Random(0)

    def __init__(self, *names: Any) -> None:
        self.names = frozenset(names)

    def to(self, *_: Any, **__: Any) -> "Tensor":
        return self

    def __bool__(self) -> bool:
        return self.random.random() < 0.5

    def __and__(self, other: Any) -> Any:
        return False if other is False else union(self, other)

    __rand__ = __and__
    __hash__ = None  # type: ignore[assignment]


def names_of(*values: Any) -> frozenset:
    return frozenset().union(*(value.names for value in values if isinstance(value, Tensor)))


def union(*values: Any) -> Tensor:
    return Tensor(*names_of(*values))


for _name in ("add", "sub", "mul", "floordiv", "mod", "rshift", "lshift", "and"):
    _function = getattr(operator, f"__{_name}__")
    setattr(Number, f"__{_name}__", _number(_function))
    setattr(Number, f"__r{_name}__", _number(lambda a, b, f=_function: f(b, a)))
for _name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "rshift", "lshift", "or"]:
    setattr(Tensor, f"__{_name}__", union)
    setattr(Tensor, f"__r{_name}__", union)
for _name in ["neg", "lt", "le", "gt", "ge", "eq", "ne"]:
    setattr(Tensor, f"__{_name}__", union)


class Cell:
    """A piece of shared memory that is written as a whole."""

    def __init__(self) -> None:
        self.names: frozenset = frozenset()
        self.readers = 0
        self.arriving = False


class View:
    """Shared memory, or part of it."""

    dtype = "float16"

    def __init__(self, run: "Run", cells: list[Cell], parts: int, permuted: bool = False) -> None:
        self.run, self.cells, self.parts, self.permuted = run, cells, parts, permuted

    def index(self, i: int) -> "View":
        size = len(self.cells) // self.parts
        if not 0 <= i < self.parts:
            raise Race(f"index {i} of {self.parts}")
        return View(self.run, self.cells[size * i : size * (i + 1)], 1)

    def slice(self, first: int, size: int, dim: int = 0) -> "View":
        if dim or len(self.cells) == 1:
            return self
        # The cells of a line are its first 32 rows and its last.
        return View(self.run, self.cells[first // 32 :: 2], 1)

    def permute(self, _: Any) -> "View":
        return View(self.run, self.cells, self.parts, permuted=True)

    def reinterpret(self, _: Any, shape: list[int], __: Any) -> "View":
        return View(self.run, self.cells, shape[0])

    def contents(self) -> Tensor:
        if any(cell.arriving for cell in self.cells):
            raise Race(f"{self.run.group.name} reads what has not arrived")
        return Tensor(*frozenset().union(*(cell.names for cell in self.cells)))

    def load(self, _: Any) -> Tensor:
        self.run.pause()
        return self.contents()

    def store(self, value: Tensor) -> None:
        self.run.pause()
        self.claim()
        self.put(value.names)

    def claim(self) -> None:
        if any(cell.readers or cell.arriving for cell in self.cells):
            raise Race(f"{self.run.group.name} overwrites what is in use")

    def put(self, names: frozenset) -> None:
        for cell in self.cells:
            cell.names = names

    def read_until_released(self) -> Callable[[], None]:
        self.contents()
        for cell in self.cells:
            cell.readers += 1

        def release() -> None:
            for cell in self.cells:
                cell.readers -= 1

        return release


class Barrier:
    def __init__(self) -> None:
        self.pending, self.phase = 1, 0

    def arrive(self, count: int = 1) -> None:
        self.pending -= count
        if self.pending < 0:
            raise Race("more arrivals than expected")
        if self.pending == 0:
            self.pending, self.phase = 1, self.phase + 1


class Barriers(list):
    def index(self, i: int) -> Barrier:  # type: ignore[override]
        return self[i]


class Copy:
    """An asynchronous copy into shared memory."""

    def __init__(self, target: View, names: frozenset) -> None:
        target.claim()
        self.target, self.names, self.done = target, names, False
        self.arrivals: list[Callable[[], None]] = []
        for cell in target.cells:
            cell.arriving = True

    def finish(self) -> None:
        if not self.done:
            self.done = True
            for cell in self.target.cells:
                cell.arriving = False
            self.target.put(self.names)
            for arrival in self.arrivals:
                arrival()


class Group(threading.Thread):
    """A group of warps, and what it has under way."""

    def __init__(self, run: "Run", name: str, *args: Any) -> None:
        super().__init__(name=name, daemon=True)
        self.owner, self.args = run, args
        self.turn = threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.weight = run.random.choice((1, 1, 5, 50))
        self.finished = False
        self.error: BaseException | None = None
        self.copies: list[Copy] = []
        self.committed: list[list[Copy]] = []
        self.open: list[Copy] = []
        self.products: list[list[Callable[[], None]]] = []
        self.stores: list[Callable[[], None]] = []
        self.scores = self.weighted = 0

    def run(self) -> None:
        self.turn.acquire()
        try:
            if not self.owner.over:
                self.owner.source[self.name](*self.args)
                if any(not copy.done for copy in self.copies) or self.stores:
                    raise Race(f"{self.name} ends before its copies do")
        except BaseException as error:
            self.error = error
        finally:
            self.finished = True
            self.owner.turn.release()


class Run:
    """One program, and the stand-ins that its groups call.

    Args:
        counts: live columns of each token; a token has an item for each split.
        quantized, splits: of the read.
        program, programs: which of the grid's.
        seed: of the order, and of what branches take that depend on tensors.

    Attributes:
        source: what the modules of the kernel define, by name; may be changed before ``finish``.
    """

    def __init__(
        self,
        counts: list[int],
        quantized: bool,
        splits: int,
        program: int,
        programs: int,
        seed: int,
    ) -> None:
        self.random = random.Random(seed)
        Tensor.random = self.random
        self.turn = threading.Semaphore(0)
        self.over = False
        self.counts = counts
        self.programs, self.program = programs, program
        self.outputs: dict[int, dict[int, frozenset]] = {}
        self.source = self._source()
        self.arguments = self._arguments(quantized, splits, len(counts) * splits)
        shared = self._shared()
        raw = [self.memory(1), self.memory(1), self.memory(2)] if quantized else []
        kind = "quantized" if quantized else "plain"
        self.groups = [
            Group(self, name, self.arguments, shared, *extra)
            for name, extra in ((f"left_{kind}", []), ("right_half", []), (f"gather_{kind}", raw))
        ]
        self.copy_weight = self.random.choice((1, 10))
        self.group = self.groups[0]

    def memory(self, parts: int, cells: int = 1) -> View:
        """Shared memory of parts of so many cells."""
        return View(self, [Cell() for _ in range(parts * cells)], parts)

    def _shared(self) -> SimpleNamespace:
        cells = 2 * query.LINES.value
        shared = SimpleNamespace(
            left=self.memory(places.PLACES.value, cells),
            right=self.memory(places.PLACES.value, cells),
            **{name: self.memory(1) for name in ("largest_left", "largest_right", "p", "factor")},
            grown=self.memory(2),
            **{name: self.memory(4) for name in ("rows", "exponents")},
            **{name: Barrier() for name in ("p_full", "p_empty", "q_right")},
        )
        for side in ("left", "right"):
            for state in ("full", "empty"):
                barriers = Barriers(Barrier() for _ in range(places.BARRIERS.value))
                setattr(shared, f"{state}_{side}", barriers)
        return shared

    @staticmethod
    def _arguments(quantized: bool, splits: int, n_items: int) -> SimpleNamespace:
        out = Tensor()
        part = "float16" if quantized else "float32"
        out.dtype = SimpleNamespace(element_ty="bfloat16" if splits == 1 else part)
        pool = SimpleNamespace(data=Tensor(), scale=Tensor(), stride_data=1, stride_scale=1)
        pointers = dict.fromkeys(("lse", "sink", "cos", "sin", "out_blocks"), Tensor())
        strides = dict.fromkeys(("stride_sink", "stride_cos", "stride_sin"), 1)
        return SimpleNamespace(
            out=out,
            window=pool,
            cmp=pool,
            to_base_2=1.0,
            n_columns=1 << 16,
            n_items=n_items,
            N_HEADS=BLOCK_H.value,
            N_WINDOW=0,
            WHOLE_TILES=True,
            SPLITS=splits,
            QUANTIZED=quantized,
            HAS_COUNTS=True,
            ROPE_PAIRS=32 if splits == 1 else 0,
            **pointers,
            **strides,
        )

    def _source(self) -> dict[str, Any]:
        source: dict[str, Any] = {}
        for module in (items, places, query, gather, outputs, halves):
            for name, value in vars(module).items():
                if isinstance(value, JITFunction):
                    code, defaults = value.fn.__code__, value.fn.__defaults__
                    source[name] = FunctionType(code, source, name, defaults)
                else:
                    source[name] = getattr(value, "value", value)
        source |= {
            "gl": Language(self),
            "mbarrier": SimpleNamespace(wait=self.wait, arrive=self.arrive),
            "async_copy": SimpleNamespace(
                commit_group=self.commit_group,
                wait_group=self.wait_group,
                mbarrier_arrive=self.arrive_behind_copies,
            ),
            "tma": SimpleNamespace(store_wait=self.wait_stores),
            "async_store": self.store_block,
            "warpgroup_mma": self.product,
            "warpgroup_mma_wait": self.wait_products,
            "async_load": lambda target, pointers, mask: self.copy(target, pointers),
            "reinterpret": lambda view, dtype, shape, layout: view.reinterpret(
                dtype, shape, layout
            ),
            "fence_async_shared": lambda: None,
            "group_barrier": lambda: None,
            "power_of_two": union,
            "any_grown": self.check_grown(source["any_grown"]),
            # Addresses become names.
            "load_count": lambda r, item: Number(
                self.counts[item // r.SPLITS] if item < r.n_items else 0
            ),
            "load_rows": lambda r, item, column, end, LAYOUT: Tensor(("tile", item, column)),
            "query_pointers": lambda r, item, first, N: (Tensor(("queries", item)), Tensor()),
            "store_features": lambda r, x, item, FIRST: self.output(item, FIRST, x),
        }
        return source

    def check_grown(self, any_grown: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """``any_grown``, which right has to ask about the tile whose weights it takes."""

        def checked(s: SimpleNamespace, step: int) -> Tensor:
            grown = any_grown(s, step)
            if self.group.name == "right_half" and grown.names != s.p.contents().names:
                raise Race(f"right takes {grown.names} for {s.p.contents().names}")
            return grown

        return checked

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Let others go on, until it is this group's turn and it is ready."""
        group = self.group
        group.ready = ready
        self.turn.release()
        group.turn.acquire()
        if self.over:
            raise SystemExit

    def wait(self, barrier: Barrier, phase: int, pred: Any = True) -> None:
        if pred:
            self.pause(lambda: barrier.phase & 1 != phase)

    def arrive(self, barrier: Barrier, count: int = 1, pred: Any = True) -> None:
        self.pause()
        if pred:
            barrier.arrive(count)

    def copy(self, target: View, pointers: Tensor) -> None:
        self.pause()
        copy = Copy(target, pointers.names)
        self.group.copies.append(copy)
        self.group.open.append(copy)

    def commit_group(self) -> None:
        self.group.committed.append(self.group.open)
        self.group.open = []

    def wait_group(self, pending: int) -> None:
        self.pause()
        committed = self.group.committed
        for copies in committed[: len(committed) - pending]:
            for copy in copies:
                copy.finish()

    def arrive_behind_copies(self, barrier: Barrier) -> None:
        self.pause()
        unfinished = [copy for copy in self.group.copies if not copy.done]
        barrier.pending += len(unfinished)
        for copy in unfinished:
            copy.arrivals.append(barrier.arrive)

    def product(
        self, a: Any, b: View, acc: Tensor, use_acc: bool = True, is_async: bool = True
    ) -> Tensor:
        """Check operands of a product, and start it.

        One with rows that adds to nothing may be of any weights and rows, if it is dropped: a name
        marks where its result goes.
        """
        self.pause()
        group = self.group
        operands = [x for x in (a, b) if isinstance(x, View)]
        group.products.append([view.read_until_released() for view in operands])
        left_operand = a.contents() if isinstance(a, View) else a
        item, columns = self.tiles[group.scores // 2 if b.permuted else group.weighted]
        rows = b.contents().names
        seen = {("queries", item)}
        if not b.permuted:
            seen |= {("tile", item, column) for column in columns}
        belong = left_operand.names <= seen and left_operand.names & {("queries", item)}
        if not belong or rows != {("tile", item, columns[-1])}:
            if use_acc or b.permuted:
                raise Race(f"{group.name}: {left_operand.names} times {rows} for {item, columns}")
            return Tensor(("to be dropped", group.name, item))
        if b.permuted:
            group.scores += 1
        else:
            group.weighted += 1
        return union(left_operand, b.contents(), *([acc] if use_acc else []))

    def wait_products(self, pending: int, deps: list[Tensor]) -> Tensor:
        self.pause()
        products = self.group.products
        while len(products) > pending:
            for release in products.pop(0):
                release()
        return deps[0]

    def store_block(self, _: Any, place: list[int], block: View) -> None:
        self.pause()
        token, _head, first = place
        self.group.stores.append(block.read_until_released())
        self.output(token, first, block.contents())

    def wait_stores(self, _: int) -> None:
        self.pause()
        while self.group.stores:
            self.group.stores.pop()()

    def output(self, item: int, first: int, x: Tensor) -> None:
        if first in self.outputs.setdefault(item, {}):
            raise Race(f"features from {first} on of item {item} are written twice")
        self.outputs[item][first] = x.names

    def columns_of(self, item: int) -> list[int]:
        """First columns of an item's tiles."""
        first, end = self.source["item_columns"](
            self.arguments, Number(item), self.source["load_count"](self.arguments, item)
        )
        return list(range(first, max(end, first + 1), TILE.value))

    @functools.cached_property
    def tiles(self) -> list[tuple[int, list[int]]]:
        """Items of the program and the columns of their tiles up to each tile."""
        items_columns = [
            (item, self.columns_of(item))
            for item in range(self.program, self.arguments.n_items, self.programs)
        ]
        return [
            (item, columns[: i + 1]) for item, columns in items_columns for i in range(len(columns))
        ]

    def finish(self) -> None:
        """Run to the end; check the outputs."""
        for group in self.groups:
            group.start()
        try:
            while alive := [group for group in self.groups if not group.finished]:
                copies = [copy for group in self.groups for copy in group.copies if not copy.done]
                choices = [(group, group.weight) for group in alive if group.ready()]
                choices += [(copy, self.copy_weight) for copy in copies]
                if not choices:
                    raise Race("nobody can go on")
                candidates, weights = zip(*choices, strict=True)
                chosen = self.random.choices(candidates, weights)[0]
                if isinstance(chosen, Copy):
                    chosen.finish()
                    continue
                self.group = chosen
                chosen.turn.release()
                self.turn.acquire()
                if chosen.error is not None:
                    raise chosen.error
        finally:
            self.over = True
            for group in self.groups:
                group.turn.release()
        self._check_outputs()

    def _check_outputs(self) -> None:
        for item in range(self.program, self.arguments.n_items, self.programs):
            seen = {("queries", item)} | {("tile", item, c) for c in self.columns_of(item)}
            written = self.outputs.pop(item, {})
            if not {0, HALF.value} <= written.keys():
                raise Race(f"item {item} is not written")
            for first, names in written.items():
                if names != seen:
                    raise Race(f"item {item}, features from {first} on: {names ^ seen}")
        if self.outputs:
            raise Race(f"written: {list(self.outputs)}")


class Language:
    """Gluon's functions; most of them only pass names on."""

    float32, float16, bfloat16 = "float32", "float16", "bfloat16"
    int64, int32, int16, uint32, uint8 = "int64", "int32", "int16", "uint32", "uint8"

    def __init__(self, run: Run) -> None:
        self.run = run

    def __getattr__(self, name: str) -> Any:
        return lambda *values, **_: union(*values)

    def program_id(self, axis: int) -> Number:
        return Number(0 if axis else self.run.program)

    def num_programs(self, axis: int) -> Number:
        return Number(1 if axis else self.run.programs)

    def maximum(self, a: Any, b: Any) -> Any:
        return Number(max(a, b)) if isinstance(a, int) and isinstance(b, int) else union(a, b)

    def minimum(self, a: Any, b: Any) -> Any:
        return Number(min(a, b)) if isinstance(a, int) and isinstance(b, int) else union(a, b)

    def static_range(self, *bounds: int) -> range:
        return range(*bounds)

    def cdiv(self, a: int, b: int) -> Number:
        return Number(-(-a // b))

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        if isinstance(condition, bool):
            return a if condition else b
        return union(condition, a, b)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x

    def inline_asm_elementwise(
        self, asm: str, constraints: str, args: list[Tensor], dtype: Any, **_: Any
    ) -> Any:
        result = union(*args)
        return (result,) * len(dtype) if isinstance(dtype, tuple) else result
