"""``tokenpath chat``: talk to a served model, at a terminal or from a script's pipe."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tokenpath.cli.chat_session import Sampling, Session, printable
from tokenpath.config.paths import home_dir
from tokenpath.protocol.errors import InvalidRequestError, SpecError, TokenpathError

_HISTORY_LINES = 1000
_PROMPT = "> "

_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r"})
"""How an answer fits on one line; ``printf '%b'`` undoes it."""


def chat(
    url: Annotated[str, typer.Option(help="Base URL of the API.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[
        str | None, typer.Option(help="Model to talk to. Default: the first the server lists.")
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System text: how the model shall behave.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature. Default: the server's.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Longest answer. Default: the server's.")
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Environment variable that holds the API key."),
    ] = None,
) -> None:
    """Chat with a served model in the terminal.

    Ctrl-C stops an answer, Ctrl-D leaves, /help lists the commands. With input from a pipe, every
    line is a message and every answer is one line of output.
    """
    key = None
    if api_key_env is not None:
        key = os.environ.get(api_key_env)
        if not key or not key.isascii() or not key.isprintable():
            raise SpecError(
                f"the environment variable {api_key_env} named by --api-key-env holds no API key"
            )
    with Session.open(url, model, key) as session:
        session.system = system
        session.sampling = Sampling(temperature, max_tokens)
        _tolerate_bad_characters()
        if sys.stdin.isatty() and sys.stdout.isatty():
            _converse(session)
        else:
            _answer_lines(session)


def _converse(session: Session) -> None:
    """Read from the terminal until Ctrl-D or ``/exit``."""
    typer.echo(
        f"{session.model} at {session.endpoint.url}. /help lists the commands, Ctrl-D leaves."
    )
    with _line_editing():
        while True:
            try:
                line = input(_PROMPT).strip()
            except KeyboardInterrupt:
                typer.echo("\n(Ctrl-D or /exit leaves)")
                continue
            except EOFError:
                typer.echo()
                return
            try:
                if not _obey(session, line, say=typer.echo):
                    _show_answer(session, line)
            except _Exit:
                return
            except TokenpathError as error:
                typer.echo(printable(error.message))
            except KeyboardInterrupt:
                typer.echo()


def _show_answer(session: Session, line: str) -> None:
    def write(text: str) -> None:
        typer.echo(printable(text), nl=False)

    try:
        answer = session.ask(_message(line), write)
    except TokenpathError as error:
        typer.echo("\n" + printable(error.message))
    else:
        typer.echo("\n(stopped)" if answer.stopped else "")


def _answer_lines(session: Session) -> None:
    """Answer each line of stdin with one line on stdout; the first error ends it."""
    for raw in sys.stdin:
        line = raw.strip()
        try:
            if _obey(session, line, say=_to_stderr):
                continue
        except _Exit:
            return
        answer = session.ask(_message(line), lambda _: None)
        if answer.stopped:
            raise KeyboardInterrupt
        typer.echo(answer.text.translate(_ESCAPES))


def _message(line: str) -> str:
    """Return what the user means: a doubled slash at the beginning is one."""
    return line[1:] if line.startswith("//") else line


def _tolerate_bad_characters() -> None:
    """Show and read what is no valid text as a replacement mark instead of failing."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _to_stderr(text: str) -> None:
    typer.echo(text, err=True)


class _Exit(Exception):  # noqa: N818 - no error
    """The user typed ``/exit``."""


@dataclass(frozen=True, slots=True)
class _Command:
    usage: str
    what: str
    act: Callable[[Session, str], str]
    """Takes the session and the rest of the line; returns what to tell the user."""


def _obey(session: Session, line: str, *, say: Callable[[str], None]) -> bool:
    """Act on a command or an empty line; False when the line is a message."""
    if not line:
        return True
    if not line.startswith("/") or line.startswith("//"):
        return False
    name, _, rest = line.partition(" ")
    command = _COMMANDS.get(name)
    if command is None:
        raise InvalidRequestError(
            f"there is no command {name}; /help lists them, and // begins a message with a slash"
        )
    say(printable(command.act(session, rest.strip())))
    return True


def _help(_: Session, __: str) -> str:
    width = max(len(command.usage) for command in _COMMANDS.values())
    return "\n".join(f"{c.usage:{width}}  {c.what}" for c in _COMMANDS.values())


def _stats(session: Session, _: str) -> str:
    totals, last = session.totals, session.last
    if last is None:
        return "no answer yet"
    unreported = f" ({totals.unreported} answers unreported)" if totals.unreported else ""
    usage = last.usage
    return (
        f"last answer: {_figure(last.ttft_s, 's', 3)} to the first token, "
        f"{_figure(last.tokens_per_s, 'tokens/s', 1)}, "
        f"{_figure(usage.prompt_tokens, 'prompt tokens')} "
        f"({_figure(usage.cached_tokens, 'cached')}), "
        f"{_figure(usage.completion_tokens, 'output tokens')}"
        f"{', stopped' if last.stopped else ''}\n"
        f"{totals.answers} answers: {totals.prompt_tokens} prompt tokens, "
        f"{totals.output_tokens} output tokens{unreported}"
    )


def _reset(session: Session, _: str) -> str:
    session.reset()
    return "the conversation starts anew"


def _system(session: Session, text: str) -> str:
    session.system = text or None
    return "the system text is set" if text else "the system text is removed"


def _model(session: Session, name: str) -> str:
    if not name:
        return f"talking to {session.model}; served: {', '.join(session.models())}"
    session.choose(name)
    return f"talking to {session.model}"


def _save(session: Session, name: str) -> str:
    if not name:
        raise InvalidRequestError("give the name of a file: /save FILE")
    saved = msgspec.json.encode({"model": session.model, "messages": session.messages()})
    try:
        with Path(name).expanduser().open("xb") as file:
            file.write(msgspec.json.format(saved, indent=2) + b"\n")
    except FileExistsError:
        raise InvalidRequestError(f"{name} exists already; give another name") from None
    except (OSError, RuntimeError, ValueError) as error:  # no such user's home, a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise InvalidRequestError(f"cannot write {name}: {reason}") from error
    return f"saved to {name}"


def _leave(_: Session, __: str) -> str:
    raise _Exit


_COMMANDS = {
    command.usage.split()[0]: command
    for command in (
        _Command("/help", "list the commands", _help),
        _Command("/stats", "speed and tokens of the last answer, and totals", _stats),
        _Command("/reset", "forget the conversation", _reset),
        _Command("/system TEXT", "set the system text; without TEXT, remove it", _system),
        _Command("/model NAME", "talk to another model; without NAME, list them", _model),
        _Command("/save FILE", "write the conversation to a new file, as JSON", _save),
        _Command("/exit", "leave", _leave),
    )
}


def _figure(value: float | None, unit: str, digits: int = 0) -> str:
    return f"unknown {unit}" if value is None else f"{value:,.{digits}f} {unit}"


@contextlib.contextmanager
def _line_editing() -> Iterator[None]:
    """Give ``input`` editing, and the lines of earlier chats; keep this one's."""
    try:
        import readline  # noqa: PLC0415 - not on every system
    except ImportError:
        yield
        return
    history = home_dir() / "chat_history"
    with contextlib.suppress(OSError):  # none yet, or not readable: start with an empty one
        readline.read_history_file(history)
    readline.set_history_length(_HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a full disk must not spoil leaving the chat
            history.touch(mode=0o600)
            readline.write_history_file(history)
