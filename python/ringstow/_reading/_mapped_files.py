"""Tensors as views of their files: `load` with ``mmap=True``."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from ringstow import _native
from ringstow._core._errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    ReplacedCheckpointError,
    UnsupportedError,
)
from ringstow._foreign import Foreign
from ringstow._reading._held_files import HeldFiles
from ringstow._state.tree._mapped_state import MappedState

if TYPE_CHECKING:
    from ringstow._reports._io_reports import LoadReport

Verify = Literal["background"] | bool
_Row = tuple[str, str, tuple[int, ...], int]

# Bytes that the background compares at once: what an exit of Python waits for.
_COMPARED_BYTES = 256 << 20

_log = logging.getLogger("ringstow")


def check(*, mmap: bool, verify: object, device: object, skips: bool) -> None:
    """Refuse arguments that do not go with mapped tensors.

    Raises:
        ValueError: ``verify="background"`` without ``mmap``; ``mmap`` with a GPU, or with
            ``on_corrupt="skip"``.
    """
    if verify == "background" and not mmap:
        raise ValueError(
            'verify="background" goes with mmap=True: other loads compare as they read'
        )
    if not (isinstance(verify, bool) or verify == "background"):
        raise ValueError(f'verify is True, False or "background", not {verify!r}')
    if mmap and device is not None and str(device) != "cpu":
        raise ValueError("mmap=True maps files into host memory: leave out device=, or mmap=")
    if mmap and skips:
        raise ValueError('on_corrupt="skip" leaves out what is damaged: it goes without mmap=True')


class MappedFiles:
    """A checkpoint whose tensors are mapped in place of being read.

    Tensors that are in several parts, or not aligned to their types, are read.
    """

    def __init__(self, checkpoint: _native.Checkpoint | Foreign, verify: Verify) -> None:
        if isinstance(checkpoint, Foreign):
            raise UnsupportedError(
                f"{checkpoint.path}: mmap=True maps safetensors files, and these are of another "
                f"kind ({checkpoint.kind}): leave it out, or convert the checkpoint once"
            )
        self._checkpoint = checkpoint
        self._has_checksums = checkpoint.kind == "ringstow"
        self._verify = verify
        self._mapped: list[str] = []
        self._held: HeldFiles | None = None
        if verify == "background" and self._has_checksums:
            self._held = HeldFiles(checkpoint)
        self.tensor = checkpoint.tensor

    def load(self, names: list[str]) -> tuple[list[Any], str]:
        """Return the bytes of tensors, and a LoadReport."""
        if self._held is not None:  # before the map, which checks that they are still the same
            self._held.hold(names)
        blocks, report = self._checkpoint.map(names)
        rest = [name for name, block in zip(names, blocks, strict=True) if block is None]
        self._mapped += [name for name, one in zip(names, blocks, strict=True) if one is not None]
        if not rest:
            return blocks, report
        self._tell([name for name in rest if (self.tensor(name) or ("", "", (), 0))[3]], len(names))
        read, of_rest = self._checkpoint.load(rest)
        found = dict(zip(rest, read, strict=True))
        whole = [
            found[name] if one is None else one for name, one in zip(names, blocks, strict=True)
        ]
        return whole, _summed(report, of_rest)

    def _tell(self, read: list[str], count: int) -> None:
        if read:
            _log.warning(
                "%s: %d of %d tensors are read, and not mapped: they are in several parts, or not "
                "aligned to their types (%s%s)",
                self._checkpoint.path,
                len(read),
                count,
                ", ".join(read[:3]),
                ", ..." if len(read) > 3 else "",
            )

    def verified(self, state: dict[Any, Any], report: LoadReport) -> tuple[MappedState, LoadReport]:
        """Compare checksums now or in the background; return the state, and the report."""
        mapped = MappedState(state)
        vars(mapped).update(getattr(state, "__dict__", {}))
        if not (self._verify and self._has_checksums):
            if self._verify:
                level = logging.WARNING if self._verify == "background" else logging.INFO
                _log.log(level, "%s has no checksums: nothing is compared", self._checkpoint.path)
                mapped._wait = lambda _timeout: True
            return mapped, dataclasses.replace(report, verified=False)
        # Through the page cache: what is read is what the mappings show, and their pages are there.
        self._checkpoint.read_through_page_cache()
        if self._verify == "background":
            comparison = _Comparison(self._checkpoint.path, self._compare)
            mapped._wait = comparison.wait
            return mapped, dataclasses.replace(report, verified=False)
        started = time.monotonic()
        for _ in self._compare():
            pass
        seconds = report.seconds.total + time.monotonic() - started
        mapped._wait = lambda _timeout: True
        times = dataclasses.replace(report.seconds, total=seconds)
        return mapped, dataclasses.replace(report, verified=True, seconds=times)

    def _compare(self) -> Iterator[None]:
        """Compare the checksums of the mapped tensors, some at a time.

        Raises:
            CorruptCheckpointError: bytes are damaged.
        """
        batch: list[str] = []
        nbytes = 0
        try:
            for name in self._mapped:
                row = self.tensor(name)
                batch.append(name)
                nbytes += 0 if row is None else row[3]
                if nbytes >= _COMPARED_BYTES:
                    self._compare_some(batch)
                    batch, nbytes = [], 0
                    yield
            self._compare_some(batch)
        finally:
            if self._held is not None:
                self._held.close()

    def _compare_some(self, names: list[str]) -> None:
        if not names:
            return
        try:
            found = json.loads(self._checkpoint.damaged(names))
        except (FileNotFoundError, IncompleteCheckpointError, ReplacedCheckpointError):
            if self._held is None or not self._held.have(names):
                raise
            self._held.compare(names)  # the path has another checkpoint by now, or none
            return
        damaged = [one["name"] for one in found]
        if damaged:
            try:
                self._checkpoint.load(damaged)  # says what is damaged, as any load does
            except CorruptCheckpointError as error:
                error.tensors = damaged
                raise


class _Comparison:
    """A comparison of checksums in a thread."""

    def __init__(self, path: str, compare: Callable[[], Iterator[None]]) -> None:
        self._path = path
        self._compare = compare
        self._error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, name="ringstow-compare").start()

    def _run(self) -> None:
        try:
            for _ in self._compare():
                if not threading.main_thread().is_alive():  # the program ends
                    return
        except BaseException as error:
            self._error = error
            _log.error("%s was loaded by mmap=True, and is in use: %s", self._path, error)
        finally:
            self._done.set()

    def wait(self, timeout: float | None) -> bool:
        """Wait for the end; see `MappedState.wait_verified`."""
        if not self._done.wait(timeout):
            return False
        if self._error is not None:
            raise self._error
        return True


def _summed(mapped: str, read: str) -> str:
    """Return one report of what was mapped and what was read."""
    found, more = json.loads(read), json.loads(mapped)
    for key in ("tensors", "tensor_bytes"):
        found[key] += more[key]
    found["seconds"]["total"] += more["seconds"]["total"]
    found["engine"] = f"{more['engine']} and {found['engine']}"
    return json.dumps(found)
