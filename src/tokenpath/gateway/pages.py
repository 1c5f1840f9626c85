"""``/openapi.json``, and ``/docs``: the same as a page that needs nothing from elsewhere."""

from __future__ import annotations

import html
import json
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenpath.gateway.call import call_of

_STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
h2{font:600 1rem ui-monospace,monospace;border-top:1px solid #8884;padding-top:1.5rem}
h2 b{background:#0a66;border-radius:.3rem;padding:.1rem .5rem;margin-right:.5rem}
table{border-collapse:collapse;width:100%;display:block;overflow-x:auto}
td,th{text-align:left;vertical-align:top;padding:.25rem .75rem .25rem 0}
code,pre{font-family:ui-monospace,monospace;font-size:.9em}
pre{overflow-x:auto}
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width,initial-scale=1"><style>{style}</style></head>
<body><h1>{title}</h1><p>{about} The same for programs:
<a href="/openapi.json">/openapi.json</a>.</p>{operations}<h1>Schemas</h1>{schemas}</body></html>
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"


class Pages:
    """Both forms of the API's description, made once."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._json = msgspec.json.encode(document)
        self._html = render(document).encode()

    async def document(self, request: Request) -> Response:
        """The OpenAPI document."""
        call_of(request.scope).endpoint = "/openapi.json"
        return Response(self._json, media_type="application/json")

    async def page(self, request: Request) -> Response:
        """The document for people."""
        call_of(request.scope).endpoint = "/docs"
        return Response(
            self._html, media_type="text/html", headers={"content-security-policy": _POLICY}
        )


def render(document: dict[str, Any]) -> str:
    """The document as HTML: each operation with its answers, then each schema."""
    operations = [
        _operation(method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = [
        _schema(name, schema) for name, schema in sorted(document["components"]["schemas"].items())
    ]
    return _PAGE.format(
        title=f"{html.escape(document['info']['title'])} API",
        about=html.escape(document["info"]["description"]),
        style=_STYLE,
        operations="".join(operations),
        schemas="".join(schemas),
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    body = operation.get("requestBody")
    takes = ""
    if body is not None:
        takes = f"<p>Body: {_type(body['content']['application/json']['schema'])}</p>"
    rows = "".join(
        f"<tr><td><code>{status}</code></td><td>{html.escape(answer['description'])}</td>"
        f"<td>{', '.join(_content(content) for content in answer['content'].values())}</td></tr>"
        for status, answer in operation["responses"].items()
    )
    return (
        f"<h2><b>{method.upper()}</b>{html.escape(path)}</h2>"
        f"<p>{html.escape(operation['summary'])}</p>{takes}<table>{rows}</table>"
    )


def _content(content: dict[str, Any]) -> str:
    if "x-event" in content:
        return f"events of {_type(content['x-event'])}"
    return _type(content["schema"])


def _schema(name: str, schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = "".join(
        f"<tr><td><code>{html.escape(field)}</code>{' *' if field in required else ''}</td>"
        f"<td>{_type(form)}</td><td>{html.escape(form.get('description', ''))}</td></tr>"
        for field, form in schema.get("properties", {}).items()
    )
    about = html.escape(schema.get("description", "").replace("``", ""))
    return f'<h2 id="{name}">{name}</h2><p>{about}</p><table>{rows}</table>'


def _type(schema: dict[str, Any]) -> str:
    """A schema in a few words, with links to the named ones."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(alternative) for alternative in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(
            f"<code>{html.escape(json.dumps(value))}</code>" for value in schema["enum"]
        )
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    bounds = ", ".join(
        f"{word} {schema[key]}"
        for key, word in (
            ("minimum", "≥"),
            ("exclusiveMinimum", ">"),
            ("maximum", "≤"),
            ("minLength", "length ≥"),
        )
        if key in schema
    )
    return html.escape(schema.get("type", "any")) + (f" ({bounds})" if bounds else "")
