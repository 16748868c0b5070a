"""The read with explicit shared memory and specialised warps, for GPUs with wgmma (sm_90).

What Triton's compiler cannot do for ``kernels/attention.py``, Gluon can: dequantize the next rows
while the tensor cores work on the last ones. A program is three groups of four warps, each a loop
of its own:

``gather``  brings 64 rows at a time into a ring of two tiles in shared memory: bf16 rows in place;
            of quantized rows raw bytes by cp.async, dequantized to fp16 on the way
``half``    twice: scores = Q rows^T and softmax of every other tile, and for all tiles one half of
            the features: acc += P rows. P, rescaling factors and maxima of the other tiles come
            from the other group. While one computes weights, the tensor cores work for the other.

Parallelization: a persistent grid of at most one program per streaming multiprocessor. An item is
one token, one block of BLOCK_H heads and one split of the token's live columns; program p works on
items p, p + P, p + 2P, ... While the last tile of an item is in the works, the next query is on its
way.

Names: tile TILE columns of an item; it counter of a program's tiles, which gives ring slots and
barrier phases; HALF half of the features; words int32 that hold four codes or two 16-bit floats;
``r`` the operator's arguments, ``s`` what the groups share.

Dot products of quantized rows are in fp16, which holds e4m3 times a power of two exactly and takes
two instructions for two elements where bf16 takes five. The range is kept by powers of two that are
divided out and multiplied back: one per tile of rows whose scales exceed ``SAFE_SCALE_EXPONENT``,
one per head where a query's largest element would not fit. Elements of rows below 2^-14 are rounded
to multiples of 2^-24.
"""
