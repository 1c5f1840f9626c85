import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

import tokenpath as package
from tokenpath.cli import main
from tokenpath.cli.errors import run_command
from tokenpath.protocol.errors import ModelFileError, NotFoundError, SpecError

HEAVY = ("torch", "pydantic", "sqlalchemy", "alembic", "starlette", "uvicorn", "httpx", "numpy")


def imported_by(statement: str) -> set[str]:
    """Which of the heavy packages a fresh interpreter has after a statement."""
    code = f"import sys\n{statement}\nprint(*(m for m in {HEAVY!r} if m in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(result.stdout.splitlines()[-1].split())


def test_help_lists_every_command_and_imports_nothing_heavy():
    statement = (
        "from typer.testing import CliRunner\n"
        "from tokenpath.cli.main import app\n"
        "out = CliRunner().invoke(app, ['--help']).output\n"
        "assert all(name in out for name in ('serve', 'chat', 'models', 'keys', 'spec', 'bench'))"
    )
    assert imported_by(statement) == set()


def test_version(tokenpath):
    result = tokenpath("--version")
    assert (result.returncode, result.stdout) == (0, f"tokenpath {package.__version__}\n")


def test_a_typo_is_answered_with_the_command_that_was_meant(tokenpath):
    result = tokenpath("serv")
    assert result.returncode == 2
    assert "'serve'" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("name", main.COMMANDS)
def test_the_summary_is_the_commands_own_first_line(name):
    command = main.load_command(name)
    assert command.help.splitlines()[0] == main.COMMANDS[name].summary
    shown = CliRunner().invoke(main.app, [name, "--help"])
    assert shown.exit_code == 0
    assert main.COMMANDS[name].summary in shown.output


@pytest.mark.parametrize(
    ("error", "code"), [(NotFoundError("s"), 1), (SpecError("s"), 2), (ModelFileError("s"), 3)]
)
def test_an_error_is_one_sentence_and_its_exit_code(error, code, capsys):
    def fail():
        raise error

    assert run_command(fail) == code
    captured = capsys.readouterr()
    assert captured.err == "s\n"
    assert captured.out == ""


def test_debug_shows_the_traceback_too(capsys, monkeypatch):
    def fail():
        raise SpecError("the sentence")

    monkeypatch.setenv("TOKENPATH_DEBUG", "1")
    assert run_command(fail) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("the sentence\n")


@pytest.mark.parametrize("command", ["--version", "--help", "spec schema", "models list"])
def test_output_that_cannot_be_written(command, home):
    shell = f"{sys.executable} -m tokenpath.cli.main {command}"
    full = subprocess.run(
        f"{shell} > /dev/full", shell=True, capture_output=True, text=True, check=False
    )
    assert full.returncode == 1
    assert full.stderr == "the output cannot be written: No space left on device\n"
    closed = subprocess.run(f"{shell} >&-", shell=True, capture_output=True, text=True, check=False)
    assert (closed.returncode, closed.stderr) == (0, "")


def test_a_bug_is_not_hidden():
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_command(fail)


def test_exit_codes_pass_through():
    def interrupt():
        raise KeyboardInterrupt

    assert run_command(lambda: sys.exit(7)) == 7
    assert run_command(lambda: sys.exit(None)) == 0
    assert run_command(lambda: sys.exit("words")) == 1
    assert run_command(interrupt) == 130


def test_ctrl_c_in_a_command():
    app = typer.Typer()

    @app.command()
    def wait():
        raise KeyboardInterrupt

    def command():
        typer.main.get_command(app)(args=[])

    assert run_command(command) == 130


def test_a_reader_that_leaves_early_is_no_error():
    script = f"{sys.executable} -m tokenpath.cli.main spec schema | head -c 10"
    result = subprocess.run(script, shell=True, capture_output=True, text=True, check=False)
    assert result.stdout == '{\n  "$defs"'[:10]
    assert result.stderr == ""
