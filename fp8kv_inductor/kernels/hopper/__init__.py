"""The read with explicit shared memory and specialised warps, for GPUs with wgmma (sm_90).

What Triton's compiler cannot do for ``kernels/attention.py``, Gluon can: dequantize the next rows
while the tensor cores work on the last ones. A program is three groups of four warps, each a loop
of its own:

``gather``  brings 64 rows at a time into shared memory, bf16 rows in place, quantized ones
            dequantized to fp16 on the way; and the queries of the next item, while the last tile of
            the old one is worked on
``left``    scores = Q rows^T, softmax, and the left half of the features: acc += P rows
``right``   the right half of the features; P and the rescaling factors come from ``left``

Behind its output of an item, each of the last two turns its half of the next queries into fp16, if
rows are.

Parallelization: a persistent grid of at most one program per streaming multiprocessor. An item is
one token, one block of BLOCK_H heads and one split of the token's live columns; program p works on
items p, p + P, p + 2P, ... A multiprocessor needs 3 us to write the fp32 part of a split, 128 KiB;
with few queries the second axis of the grid divides the heads of a part among programs that compute
the same and write a share each. A part of quantized rows is in fp16, over a power of two that its
largest block scale gives. Programs start while the kernel in front of them ends, and wait for it
before they touch memory (programmatic dependent launch).

Names: tile TILE columns of an item; it counter of a program's tiles; place and step where queries
and tiles are in shared memory, and their order, see ``places``; HALF half of the features; words
int32 that hold four codes or two 16-bit floats; ``r`` the operator's arguments, ``s`` what the
groups share.

Dot products of quantized rows are in fp16, which holds e4m3 times a power of two exactly and takes
two instructions for two elements where bf16 takes five. The range is kept by powers of two that are
divided out and multiplied back: one per tile of rows whose scales exceed ``SAFE_SCALE_EXPONENT``,
one per head where a query's largest element would not fit. Elements of rows below 2^-14 are rounded
to multiples of 2^-24.
"""
