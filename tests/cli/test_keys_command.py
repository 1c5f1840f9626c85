import re

import pytest
from typer.testing import CliRunner

from tokenpath.cli.keys import app
from tokenpath.config.paths import state_file
from tokenpath.store.database import open_database
from tokenpath.store.keys import KeyStore

runner = CliRunner()


def run(*arguments):
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result


def test_create_list_revoke():
    assert "No API key was ever created" in run("list").stderr
    created = run("create", "alice [bold]x")
    assert re.fullmatch(r"tp-[\w-]{43}\n", created.stdout)
    assert "cannot be shown again" in created.stderr
    assert "the first key: from now on every request needs one" in created.stderr
    assert "the first key" not in run("create", "bob").stderr
    listed = run("list").stdout
    assert "alice [bold]x" in listed
    assert created.stdout[:11] in listed
    assert created.stdout.strip() not in listed
    assert "Key 2 (bob" in run("revoke", "2").stderr
    last = run("revoke", created.stdout[:11]).stderr
    assert "No valid key is left, so nobody can use the server" in last
    with open_database(state_file()) as database:
        snapshot = KeyStore(database).snapshot()
    assert snapshot.ever_created
    assert snapshot.valid == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("revoke", "7"), "there is no key '7'; `tokenpath keys list` shows all"),
        (("create", "a\nb"), "a key's name must be 1 to 100 printable characters"),
    ],
)
def test_mistakes(tokenpath, arguments, words):
    result = tokenpath("keys", *arguments)
    assert (result.returncode, result.stdout, result.stderr) == (1, "", words + "\n")


def test_a_damaged_database_is_said_in_one_sentence(tokenpath):
    state_file().write_bytes(b"garbage" * 1000)
    result = tokenpath("keys", "list")
    assert result.returncode == 1
    assert re.fullmatch(
        r"the state database \S+/state\.db is no SQLite database; .*\n", result.stderr
    )


def test_a_home_that_is_a_file(tokenpath, home):
    home.write_text("")
    result = tokenpath("keys", "list")
    assert result.returncode == 2
    assert "set TOKENPATH_HOME to one that you may write to" in result.stderr
