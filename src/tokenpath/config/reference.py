"""The reference page of the spec, written from the models themselves so that it cannot lag behind.

Each group of keys is a table; a key's meaning is the docstring after its field, its bounds are
those that the JSON schema states.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tokenpath.config.spec import Spec

_HEADER = """\
# The spec

<!-- Written by `python -m tokenpath.cli.reference docs/reference`. -->

One YAML file says what is served and under which limits. `tokenpath serve SPEC.yaml` runs it,
`tokenpath spec check SPEC.yaml` says what is wrong with it and in which line, `tokenpath spec
show` prints it with every default filled in, and `tokenpath spec schema` prints its JSON schema.
A key that is not on this page is an error, and so is a key given twice.

The smallest spec:

```yaml
models:
  - source: gemma-3-270m
```
"""


def spec_page() -> str:
    """``docs/reference/spec.md``."""
    schema = Spec.model_json_schema()
    sections = [_HEADER]
    for path, group in _groups(schema, schema, ""):
        title = f"`{path}`" if path else "Top level"
        sections.append(f"## {title}\n\n{_prose(group)}\n\n{_table(group, schema, path)}\n")
    return "\n".join(sections)


def _groups(
    group: Mapping[str, Any], schema: Mapping[str, Any], path: str
) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """A group and all groups within it, each with its dotted path."""
    yield path, group
    for name, field in group["properties"].items():
        inner, is_list = _inner_group(field, schema)
        if inner is not None:
            child = f"{path}.{name}" if path else name
            yield from _groups(inner, schema, f"{child}[]" if is_list else child)


def _inner_group(
    field: Mapping[str, Any], schema: Mapping[str, Any]
) -> tuple[Mapping[str, Any] | None, bool]:
    """The group that a field holds, and whether it holds a list of them."""
    options = [option for option in field.get("anyOf", [field]) if option.get("type") != "null"]
    if len(options) > 1:
        return None, False
    (field,) = options
    is_list = field.get("type") == "array"
    reference = (field["items"] if is_list else field).get("$ref")
    if reference is None:
        return None, False
    return schema["$defs"][reference.rpartition("/")[2]], is_list


def _table(group: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> str:
    required = group.get("required", [])
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in group["properties"].items():
        inner, is_list = _inner_group(field, schema)
        if inner is not None:
            child = f"{path}.{name}" if path else name
            child = f"{child}[]" if is_list else child
            kind = f"{'list of groups' if is_list else 'group'}, see [`{child}`](#{_anchor(child)})"
            default = "required" if name in required else ""
            if "anyOf" in field:
                default = "`null`"
        else:
            kind = _type(field)
            default = "required" if name in required else f"`{_value(field.get('default'))}`"
        meaning = _prose(field) or (_prose(inner) if inner else "")
        rows.append(f"| `{name}` | {kind} | {default} | {meaning} |")
    return "\n".join(rows)


def _anchor(title: str) -> str:
    """The anchor that renderers give to a heading."""
    return re.sub(r"[^\w-]", "", title.lower())


def _type(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        options = [option for option in field["anyOf"] if option.get("type") != "null"]
        return " or ".join(_type(option) for option in options)
    if "const" in field:
        return f"`{_value(field['const'])}`"
    if "enum" in field:
        return " or ".join(f"`{_value(value)}`" for value in field["enum"])
    if field["type"] == "array":
        return f"list of {_type(field['items'])}"
    if field["type"] == "object":
        return f"names, each with a {_type(field['additionalProperties'])}"
    words = {"integer": "whole number", "number": "number", "string": "text", "boolean": "boolean"}
    return words[field["type"]] + _bounds(field)


def _bounds(field: Mapping[str, Any]) -> str:
    signs = {
        "exclusiveMinimum": "> ",
        "minimum": "≥ ",
        "exclusiveMaximum": "< ",
        "maximum": "≤ ",
    }
    bounds = [f"{sign}{field[key]:g}" for key, sign in signs.items() if key in field]
    return f" {', '.join(bounds)}" if bounds else ""


def _value(value: object) -> str:
    """A value as it stands in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _prose(field: Mapping[str, Any]) -> str:
    """A docstring in one line, with Markdown's single backticks and YAML's word for None."""
    text = " ".join(str(field.get("description", "")).split())
    return text.replace("``", "`").replace("|", r"\|").replace("None:", "`null`:")
