"""Planted codes: what a sequence and a prompt contain."""

import re

import numpy as np
import pytest

from bench.quality import corpus, recall

TEXT = np.frombuffer(bytes(range(65, 91)) * 4000, np.uint8)
CODE = re.compile(rb"\[([a-z]{2})=(\d{4})\]")


def test_answers_are_the_digits_of_the_second_time():
    rng = np.random.default_rng(0)
    tokens, text, answers = recall.sequence(rng, TEXT, 1024, 20)
    assert tokens.shape == text.shape == answers.shape == (1024,)
    seen: dict[bytes, bytes] = {}
    repeated = 0
    for match in CODE.finditer(tokens.tobytes()):
        name, digits = match.groups()
        assert not text[match.start() : match.end()].any()
        first, last = match.span(2)
        assert answers[first:last].all() == (name in seen)
        assert answers[match.start() : match.end()].sum() == (4 if name in seen else 0)
        repeated += name in seen
        assert seen.setdefault(name, digits) == digits
    assert len(seen) == repeated == 20
    assert text.sum() == 1024 - 2 * 20 * recall.CODE_BYTES
    assert answers.sum() == 20 * recall.DIGITS


def test_a_batch_has_text_alone_and_mostly_codes_and_copies():
    sequences = recall.batch(np.random.default_rng(0), TEXT, 64, 1024, recall.Mix(0.25, 0.25))
    shares = sequences.text.mean(1)
    copied = sequences.copies.any(1)
    assert (shares == 1).any() and ((shares < 0.5) & ~copied).any() and (shares[copied] == 0).all()
    assert not (sequences.answers & sequences.copies).any()
    assert set(sequences.tokens[sequences.text].tolist()) <= set(TEXT.tolist())


def test_letters_of_a_repeated_block_can_be_known():
    tokens, copies = recall.repeated(np.random.default_rng(0), 1024)
    (start,) = {int(np.flatnonzero(copies)[0])}
    period = start - recall.FIRST_DIGIT
    assert copies[start:].all() and period <= 512
    assert (tokens[period:] == tokens[:-period]).all()
    assert len(np.unique(tokens[:period])) > 5


@pytest.mark.parametrize("distance", recall.DISTANCES.values())
def test_a_prompt_has_its_code_once_at_its_distance(distance):
    question = recall.prompt(np.random.default_rng(0), TEXT, distance)
    data = bytes(question.tokens)
    opening = data[-recall.FIRST_DIGIT :]
    assert data.index(opening) == len(data) - recall.FIRST_DIGIT - distance
    planted = data[data.index(opening) :][: recall.CODE_BYTES]
    assert planted == opening + bytes(question.answer) + b"]"
    assert data.count(opening) == 2
    assert len(CODE.findall(data)) == 1 + distance // recall.DISTRACTOR_BYTES


def test_prompts_are_repeatable():
    first, again, other = (recall.prompts(seed, TEXT, 1024, 3) for seed in (0, 0, 1))
    assert first == again != other


def test_held_out_documents_are_recognized(monkeypatch):
    """Training text leaves out what is held out, and keeps the rest."""
    held = corpus.heldout()
    apart = b"A document of its own, with a line that is long enough to tell it apart. " * 8
    inside = held.split(corpus.SEPARATOR)[3]
    assert len(corpus.long_lines(inside)) > 1
    monkeypatch.setattr(corpus, "documents", lambda packages: [apart, inside])
    assert corpus.training_text() == apart
    assert corpus.HELDOUT_BYTES <= len(held) < 1.1 * corpus.HELDOUT_BYTES


def test_prose_is_told_from_listings():
    assert corpus.prose(b"Return the number of bytes that were read, or nothing.\n" * 10)
    assert not corpus.prose(b"| 0x%02x | 12345 | {a: b} |\n" * 20)
    assert not corpus.prose(b"Too short.")
