"""The generated pages of ``docs/reference``: ``python -m tokenpath.cli.reference docs/reference``.

They are written from the code (the spec's models, the error tree, the commands), and a test fails
when the committed pages are not what this module writes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenpath.cli.main import COMMANDS, load_command
from tokenpath.config.reference import spec_page
from tokenpath.protocol.errors import TokenpathError

_ADVICE = {
    "error": "Never sent as such.",
    "invalid_request": "Correct the request; `param` names the field.",
    "context_length_exceeded": "Shorten the prompt, or ask for fewer tokens.",
    "unsupported_parameter": "Leave out the field that `param` names.",
    "body_too_large": "Send less; the limit is `gateway.limits.body_bytes`.",
    "invalid_api_key": "Send a valid key, `Authorization: Bearer tp-…`.",
    "permission_denied": "Use a key that may do this; on a server without keys, call it from its "
    "own machine by the name localhost.",
    "not_found": "Correct the path; the OpenAPI page lists them.",
    "method_not_allowed": "Use the method that the OpenAPI page gives for this path.",
    "conflict": "See the state, `GET /admin/models`, and try again when it fits.",
    "request_timeout": "Send the body without pauses; a slow link is a reason to retry.",
    "model_not_found": "Name a model of `GET /v1/models`.",
    "overloaded": "Wait as `Retry-After` says, then send the same request again.",
    "deadline_exceeded": "Ask for fewer tokens, or raise `gateway.limits.request_s`.",
    "unavailable": "Wait as `Retry-After` says, then send the same request again.",
    "not_ready": "The model is loading: wait, then send the same request again.",
    "asleep": "Wait as `Retry-After` says, or have the model woken: `tokenpath replicas wake`.",
    "draining": "The server is shutting down: send the same request again, to another or later.",
    "replica_lost": "The engine process ended: send the same request again; what was streamed "
    "already is not to be trusted as a whole answer.",
    "cancelled": "Nothing: the client itself went away. Seen only in logs and metrics.",
    "engine_error": "Report it with the `X-Request-Id`; the server's log has the details.",
    "invalid_spec": "On the terminal: correct the spec, the flag or the set-up that it names.",
    "model_error": "On the terminal: as the sentence says.",
    "model_file_invalid": "On the terminal: remove the model and pull it again.",
    "model_unsupported": "On the terminal: use a model of a supported architecture.",
    "pull_failed": "On the terminal: repeat the pull; it goes on where it stopped.",
}
_ERRORS = """\
# Errors

<!-- Written by `python -m tokenpath.cli.reference docs/reference`. -->

An error answer has OpenAI's form, and so has the error event of a stream that had already begun:

```json
{
  "error": {
    "message": "…",
    "type": "invalid_request_error",
    "param": "n",
    "code": "invalid_request"
  }
}
```

`code` and the status are stable, and programs may depend on them; the sentence in `message` may
change. On the terminal an error is that sentence on stderr and an exit code: 1 in general, 2 for a
wrong command line, spec or set-up, 3 for a model that cannot be had or used, 130 after Ctrl-C.

"Retry" says whether the same request may succeed if sent again unchanged.

| code | class | status | type | retry | exit code | what to do |
|---|---|---|---|---|---|---|
"""

_CLI = """\
# The command line

<!-- Written by `python -m tokenpath.cli.reference docs/reference`. -->

Every command has `--help`. Results go to stdout, everything else to stderr. Exit codes: 0 done, 1
an error, 2 a wrong command line, spec or set-up, 3 a model that cannot be had or used, 130 after
Ctrl-C. `TOKENPATH_DEBUG=1` adds the traceback to an error's sentence.

| variable | holds | default |
|---|---|---|
| `TOKENPATH_HOME` | API keys | `tokenpath` in `$XDG_STATE_HOME`, or in `~/.local/state` |
| `TOKENPATH_MODELS` | models | `tokenpath/models` in `$XDG_DATA_HOME`, or in `~/.local/share` |
| `TOKENPATH_CACHE` | what may be deleted | `tokenpath` in `$XDG_CACHE_HOME`, or in `~/.cache` |

"""


def error_page() -> str:
    """``docs/reference/errors.md``."""
    lines = []
    for depth, cls in _tree(TokenpathError, 0):
        status = "–" if _is_terminal_only(cls) else str(cls.http_status)  # noqa: RUF001
        name = "&nbsp;&nbsp;" * depth + f"`{cls.__name__}`"
        retry = "yes" if cls.retryable else "no"
        lines.append(
            f"| `{cls.code}` | {name} | {status} | `{cls.kind}` | {retry} | {cls.exit_code} "
            f"| {_ADVICE[cls.code]} |"
        )
    return _ERRORS + "\n".join(lines) + "\n"


def _tree(cls: type[TokenpathError], depth: int) -> Iterator[tuple[int, type[TokenpathError]]]:
    yield depth, cls
    for child in cls.__subclasses__():
        # Subclasses elsewhere are a room's own and are caught there.
        if child.__module__ == cls.__module__:
            yield from _tree(child, depth + 1)


def _is_terminal_only(cls: type[TokenpathError]) -> bool:
    return cls is TokenpathError or cls.exit_code != TokenpathError.exit_code


def cli_page() -> str:
    """``docs/reference/cli.md``."""
    lines: list[str] = []
    for name in COMMANDS:
        lines += _command_section(load_command(name), f"tokenpath {name}")
    return _CLI + "\n".join(lines).rstrip() + "\n"


def _command_section(command: Any, path: str) -> list[str]:
    children = getattr(command, "commands", None)
    help_text = re.sub(r"[ \t]*\n[ \t]*", "\n", (command.help or "").strip())
    if children is not None:
        lines = [f"## `{path}`", "", help_text, ""]
        for name, child in children.items():
            if not child.hidden:
                lines += _command_section(child, f"{path} {name}")
        return lines
    level = "##" if path.count(" ") == 1 else "###"
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join([path, "[OPTIONS]", *(_argument_usage(p) for p in arguments)])
    lines = [f"{level} `{path}`", "", help_text, "", f"    {usage}", ""]
    rows = [_parameter_row(p) for p in command.params if not getattr(p, "hidden", False)]
    if rows:
        lines += ["| parameter | default | meaning |", "|---|---|---|", *rows, ""]
    return lines


def _argument_usage(parameter: Any) -> str:
    name = _argument_name(parameter)
    return name if parameter.required else f"[{name}]"


def _argument_name(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _parameter_row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        spelling = f"`{_argument_name(parameter)}`"
    else:
        names = ", ".join(f"`{name}`" for name in parameter.opts)
        off = "".join(f" / `{name}`" for name in parameter.secondary_opts)
        spelling = names + off
    default = parameter.default
    absent = default is None or callable(default) or default is False
    shown = "" if absent or parameter.required else f"`{default}`"
    if parameter.required:
        shown = "required"
    meaning = " ".join((parameter.help or "").split())
    return f"| {spelling} | {shown} | {meaning} |".replace("ID|PREFIX", r"ID\|PREFIX")


def pages() -> dict[str, str]:
    """Every generated page, by its file's name."""
    return {"spec.md": spec_page(), "errors.md": error_page(), "cli.md": cli_page()}


def main(folder: Path) -> None:
    """Write the pages into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
