"""Where packed weights are kept between starts, whose they are, and when they go.

::

    <cache_dir>/packed/int8-0f3a….packed      weights of one checkpoint, packed in one way
    <cache_dir>/packed/….packed.part          being written
    <cache_dir>/packed/.lock                  held by the process that packs

Everything here may be deleted at any time. What cannot be read or written is said in the log, and
the engine runs without.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenpath.config import paths
from tokenpath.engine.kernels.packed import PackedWeights
from tokenpath.engine.kernels.packed_file import (
    DamagedFileError,
    Index,
    PackedFile,
    read_index,
    read_packed,
)
from tokenpath.models.disk import NoSpaceError, require_space
from tokenpath.models.local import LocalModel
from tokenpath.protocol.errors import SpecError

MOST_FILES = 8
"""Beyond so many, those used longest ago are removed."""
_SUFFIX = ".packed"
_PART = ".part"
_SAMPLE_BYTES = 4096
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackedCache:
    """The folder of packed weights."""

    folder: Path

    @classmethod
    def usual(cls) -> PackedCache | None:
        """The one in this user's cache folder; None, with a warning, if there can be none."""
        try:
            return cls(paths.cache_dir() / "packed")
        except SpecError as error:
            log.warning("packed weights are not kept for the next start: %s", error.message)
            return None

    def read(
        self,
        form: str,
        identity: str,
        *,
        native: Any,
        threads: int,
        progress: Callable[[float], None],
    ) -> PackedWeights | None:
        """Weights of this identity; None if there are none, or none to trust."""
        path = self._path(form, identity)
        try:
            weights = read_packed(
                path, identity=identity, native=native, threads=threads, progress=progress
            )
            os.utime(path)  # remembers when it was used
        except FileNotFoundError:
            return None
        except DamagedFileError as error:
            log.warning("%s is damaged (%s); the weights are packed anew", path, error)
            return None
        except OSError as error:
            log.warning("%s cannot be read (%s); the weights are packed anew", path, error)
            return None
        return weights

    @contextlib.contextmanager
    def file_for(
        self, form: str, identity: str, size: int, *, layout: int, source: Path
    ) -> Iterator[PackedFile | None]:
        """A file of ``size`` bytes to pack into; None, with a warning, if the disk has no room.

        Removes before it what no start will ask for. Call it with ``packing`` held.
        """
        path = self._path(form, identity)
        file: PackedFile | None = None
        try:
            self._sweep(layout, form, source)
            require_space(self.folder, size)
            file = PackedFile(path.with_name(path.name + _PART), size)
        except (OSError, NoSpaceError) as error:
            log.warning(
                "packed weights are not kept, and the next start will pack them again: %s", error
            )
        with file or contextlib.nullcontext():
            yield file

    def publish(
        self,
        file: PackedFile,
        form: str,
        identity: str,
        weights: PackedWeights,
        *,
        source: Path,
        native: Any,
        threads: int,
    ) -> None:
        """Let later starts find what was packed into ``file``. Logs what goes wrong."""
        try:
            file.publish(
                self._path(form, identity),
                weights,
                identity=identity,
                source=str(source.absolute()),
                native=native,
                threads=threads,
            )
        except OSError as error:
            log.warning(
                "packed weights are not kept, and the next start will pack them again: %s", error
            )

    @contextlib.contextmanager
    def packing(self, on_wait: Callable[[], None]) -> Iterator[None]:
        """Be the only process that packs into this folder; waits for another.

        Packing takes all processors anyway, and the second of two that start the same model finds
        it packed. ``on_wait`` is called once before waiting. Where there can be no lock, there is
        none: two writers then disturb each other's temporary file, and neither keeps anything.
        """
        descriptor = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(
                self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            log.warning("%s cannot be locked: %s", self.folder, error)
        try:
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def of(self, source: Path) -> list[Path]:
        """The files that were packed from a model file or from anything in a folder."""
        roots = {source.absolute(), source.resolve()}
        return [
            path
            for path, index in self._known()
            if any(Path(index.source).is_relative_to(root) for root in roots)
        ]

    def remove(self, source: Path) -> int:
        """Delete what ``of`` finds; returns the bytes freed. Whoever has it mapped keeps it."""
        freed = 0
        for path in self.of(source):
            freed += path.stat().st_size
            path.unlink()
        return freed

    def _path(self, form: str, identity: str) -> Path:
        return self.folder / f"{form}-{identity[:32]}{_SUFFIX}"

    def _known(self) -> Iterator[tuple[Path, Index]]:
        for path in sorted(self.folder.glob(f"*{_SUFFIX}")):
            with contextlib.suppress(DamagedFileError, OSError):
                yield path, read_index(path)

    def _sweep(self, layout: int, form: str, source: Path) -> None:
        """Remove what was left half-written, cannot be read, or belongs to no model any more.

        That includes what was packed in ``form`` from another content of ``source``.
        """
        for left in self.folder.glob(f"*{_SUFFIX}{_PART}"):
            left.unlink(missing_ok=True)
        kept = []
        for path in self.folder.glob(f"*{_SUFFIX}"):
            try:
                its_source = Path(read_index(path, layout=layout).source)
                replaced = its_source == source.absolute() and path.name.startswith(f"{form}-")
                stale = replaced or not its_source.exists()
            except DamagedFileError:
                stale = True
            if stale:
                path.unlink(missing_ok=True)
            else:
                kept.append(path)
        kept.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for path in kept[MOST_FILES - 1 :]:
            path.unlink(missing_ok=True)


def identity_of(model: LocalModel, form: str, layout: int, *, by_time: bool = True) -> str:
    """Names the weights of a checkpoint in one packed form, wherever it lies.

    Files are known by size, time of change, and samples of every tensor: a time alone may be that
    of an archive, the same for all that was ever in it, and a fine-tuned model has the size of the
    one that it came from. Reading all of it would take as long as the load. ``by_time`` is left out
    where copies of the files on other machines are to have the same name. Raises ``OSError``.
    """
    known = hashlib.sha256(repr((form, layout, model.config)).encode())
    tensors = sorted(model.tensors.items())
    for file in sorted({part.file for _, tensor in tensors for part in tensor.parts}):
        stat = file.stat()
        known.update(repr((stat.st_size, stat.st_mtime_ns if by_time else 0)).encode())
    with contextlib.ExitStack() as files:
        opened = {}
        for name, tensor in tensors:
            known.update(repr((name, tensor.dtype, tensor.shape)).encode())
            if tensor.quantized is not None:
                known.update(repr(tensor.quantized.recipe).encode())
            for part in tensor.parts:
                if part.file not in opened:
                    opened[part.file] = files.enter_context(part.file.open("rb"))
                descriptor = opened[part.file].fileno()
                for place in (0, part.stored_bytes // 2):
                    count = min(_SAMPLE_BYTES, part.stored_bytes - place)
                    known.update(os.pread(descriptor, count, part.offset + place))
    return known.hexdigest()
