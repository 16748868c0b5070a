"""Text to train and to measure on: documentation inside of Python packages.

    python -m bench.quality.corpus      # writes heldout.txt.xz anew

Licences: PSF-2.0 (``pydoc_data/topics.py`` and docstrings of the standard library), BSD-3-Clause
(docstrings of NumPy and PyTorch), Apache-2.0 (docstrings of Transformers). Training takes what the
machine has installed of these. ``heldout.txt.xz`` is fixed, so that figures compare, and documents
that share lines with it are not trained on; Transformers, which repeats itself, has no part in it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import lzma
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

HELDOUT = Path(__file__).parent / "heldout.txt.xz"
HELDOUT_BYTES = 160 << 10
SEPARATOR = b"\n\n\n"
HELDOUT_PACKAGES = ("numpy", "torch")
PACKAGES = (*HELDOUT_PACKAGES, "transformers")
LEAST_BYTES = 150
"""Shorter docstrings are left out."""
LINE_BYTES = 40
"""Lines that are this long tell documents apart."""
PROSE = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ,.\n'")
PROSE_SHARE = 0.87
"""Least share of letters, spaces, commas and stops: leaves out tables and listings."""


def docstrings(path: Path) -> list[bytes]:
    """Docstrings of a source file, in order; none if it cannot be parsed."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return [text.encode() for text in found if text]


def sources(packages: Iterable[str]) -> list[Path]:
    """Source files of the standard library and of packages, as installed, in a fixed order."""
    folders = [Path(sysconfig.get_paths()["stdlib"])]
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            folders.append(Path(spec.origin).parent)
    return [
        path
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
        if not {"site-packages", "dist-packages", "test", "tests", "idlelib"}
        & set(path.relative_to(folder).parts)
    ]


def prose(document: bytes) -> bool:
    """Whether a document is long enough and mostly words."""
    kept = sum(byte in PROSE for byte in document)
    return len(document) >= LEAST_BYTES and kept >= PROSE_SHARE * len(document)


def documents(packages: Iterable[str]) -> list[bytes]:
    """All documents that are mostly prose, each once."""
    topics = importlib.import_module("pydoc_data.topics").topics
    texts: Iterator[bytes] = (topics[name].encode() for name in sorted(topics))
    found = [text for text in texts if len(text) >= LEAST_BYTES]
    workers = os.cpu_count() or 1
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for texts_of_file in pool.map(docstrings, sources(packages), chunksize=32):
            found += filter(prose, texts_of_file)
    return list(dict.fromkeys(found))


def long_lines(document: bytes) -> set[bytes]:
    """Lines of a document that are long enough to tell it from others."""
    return {line.strip() for line in document.splitlines() if len(line.strip()) >= LINE_BYTES}


def heldout() -> bytes:
    """The text that nothing was trained on."""
    return lzma.decompress(HELDOUT.read_bytes())


def training_text() -> bytes:
    """All documents that share no more than a tenth of their long lines with the held-out text."""
    known = long_lines(heldout())

    def apart(document: bytes) -> bool:
        lines = long_lines(document)
        return 10 * len(lines & known) <= len(lines)

    return SEPARATOR.join(filter(apart, documents(PACKAGES)))


def pick_heldout(found: Iterable[bytes]) -> bytes:
    """About ``HELDOUT_BYTES`` of documents, chosen by checksum, none longer than a tenth of it."""
    chosen: list[bytes] = []
    size = 0
    for document in sorted(found, key=zlib.crc32):
        if len(document) <= HELDOUT_BYTES // 10 and size < HELDOUT_BYTES:
            chosen.append(document)
            size += len(document) + len(SEPARATOR)
    return SEPARATOR.join(chosen)


if __name__ == "__main__":
    HELDOUT.write_bytes(lzma.compress(pick_heldout(documents(HELDOUT_PACKAGES)), preset=9))
    print(f"{len(heldout())} bytes held out, {len(training_text())} bytes left to train on")
