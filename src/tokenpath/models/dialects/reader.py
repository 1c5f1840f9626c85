"""Splits an answer into thoughts, text and tool calls while it arrives.

What comes out depends on the characters alone, never on how they were cut into pieces: reading a
stream gives what reading the whole text gives. Nothing is lost: what began like a call and turned
out to be none is text again, with its marks. A call is given out when it is complete, since until
then it may still be text; text is given out as soon as it is known not to be part of a call, so
that only a call that is being written, the beginning of a mark, or white space is held back.

White space next to calls and thoughts separates them; between two texts it is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from tokenpath.models.dialects.json_steps import NotACall, Steps
from tokenpath.models.dialects.shapes import Call, Shape, calls

MAX_HELD: Final = 1 << 20
"""Characters of one call; a longer one is text."""
MAX_SPACE: Final = 1_024
"""Characters of white space that are held back at most."""
_SEPARATOR: Final = re.compile(r";\s{0,64}")
"""Between calls without marks, as Llama writes them."""


@dataclass(frozen=True, slots=True)
class Text:
    """Part of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Part of the reasoning before the answer."""

    text: str


Event = Text | Thought | Call


Accepts = Callable[[Shape, Call], bool]
"""Whether a call that was read in a shape counts as one."""


def every_call(_: Shape, __: Call) -> bool:
    """Take all calls."""
    return True


@dataclass(frozen=True, slots=True)
class Marks:
    """What encloses reasoning."""

    open: str
    close: str


class AnswerReader:
    """Reads one answer. ``push`` pieces of it in order, then ``finish`` once."""

    def __init__(
        self,
        *,
        shapes: Sequence[Shape] = (),
        tools: Collection[str] = (),
        thoughts: Marks | None = None,
        thinking: bool = False,
        parallel: bool = True,
        accepts: Accepts = every_call,
    ) -> None:
        """Look for calls of ``tools`` in these ``shapes``, and for ``thoughts`` before all else.

        A call that ``accepts`` does not take is text.
        ``thinking``: the prompt has opened the thoughts, so the answer begins within them.
        Without ``parallel`` the first call is kept and further ones are left out.
        """
        self._thoughts = None if thoughts is None else _ThoughtReader(thoughts, inside=thinking)
        self._calls = _CallReader(shapes, tools, accepts)
        self._parallel = parallel
        self.called = 0
        """Calls given out."""

    @property
    def thought(self) -> bool:
        """Whether the answer began with thoughts, be they empty."""
        return self._thoughts is not None and self._thoughts.inside_once

    def push(self, text: str) -> list[Event]:
        """What the next piece made certain."""
        return self._read(text, final=False)

    def finish(self) -> list[Event]:
        """The answer has ended: what was held back. Nothing may be pushed after it."""
        return self._read("", final=True)

    def _read(self, text: str, *, final: bool) -> list[Event]:
        events: list[Event] = []
        if self._thoughts is not None:
            text = self._thoughts.read(text, events, final=final)
            if self._thoughts.inside_once:
                self._calls.trim()
        self._calls.read(text, events, final=final)
        return _joined(self._allowed(events))

    def _allowed(self, events: list[Event]) -> list[Event]:
        kept: list[Event] = []
        for event in events:
            if isinstance(event, Call):
                if self.called and not self._parallel:
                    continue
                self.called += 1
            kept.append(event)
        return kept


def _joined(events: list[Event]) -> list[Event]:
    """Neighbours of one kind as one."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Text) and isinstance(last, Text):
            joined[-1] = Text(last.text + event.text)
        elif isinstance(event, Thought) and isinstance(last, Thought):
            joined[-1] = Thought(last.text + event.text)
        else:
            joined.append(event)
    return joined


