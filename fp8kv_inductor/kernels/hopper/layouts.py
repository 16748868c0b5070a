"""Sizes of the tiles, and who holds which element of them, in registers and in shared memory."""

import triton.experimental.gluon.language as gl

HEAD_DIM = 512
"""Features of a row that the layouts are made for."""
BLOCK = 32
"""Elements per block scale that they are made for."""
BLOCK_H = gl.constexpr(64)
TILE = gl.constexpr(64)
HALF = gl.constexpr(HEAD_DIM // 2)
VECTOR_BYTES = gl.constexpr(16)
"""What one cp.async copies; rows start at multiples of it."""
CMP = gl.constexpr(1 << 30)
"""Added to the rows of the compressed pool; pools are smaller."""
SAFE_SCALE_EXPONENT = gl.constexpr(6)
"""448 * 2^7 < 65504: below that exponent + 1, a scale times any code fits into fp16."""

# Scores [64, 64] and accumulators [64, 256] of a wgmma.
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
# Weights as the left operand, in registers.
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, ACC, 2))
# Operands of a wgmma, as 16-bit floats and as words.
OPERAND = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
OPERAND_BLOCK = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))
OPERAND_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PLAIN_2D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
# 16-byte vectors of rows of bf16, and of words.
VECTORS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
WORD_VECTORS = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
# What is left of words in such vectors when each vector has become one.
FOLDED_WORDS = gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0]))
# A chunk of raw codes: 32 rows x 64 words (256 codes), 16-byte vectors. Lane bit 2 walks rows, so
# that the stores of the dequantized tile, swizzled in lines of 128 bytes, meet no bank conflict.
CHUNK = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [16, 0]],
        [[0, 4], [0, 8], [1, 0], [0, 16], [0, 32]],
        [[2, 0], [4, 0]],
        [],
        [32, 64],
    )
)
# The same as [row, block, half block, word].
CHUNK_BLOCKS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [8, 0, 0, 0], [16, 0, 0, 0]],
        [[0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[2, 0, 0, 0], [4, 0, 0, 0]],
        [],
        [32, 8, 2, 4],
    )
)
# No bank conflict when cp.async fills a line of 128 bytes, nor when 16-byte vectors are read.
RAW = gl.constexpr(
    gl.SharedLinearLayout(
        [
            [0, 1],
            [0, 2],
            [0, 4],
            [0, 8],
            [0, 16],
            [0, 32],
            [1, 16],
            [2, 0],
            [4, 0],
            [8, 0],
            [16, 0],
        ]
    )
)
N_BLOCKS = gl.constexpr(HEAD_DIM // BLOCK)
# Scales of a tile in vectors of 16 bytes: of fp16, and of one byte each.
SCALES = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0]))
SCALES_U8 = gl.constexpr(gl.BlockedLayout([1, 16], [32, 1], [4, 1], [1, 0]))
# One number per warp of a group, all of them in every thread.
EXPONENTS = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
