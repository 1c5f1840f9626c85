"""Gets a model from the Hugging Face Hub.

The hub's own client says what a repository holds, under which hashes, and who we are; the bytes
come through ``download``, because that client no longer goes on with a file that an ended process
began, and such files have gigabytes.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import httpx
import huggingface_hub
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from tokenpath.models import disk
from tokenpath.models.digest import Digest
from tokenpath.models.download import download
from tokenpath.models.http import open_client
from tokenpath.models.progress import Progress
from tokenpath.models.spelling import HubSource
from tokenpath.models.staging import Staged
from tokenpath.protocol.errors import PullError

_TIMEOUT_S = 10.0
_DENIED = "accept the model's licence on the hub and set HF_TOKEN"
_WANTED = (
    "*.json", "*.jinja", "*.safetensors", "tokenizer.model", "vocab.txt", "merges.txt",
    "LICENSE*", "*_Pooling/config.json",
)  # fmt: skip
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class _HubFile:
    name: str
    bytes: int
    digest: Digest


def pull_hub(
    source: HubSource, *, workspace: Path, progress: Progress, endpoint: str | None = None
) -> Staged:
    """Get a repository's model into ``workspace``, continuing what an earlier run left.

    ``endpoint`` is the hub's address; None is what the hub's client is configured for. Raises
    ``PullError`` in one sentence if the hub cannot be reached or has no such model, and
    ``NoSpaceError`` on a full disk.
    """
    api = huggingface_hub.HfApi(endpoint=endpoint)
    with _hub_errors(source):
        info = api.model_info(
            source.repository, revision=source.revision, files_metadata=True, timeout=_TIMEOUT_S
        )
    commit = str(info.sha)
    known = {s.rfilename: _hub_file(s) for s in info.siblings or ()}
    files = [known[name] for name in choose_files(sorted(known), source)]
    folder = workspace / "hub" / commit
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(file.bytes for file in files)
    have = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    disk.require_space(folder, total - have)
    progress.start(total, source.text)
    try:
        with open_client(headers=build_hf_headers()) as client:
            for file in files:
                _fetch(source, file, commit, folder, client, progress, endpoint)
    finally:
        progress.finish()
    single = files[0].name if files[0].name.lower().endswith(".gguf") else "."
    return Staged(folder, single, f"hf:{source.repository}@{commit}")


def choose_files(names: Sequence[str], source: HubSource) -> list[str]:
    """Which of a repository's files make up the model.

    The file that the source names; else ``config.json`` with the safetensors and the tokenizer;
    else the one GGUF file. Raises ``PullError`` if that leaves none or a choice.
    """
    if source.file is not None:
        return _gguf(names, source, source.file)
    if "config.json" in names and any(_is_weights(name) for name in names):
        return [n for n in names if any(_matches(n, p) for p in _WANTED) and not _is_twin(n, names)]
    ggufs = [n for n in names if n.lower().endswith(".gguf") and not _is_later_shard(n)]
    if len(ggufs) == 1:
        return _gguf(names, source, ggufs[0])
    if ggufs:
        raise PullError(
            f"{source.text} has {len(ggufs)} GGUF files; name one, as in {source.text}:{ggufs[0]} "
            f"(others: {', '.join(ggufs[1:])})"
        )
    raise PullError(
        f"{source.text} has neither config.json with *.safetensors nor a GGUF file; weights in "
        "other formats are not read"
    )


def _gguf(names: Sequence[str], source: HubSource, file: str) -> list[str]:
    """The named GGUF file, with the other shards of a split one."""
    if file not in names:
        near = difflib.get_close_matches(file, names, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise PullError(f"hf:{source.repository} has no file {file}{hint}")
    if not file.lower().endswith(".gguf"):
        raise PullError(f"{file} is not a GGUF file; leave it out to get the whole repository")
    shard = _SHARD.fullmatch(file)
    if shard is None:
        return [file]
    shards = [
        f"{shard['stem']}-{number:05d}-of-{shard['count']}.gguf"
        for number in range(1, int(shard["count"]) + 1)
    ]
    missing = sorted(set(shards) - set(names))
    if missing:
        raise PullError(f"{file} is split, and hf:{source.repository} lacks {missing[0]}")
    return shards


def _is_later_shard(name: str) -> bool:
    shard = _SHARD.fullmatch(name)
    return shard is not None and int(shard["number"]) > 1


def _matches(name: str, pattern: str) -> bool:
    # `*` must not cross folders: subfolders hold other formats of the same weights.
    return name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern)


def _is_weights(name: str) -> bool:
    return "/" not in name and name.endswith(".safetensors")


def _is_twin(name: str, names: Sequence[str]) -> bool:
    """Mistral's repositories hold the weights twice, the second time in its own layout."""
    others = any(_is_weights(n) and not n.startswith("consolidated") for n in names)
    return others and name.startswith("consolidated")


def _hub_file(sibling: Any) -> _HubFile:
    # Large files have a sha256, small ones only git's own id.
    if sibling.lfs is not None:
        digest = Digest("sha256", sibling.lfs.sha256)
    else:
        digest = Digest("git", sibling.blob_id)
    return _HubFile(sibling.rfilename, sibling.size or 0, digest)


def _fetch(
    source: HubSource,
    file: _HubFile,
    commit: str,
    folder: Path,
    client: httpx.Client,
    progress: Progress,
    endpoint: str | None,
) -> None:
    path = PurePosixPath(file.name)
    if path.is_absolute() or ".." in path.parts:
        raise PullError(f"{source.text} holds a file with the unsafe path {file.name!r}")
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    url = huggingface_hub.hf_hub_url(
        source.repository, file.name, revision=commit, endpoint=endpoint
    )
    download(
        url,
        target,
        digest=file.digest,
        client=client,
        progress=progress,
        denied_hint=_DENIED,
    )


@contextlib.contextmanager
def _hub_errors(source: HubSource) -> Iterator[None]:
    """Map the hub client's many exceptions to one sentence each."""
    try:
        yield
    except hub_errors.GatedRepoError as error:
        raise PullError(f"{source.text} is gated; {_DENIED}") from error
    except hub_errors.RepositoryNotFoundError as error:
        raise PullError(
            f"the hub has no model {source.repository}, or it is private and HF_TOKEN is not set"
        ) from error
    except hub_errors.RevisionNotFoundError as error:
        raise PullError(f"{source.repository} has no revision {source.revision}") from error
    except hub_errors.HFValidationError as error:
        raise PullError(f"{source.text} is no name that the hub accepts: {error}") from error
    except hub_errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "an error")
        raise PullError(f"the hub answered {status} for {source.text}") from error
    except hub_errors.OfflineModeIsEnabled as error:
        raise PullError(f"{source.text} cannot be pulled while HF_HUB_OFFLINE is set") from error
    except Exception as error:
        # The client has used three HTTP libraries so far, each with its own exceptions.
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise PullError(f"{source.text} could not be fetched from the hub: {reason}") from error