class _Paragraph:
    """Text on its way out, with white space at its two ends held back or dropped."""

    def __init__(self, *, trim: bool = False) -> None:
        self.trim = trim
        """Drop white space as long as nothing else was said."""
        self.said = False
        self._space = ""

    def say(self, text: str) -> str:
        """Take more text; returns what may go out."""
        if self.trim and not self.said:
            text, self._space = text.lstrip(), ""
        text = self._space + text
        out = text.rstrip()
        # In whole portions, so that it does not matter in which pieces white space came.
        out = text[: len(out) + (len(text) - len(out)) // MAX_SPACE * MAX_SPACE]
        self._space = text[len(out) :]
        self.said = self.said or bool(out)
        return out

    def rest(self) -> str:
        """The white space that is held back, which is forgotten."""
        rest, self._space = self._space, ""
        return rest


class _ThoughtReader:
    """Takes the thoughts off the beginning of an answer."""

    def __init__(self, marks: Marks, *, inside: bool) -> None:
        self._marks = marks
        self._inside = inside
        self.inside_once = inside
        self._over = False
        self._held = ""
        self._paragraph = _Paragraph(trim=True)

    def read(self, text: str, events: list[Event], *, final: bool) -> str:
        """Append thoughts to ``events``; returns what comes after them."""
        if self._over:
            return text
        text, self._held = self._held + text, ""
        if not self._inside:
            if not self._begun(text):
                if self._over or final:
                    self._over = True
                    return text
                self._held = text
                return ""
            text = text.lstrip()[len(self._marks.open) :]
            self._inside = self.inside_once = True
        before, mark, after = text.partition(self._marks.close)
        if mark:
            self._over = True
            self._think(before, events)
            return after
        keep = 0 if final else _mark_begun(text, (self._marks.close,))
        self._held = text[len(text) - keep :]
        self._think(text[: len(text) - keep], events)
        if final:
            self._emit(self._paragraph.rest(), events)
        return ""

    def _begun(self, text: str) -> bool:
        """Whether the opening mark is complete; sets ``_over`` if it cannot come any more."""
        start = text.lstrip()
        lead = len(text) - len(start)
        if lead <= MAX_SPACE and start.startswith(self._marks.open):
            return True
        self._over = lead > MAX_SPACE or not self._marks.open.startswith(start)
        return False

    def _think(self, text: str, events: list[Event]) -> None:
        self._emit(self._paragraph.say(text), events)

    @staticmethod
    def _emit(text: str, events: list[Event]) -> None:
        if text:
            events.append(Thought(text))


class _CallReader:
    """Takes calls out of the answer."""

    def __init__(self, shapes: Sequence[Shape], tools: Collection[str], accepts: Accepts) -> None:
        self._tools = tools
        self._accepts = accepts
        self._marked = {shape.open: shape for shape in shapes if shape.open}
        self._bare = next((shape for shape in shapes if not shape.open), None)
        check_marks(list(self._marked))
        self._search = re.compile("|".join(map(re.escape, self._marked))) if self._marked else None
        self._paragraph = _Paragraph()
        self._held = ""
        """The beginning of a mark, or of a separator."""
        self._candidate: _Candidate | None = None
        self._called = False

    def trim(self) -> None:
        """Drop white space before the first text."""
        self._paragraph.trim = True

    def read(self, text: str, events: list[Event], *, final: bool) -> None:
        """Append texts and calls to ``events``."""
        while True:
            text, self._held = self._held + text, ""
            while text:
                if self._candidate is None:
                    text = self._text(text, events, final=final)
                else:
                    text = self._call(self._candidate, text, events)
            if not final or self._candidate is None:
                break
            text = self._fail(self._candidate, events)
        if final:
            rest = self._paragraph.rest()
            if not self._called:
                self._say(rest, events, whole=True)

    def _text(self, text: str, events: list[Event], *, final: bool) -> str:
        """Read text until a candidate begins; returns what is left of it."""
        if self._bare is not None and not self._paragraph.said:
            start = text.lstrip()
            self._say(text[: len(text) - len(start)], events)
            text = start
            begun = self._begin_bare(text, self._bare, final=final)
            if begun is not None:
                return begun
        found = self._search.search(text) if self._search else None
        if found is not None:
            self._say(text[: found.start()], events)
            self._candidate = self._begin(self._marked[found.group()])
            return text[found.end() :]
        keep = 0 if final else _mark_begun(text, self._marked)
        self._held = text[len(text) - keep :]
        self._say(text[: len(text) - keep], events)
        return ""

    def _begin_bare(self, text: str, shape: Shape, *, final: bool) -> str | None:
        """Begin a candidate without a mark; returns what is left, or None if this is none.

        ``_held`` is set where it cannot be told yet.
        """
        if self._paragraph.said:  # by a great deal of white space
            return None
        if self._called:
            separator = _SEPARATOR.match(text)
            if separator is not None:
                rest = text[separator.end() :]
                if not rest and not final:
                    self._held = text
                    return ""
                if rest and rest[0] in "{[":
                    text = rest
        if not text or text[0] not in "{[":
            return None if text else ""
        self._candidate = self._begin(shape)
        return text

    def _begin(self, shape: Shape) -> _Candidate:
        return _Candidate(shape, self._tools, self._accepts)

    def _call(self, candidate: _Candidate, text: str, events: list[Event]) -> str:
        """Read a candidate's text; returns what is to be read after it."""
        taken = candidate.take(text)
        if candidate.failed:
            return self._fail(candidate, events) + text[taken:]
        if candidate.found is not None:
            self._candidate = None
            self._called = True
            if not self._paragraph.said:
                self._paragraph.trim = True
                self._paragraph.rest()
            events.extend(candidate.found)
        return text[taken:]

    def _fail(self, candidate: _Candidate, events: list[Event]) -> str:
        """The candidate was none. Its beginning is text; returns what is to be read again."""
        self._candidate = None
        text = "".join(candidate.tape)
        opening = candidate.shape.open
        if opening:
            self._say(opening, events)
            return text
        self._say(text[:1], events)
        return text[1:]

    def _say(self, text: str, events: list[Event], *, whole: bool = False) -> None:
        out = text if whole else self._paragraph.say(text)
        if out:
            events.append(Text(out))


class _Candidate:
    """What may become a call."""

    def __init__(self, shape: Shape, tools: Collection[str], accepts: Accepts) -> None:
        self.shape = shape
        self._accepts = accepts
        self.tape: list[str] = []
        self.failed = False
        self.found: list[Call] | None = None
        self._steps: Steps[list[Call]] = calls(shape, self.tape, tools)
        next(self._steps)

    def take(self, text: str) -> int:
        """Read on; returns how many characters were read: all, unless it is decided."""
        for index, char in enumerate(text):
            self.tape.append(char)
            try:
                self._steps.send(char)
            except StopIteration as done:
                found: list[Call] = done.value
                if all(self._accepts(self.shape, call) for call in found):
                    self.found = found
                else:
                    self.failed = True
                return index + 1
            except NotACall:
                self.failed = True
                return index + 1
            if len(self.tape) > MAX_HELD:
                self.failed = True
                return index + 1
        return len(text)


def check_marks(marks: Sequence[str]) -> None:
    """Raise ``ValueError`` if a mark contains another.

    Which of them is meant could then depend on how the text was cut.
    """
    for mark in marks:
        for other in marks:
            if mark != other and mark in other:
                raise ValueError(f"the mark {other!r} contains the mark {mark!r}")


def _mark_begun(text: str, marks: Collection[str]) -> int:
    """Length of the longest end of ``text`` that is the beginning of a mark, but no whole one."""
    longest = max(map(len, marks), default=0) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[len(text) - length :]
        if any(mark.startswith(end) for mark in marks):
            return length
    return 0
