"""What speculation is measured on: an output that repeats its input, one in a form, and prose."""

from __future__ import annotations

from typing import Final

_CODE: Final = '''\
class Shelf:
    """Books in the order in which they were put there."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._books: list[Book] = []
        self._by_title: dict[str, Book] = {}

    def put(self, book: Book) -> bool:
        """Add a book at the end; False if there is no room for it."""
        if len(self._books) >= self.capacity:
            return False
        self._books.append(book)
        self._by_title[book.title] = book
        return True

    def take(self, title: str) -> Book | None:
        """Remove a book by its title; None if it is not here."""
        book = self._by_title.pop(title, None)
        if book is not None:
            self._books.remove(book)
        return book

    def move(self, title: str, other: "Shelf") -> bool:
        """Put one of these books on another shelf; False if it stays."""
        book = self.take(title)
        if book is None:
            return False
        if not other.put(book):
            self.put(book)
            return False
        return True

    def pages(self) -> int:
        """Pages of all books together."""
        return sum(book.pages for book in self._books)
'''
_NAMES: Final = ("Rack", "Stand", "Case", "Board", "Press", "Chest", "Crate", "Store")
_RECORDS: Final = (
    "Anna Berg, born 1962 in Graz, engineer, speaks German and Italian",
    "Bruno Castell, born 1975 in Girona, baker, speaks Catalan and Spanish",
    "Carla Dietz, born 1988 in Mainz, nurse, speaks German and English",
    "David Evans, born 1959 in Cardiff, teacher, speaks Welsh and English",
    "Elena Fabbri, born 1993 in Parma, chemist, speaks Italian and French",
    "Frans Gerritsen, born 1970 in Zwolle, joiner, speaks Dutch and German",
    "Greta Holm, born 1981 in Aarhus, pilot, speaks Danish and English",
    "Henri Imbert, born 1966 in Nantes, sailor, speaks French and Breton",
)
_THEMES: Final = ("a lighthouse", "a lost letter", "an old bridge", "a winter market",
                  "a clockmaker", "a flooded village", "a night train", "a stolen map")  # fmt: skip
RECORDS_SCHEMA: Final = {
    "type": "array",
    "minItems": 64,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "born": {"type": "integer", "minimum": 1900, "maximum": 2020},
            "place": {"type": "string", "maxLength": 40},
            "occupation": {"type": "string", "maxLength": 40},
            "languages": {
                "type": "array",
                "items": {"type": "string", "maxLength": 20},
                "maxItems": 4,
            },
        },
        "required": ["name", "born", "place", "occupation", "languages"],
        "additionalProperties": False,
    },
}
"""Of ``json`` works; longer than any of them, so that none ends early."""


def prompt(kind: str, index: int) -> str:
    """What sequence ``index`` of a work is asked."""
    if kind == "edit":
        name = _NAMES[index % len(_NAMES)]
        return (
            f"Rename the class `Shelf` to `{name}` in this code, wherever it is named. Answer with "
            f"the whole code and nothing else.\n\n```python\n{_CODE}```"
        )
    if kind == "json":
        turned = index % len(_RECORDS)
        lines = "\n".join((*_RECORDS[turned:], *_RECORDS[:turned]))
        return (
            "Give these people as a JSON array of objects with the keys name, born, place, "
            f"occupation and languages.\n\n{lines}"
        )
    return f"Tell a long story about {_THEMES[index % len(_THEMES)]}. Do not repeat yourself."
