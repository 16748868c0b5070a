"""The wheel holds the whole tree, and the lowerings load from a wheel and from a bare checkout."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LOAD = "import fp8kv_inductor.lowerings as it; it.register(); print(it.__file__)"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy of the sources, without network."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "checkout"
    copy.mkdir()
    for name in ("fp8kv_inductor", "lowerings", "pyproject.toml", "README.md", "LICENSE"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(copy)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(copy)], check=True)
    (built,) = folder.glob("*.whl")
    return built


def tree() -> set[str]:
    """Every source file, as a wheel names it."""
    files = set()
    for folder in ("fp8kv_inductor", "lowerings"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                name = path.relative_to(ROOT).as_posix()
                files.add(name if folder == "fp8kv_inductor" else f"fp8kv_inductor/{name}")
    return files


def run(code: str, path: Path, cwd: Path) -> subprocess.CompletedProcess:
    """``code`` in a new process that finds this package in ``path`` and nowhere before it."""
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(path)!r})\n{code}"],
        cwd=cwd,
        capture_output=True,
        text=True,
    )


def test_the_wheel_holds_the_tree(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == tree()


def test_lowerings_load_from_an_unpacked_wheel(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    result = run(LOAD, tmp_path, tmp_path)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()) == tmp_path / "fp8kv_inductor/lowerings/__init__.py"


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """Python of an environment where pip installed the wheel.

    The dependencies are lent from this environment, behind its own packages: no network here.
    """
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib"))
    return python


def test_the_installed_command_runs(installed, tmp_path):
    command = [installed.with_name("fp8kv"), "plan", "--model", "v4-flash", "--vram", "96GiB"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "fp8_e4m3" in result.stdout


@pytest.mark.parametrize(
    ("line", "error"),
    [("", None), ("plan_pages(tiny, budget='4 MiB')", '"plan_pages" has incompatible type "str"')],
)
def test_types_reach_a_user_of_the_wheel(installed, tmp_path, line, error):
    """An example as a user's file; without py.typed both would fail on the import."""
    example = (ROOT / "examples" / "plan_capacity.py").read_text()
    (tmp_path / "user.py").write_text(f"{example}\n\ntiny = CacheConfig.resolve('tiny')\n{line}\n")
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n")
    mypy = [sys.executable, "-m", "mypy", "--python-executable", str(installed), "user.py"]
    result = subprocess.run(mypy, cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode == 0) == (error is None), result.stdout
    assert (error or "no issues found") in result.stdout


def test_lowerings_load_from_a_bare_checkout(tmp_path):
    for name in ("fp8kv_inductor", "lowerings"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(tmp_path)], check=True)
    result = run(LOAD, tmp_path, tmp_path)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()) == tmp_path / "lowerings/__init__.py"


def test_lowerings_refuse_their_bare_name():
    result = run("import lowerings", ROOT, ROOT)
    assert result.returncode != 0
    assert "import fp8kv_inductor.lowerings" in result.stderr
