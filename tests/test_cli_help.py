"""What every command says of itself, and where it says how far it is."""

import shlex

import pytest

from fp8kv_inductor import cli

COMMANDS = ("demo", "doctor", "plan", "code", "bench")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_that_is_good_usage(capsys, command):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    example = shlex.split(shown.partition("example: ")[2])
    assert example[:2] == ["fp8kv", command] and "--json" in example
    assert cli.make_parser().parse_args(example[1:]).command == command


def test_progress_goes_to_stderr(capsys):
    with cli.make_progress() as progress:
        progress.advance(progress.add_task("a step", total=1))
    shown = capsys.readouterr()
    assert "a step" in shown.err and "1/1" in shown.err and not shown.out
