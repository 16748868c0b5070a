"""Which columns and pool rows a program works on, and the way of rows into shared memory."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from fp8kv_inductor.kernels.hopper.layouts import BLOCK_H, CMP, TILE, VECTOR_BYTES
from fp8kv_inductor.kernels.hopper.renamed import async_load


@gluon.jit
def zero(number):
    """0, of which the compiler does not know that, for a tile's or an item's number."""
    return number >> 30


@gluon.jit
def item_place(r, item):
    """Token, first head and split of an item."""
    HEAD_BLOCKS: gl.constexpr = (r.N_HEADS + BLOCK_H - 1) // BLOCK_H
    block = item // r.SPLITS
    return block // HEAD_BLOCKS, block % HEAD_BLOCKS * BLOCK_H, item % r.SPLITS


@gluon.jit
def load_count(r, item):
    """Live compressed columns of the item's token, 0 past the last item."""
    columns = r.n_columns - r.N_WINDOW
    if r.HAS_COUNTS:
        token, _, _ = item_place(r, item)
        count = gl.load(
            r.counts + token.to(gl.int64) * r.stride_count, mask=item < r.n_items, other=0
        )
        columns = gl.minimum(gl.maximum(count, 0), columns).to(gl.int32)
    return columns


@gluon.jit
def item_columns(r, item, count):
    """Columns `[first, end)` of an item, in whole tiles but for the last; see ``split_range``."""
    end = r.N_WINDOW + count
    first = 0
    if r.SPLITS > 1:
        width = gl.cdiv(gl.cdiv(end, TILE), r.SPLITS) * TILE
        first = item % r.SPLITS * width
        end = gl.minimum(first + width, end)
    return first, gl.where(item < r.n_items, end, first)


@gluon.jit
def item_tiles(r, item, count):
    """Tiles of an item; one without columns has a dead one, so that every item has a last tile."""
    first, end = item_columns(r, item, count)
    return gl.maximum(gl.cdiv(end - first, TILE), 1)


@gluon.jit
def begin_item(r, item, count):
    """Tiles of an item with so many live columns; the item behind it, and that one's columns."""
    tiles = item_tiles(r, item, count)
    next_item = item + gl.num_programs(0)
    return tiles, next_item, load_count(r, next_item)


@gluon.jit
def next_tile(r, item, column, end, next_count):
    """Advance a cursor: item, its current column and end, and the count of the item behind it."""
    column += TILE
    if column >= end:
        item += gl.num_programs(0)
        column, end = item_columns(r, item, next_count)
        next_count = load_count(r, item + gl.num_programs(0))
    return item, column, end, next_count


@gluon.jit
def load_rows(r, item, column, end, LAYOUT: gl.constexpr):
    """Pool rows `[TILE]` int32 of the columns from ``column`` on, negative where dead.

    If a tile can hold rows of both pools, CMP is added to those of the compressed one.
    """
    columns = column + gl.arange(0, TILE, layout=LAYOUT)
    token, _, _ = item_place(r, item)
    row = r.indices + token.to(gl.int64) * r.stride_index_token
    rows = gl.load(row + columns * r.stride_index_column, mask=columns < end, other=-1)
    if rows.dtype == gl.int64:
        rows = gl.maximum(rows, -1).to(gl.int32)
    if not r.WHOLE_TILES:
        rows = gl.where((rows >= 0) & (columns >= r.N_WINDOW), rows + CMP, rows)
    return rows


@gluon.jit
def first_tile(r, item, LAYOUT: gl.constexpr):
    """Column, end and pool rows of the first tile of a program's first item.

    The rows are loaded as if all columns were live, so that the loads need not wait for the count;
    again if splits of fewer columns begin elsewhere.
    """
    guess, _ = item_columns(r, item, r.n_columns - r.N_WINDOW)
    rows = load_rows(r, item, guess, r.n_columns, LAYOUT)
    column, end = item_columns(r, item, load_count(r, item))
    guessed = column == guess
    again = load_rows(r, item, column, gl.where(guessed, column, end), LAYOUT)
    live = guessed & (column + gl.arange(0, TILE, layout=LAYOUT) < end)
    rows = gl.where(live, rows, again)
    return column, end, rows


@gluon.jit
def row_pointers(r, rows, column, N: gl.constexpr, SCALE: gl.constexpr, LAYOUT: gl.constexpr):
    """Pointers `[rows, N]` to the first elements of the data or the scales of a tile's rows.

    Args:
        rows: what ``load_rows`` gives.
        column: first column of the tile.
    """
    features = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, LAYOUT)), 0)
    rows = gl.expand_dims(rows, 1)
    if r.WHOLE_TILES:
        in_window = column < r.N_WINDOW
    else:
        in_window = rows < CMP
        rows = rows & (CMP - 1)
    if SCALE:
        base = gl.where(in_window, r.window.scale, r.cmp.scale)
        stride = gl.where(in_window, r.window.stride_scale, r.cmp.stride_scale)
    else:
        base = gl.where(in_window, r.window.data, r.cmp.data)
        stride = gl.where(in_window, r.window.stride_data, r.cmp.stride_data)
    # Strides in vectors: their product with a row fits into 32 bits without a sign.
    vectors = (rows * stride).to(gl.uint32, bitcast=True).to(gl.int64)
    ELEMENTS: gl.constexpr = VECTOR_BYTES * 8 // base.dtype.element_ty.primitive_bitwidth
    pointers = (base + features) + vectors * ELEMENTS
    if not r.WHOLE_TILES:
        # Newer compilers do not see that either of two pools starts at a vector.
        pointers = gl.max_contiguous(pointers, [1, ELEMENTS])
        pointers = gl.multiple_of(pointers, [1, VECTOR_BYTES])
    return pointers


@gluon.jit
def fetch(target, pointers, live):
    """Start copying elements into shared memory; zeros in rows that are not live."""
    async_load(target, pointers, mask=gl.expand_dims(live, 1))
