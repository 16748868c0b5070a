"""Documents are true: DESIGN.md's table of imports, and the tests that tests/README.md names."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TABLE = re.findall(r"^\| `([\w/.]+)` \|", (ROOT / "DESIGN.md").read_text(), re.MULTILINE)
SOURCES = sorted([*ROOT.glob("fp8kv_inductor/**/*.py"), *ROOT.glob("lowerings/**/*.py")])
PRIVATE_TORCH = ("lowerings/", "_compat.py")
PUBLIC_IN_ALL_BUT_NAME = {"torch._check", "torch._dynamo.mark_dynamic"}


def row(path: str) -> int:
    """The table's row of a file, as the table writes it or inside a folder that it lists."""
    return next((i for i, entry in enumerate(TABLE) if path == entry or path.startswith(entry)), -1)


def name_in_table(source: Path) -> str:
    return source.relative_to(ROOT).as_posix().removeprefix("fp8kv_inductor/")


def imports(source: Path) -> list[str]:
    """Dotted names that a file imports at run time; ``from a import b`` gives a.b."""
    tree = ast.parse(source.read_text())
    typing_only = {
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and node not in typing_only:
            names += [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom) and node not in typing_only:
            assert node.level == 0, f"{source}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def own_file(name: str) -> str | None:
    """The file of this package that a dotted name lies in, as the table writes it."""
    parts = name.split(".")[1:] if name.startswith("fp8kv_inductor.") else []
    for end in range(len(parts), 0, -1):
        for path in ("/".join(parts[:end]) + ".py", "/".join(parts[:end]) + "/__init__.py"):
            if (ROOT / "fp8kv_inductor" / path).exists() or (ROOT / path).exists():
                return path
    return None


def test_the_table_lists_every_file_and_no_other():
    assert len(TABLE) > 10
    for entry in TABLE:
        assert (ROOT / "fp8kv_inductor" / entry).exists() or (ROOT / entry).exists(), entry
    packages = ("__init__.py", "models/__init__.py")
    unlisted = {name_in_table(each) for each in SOURCES if row(name_in_table(each)) < 0}
    assert unlisted == set(packages)


@pytest.mark.parametrize("source", SOURCES, ids=name_in_table)
def test_a_file_imports_only_what_stands_above_it(source):
    name = name_in_table(source)
    if name == "__init__.py":
        return
    for imported in filter(None, map(own_file, imports(source))):
        assert row(imported) <= row(name), f"{name} imports {imported}, which stands below it"
        assert imported != "reference.py", f"{name} imports the oracle"


@pytest.mark.parametrize("source", SOURCES, ids=name_in_table)
def test_private_torch_names_stay_in_their_places(source):
    name = name_in_table(source)
    if name.startswith(PRIVATE_TORCH):
        return
    attributes = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Attribute)
    ]
    private = {
        used
        for used in [*imports(source), *attributes]
        if re.match(r"torch(\.\w+)*\._(?!_)", used)
        and not any(allowed.startswith(used) for allowed in PUBLIC_IN_ALL_BUT_NAME)
    }
    assert not private


def test_every_fault_has_a_row_of_tests_that_exist():
    text = (ROOT / "tests" / "README.md").read_text()
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 37))
    for number, row in rows:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", row)
        assert named, f"fault {number} has no test"
        for file, test in named:
            path = ROOT / "tests" / file
            assert path.exists(), file
            assert re.search(rf"^def {test}\(", path.read_text(), re.MULTILINE), f"{file}::{test}"
