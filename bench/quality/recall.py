"""Synthetic recall: codes planted in a text, which must be repeated thousands of bytes later.

A code is planted as ``[ab=1234]``: a name of two letters and four digits. When the same name comes
again, the digits can be known from the first time alone. Repeated blocks of random letters teach
the same faster, because every byte of them can be known.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

DIGITS = 4
LETTERS = 26
CODE_BYTES = len("[ab=1234]")
FIRST_DIGIT = len("[ab=")
DISTANCES = {"1K": 1 << 10, "4K": 4 << 10, "9K": 9 << 10, "16K": 16 << 10}
"""Bytes from a planted code to its repetition."""

DISTRACTOR_BYTES = 512
"""A recall prompt has one other code per so many bytes."""


class Sequences(NamedTuple):
    """Sequences to train on.

    Attributes:
        tokens: `[B, L]`.
        text: `[B, L]` bool, bytes of the text.
        answers: `[B, L]` bool, digits of repeated codes.
        copies: `[B, L]` bool, letters of repeated blocks.
    """

    tokens: Bytes
    text: NDArray[np.bool_]
    answers: NDArray[np.bool_]
    copies: NDArray[np.bool_]


def codes(rng: np.random.Generator, count: int) -> Bytes:
    """``count`` planted codes `[count, CODE_BYTES]`, all names distinct."""
    names = rng.choice(LETTERS * LETTERS, count, replace=False)
    rows = np.empty((count, CODE_BYTES), np.uint8)
    rows[:] = np.frombuffer(b"[ab=0000]", np.uint8)
    rows[:, 1] = ord("a") + names // LETTERS
    rows[:, 2] = ord("a") + names % LETTERS
    rows[:, FIRST_DIGIT : FIRST_DIGIT + DIGITS] += rng.integers(
        0, 10, (count, DIGITS), dtype=np.uint8
    )
    return rows


def excerpt(rng: np.random.Generator, text: Bytes, size: int) -> Bytes:
    """``size`` neighbouring bytes from anywhere in the text."""
    start = int(rng.integers(0, len(text) - size + 1))
    return text[start : start + size]


def sequence(
    rng: np.random.Generator, text: Bytes, length: int, pairs: int
) -> tuple[Bytes, NDArray[np.bool_], NDArray[np.bool_]]:
    """An excerpt with ``pairs`` codes, each planted and later repeated, at random places.

    Returns:
        tokens, text and answers `[length]` as in :class:`Sequences`.
    """
    inserted = 2 * pairs * CODE_BYTES
    body = excerpt(rng, text, length - inserted)
    if not pairs:
        return body, np.ones(length, bool), np.zeros(length, bool)
    rows = codes(rng, pairs)
    # Every code twice, in random order: the first time it is planted, the second time repeated.
    order = rng.permutation(np.repeat(np.arange(pairs), 2))
    again = np.zeros(2 * pairs, bool)
    seen: set[int] = set()
    for i, code in enumerate(order.tolist()):
        again[i] = code in seen
        seen.add(code)
    places = np.repeat(np.sort(rng.integers(0, len(body) + 1, 2 * pairs)), CODE_BYTES)
    digits = np.zeros((2 * pairs, CODE_BYTES), bool)
    digits[:, FIRST_DIGIT : FIRST_DIGIT + DIGITS] = again[:, None]
    return (
        np.insert(body, places, rows[order].ravel()),
        np.insert(np.ones(len(body), bool), places, False),
        np.insert(np.zeros(len(body), bool), places, digits.ravel()),
    )


def repeated(rng: np.random.Generator, length: int) -> tuple[Bytes, NDArray[np.bool_]]:
    """A block of random letters over and over, and where its letters can be known, `[length]`."""
    period = int(rng.integers(CODE_BYTES, length // 2 + 1))
    block = ord("a") + rng.integers(0, LETTERS, period, dtype=np.uint8)
    return np.resize(block, length), np.arange(length) >= period + FIRST_DIGIT


class Mix(NamedTuple):
    """Shares of sequences; half of what is left is text alone, half is text with some codes.

    Attributes:
        copies: repeated blocks.
        dense: mostly codes.
    """

    copies: float
    dense: float


def batch(rng: np.random.Generator, text: Bytes, size: int, length: int, mix: Mix) -> Sequences:
    """``size`` sequences of one length, with excerpts of ``text``, in the shares of ``mix``."""
    most = min(length // (3 * CODE_BYTES), LETTERS * LETTERS // 2)
    none = np.zeros(length, bool)
    parts = []
    for _ in range(size):
        kind = rng.random()
        if kind < mix.copies:
            tokens, copies = repeated(rng, length)
            parts.append((tokens, none, none, copies))
            continue
        if kind < mix.copies + mix.dense:
            pairs = int(rng.integers(most // 2, most + 1))
        elif kind < (1 + mix.copies + mix.dense) / 2:
            pairs = int(rng.integers(1, max(2, length // 256)))
        else:
            pairs = 0
        parts.append((*sequence(rng, text, length, min(pairs, most)), none))
    return Sequences(*(np.stack(part) for part in zip(*parts, strict=True)))


class Prompt(NamedTuple):
    """A recall question.

    Attributes:
        tokens: ends where the first digit of the answer must follow.
        answer: `[DIGITS]`.
    """

    tokens: list[int]
    answer: list[int]


def prompt(rng: np.random.Generator, text: Bytes, distance: int) -> Prompt:
    """A text with a code ``distance`` bytes before its repetition, and with other codes.

    The planted code starts ``distance`` bytes before the repetition starts.
    """
    rows = codes(rng, 1 + max(1, distance // DISTRACTOR_BYTES))
    planted, others = rows[0], rows[1:]
    body = excerpt(rng, text, distance - len(rows) * CODE_BYTES)
    places = np.repeat(np.sort(rng.integers(0, len(body) + 1, len(others))), CODE_BYTES)
    tokens = np.concatenate(
        [planted, np.insert(body, places, others.ravel()), planted[:FIRST_DIGIT]]
    )
    return Prompt(tokens.tolist(), planted[FIRST_DIGIT : FIRST_DIGIT + DIGITS].tolist())


def prompts(seed: int, text: Bytes, distance: int, count: int) -> list[Prompt]:
    """``count`` recall questions of one distance, the same for the same seed."""
    rng = np.random.default_rng([seed, distance])
    return [prompt(rng, text, distance) for _ in range(count)]
