import json
import shlex

import pytest

from tokenpath.cli import banner


@pytest.mark.parametrize(
    ("kind", "path", "field"),
    [
        ("chat", "chat/completions", "messages"),
        ("complete", "completions", "prompt"),
        ("embed", "embeddings", "input"),
        ("rerank", "rerank", "documents"),
        ("classify", "classify", "input"),
    ],
)
def test_the_curl_line_is_one_shell_command(kind, path, field):
    words = shlex.split(banner.curl_line("http://h:1", "it's $a `b`", kind, key_needed=False))
    assert words[0] == "curl"
    assert words[1] == f"http://h:1/v1/{path}"
    body = json.loads(words[-1])
    assert body["model"] == "it's $a `b`"
    assert field in body


def test_the_key_comes_from_the_environment():
    line = banner.curl_line("http://h:1", "m", "chat", key_needed=True)
    assert '-H "Authorization: Bearer $TOKENPATH_API_KEY"' in line


def test_who_may_come_in():
    def say(**state):
        return banner.door_line(
            **{"auth": "keys", "ever_created": True, "any_valid": True, **state}
        )

    assert "is required" in say()
    assert say(ever_created=False, any_valid=False).startswith(
        "No API key was ever created: open to this machine only."
    )
    assert "nobody can come in" in say(any_valid=False)
    assert say(auth="none").startswith("Auth is off")
