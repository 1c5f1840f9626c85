"""The pages of docs/reference are what the code says, and say what the code has."""

from pathlib import Path

import pytest

from tokenpath.cli.reference import pages
from tokenpath.protocol.errors import error_classes

COMMITTED = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize("name", ["spec.md", "errors.md", "cli.md"])
def test_the_committed_page_is_current(name):
    written = (COMMITTED / name).read_text(encoding="utf-8")
    assert written == pages()[name], (
        "run `python -m tokenpath.cli.reference docs/reference` and commit the result"
    )


def test_every_error_has_its_row():
    page = pages()["errors.md"]
    for code, cls in error_classes().items():
        if cls.__module__ == "tokenpath.protocol.errors":
            assert f"| `{code}` | " in page
            assert f"`{cls.__name__}`" in page


def test_every_key_of_the_spec_has_its_row_and_a_meaning():
    rows = [line for line in pages()["spec.md"].splitlines() if line.startswith("| `")]
    assert len(rows) > 30
    for row in rows:
        assert len(row.split(" | ")[-1]) > len("x |"), row


def test_every_option_has_a_meaning():
    rows = [line for line in pages()["cli.md"].splitlines() if line.startswith("| `")]
    for row in rows:
        assert row.rstrip(" |").count("|") >= 3, row
