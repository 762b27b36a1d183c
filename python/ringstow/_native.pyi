# The compiled module, as the Python side sees it. The Rust side is python/src/; the two change
# together. Every method that waits does so without the GIL.

import os
from collections.abc import Sequence
from typing import final

from ringstow._memory import ItemSpec, TensorSpec

__all__ = [
    "Block",
    "Checkpoint",
    "SaveJob",
    "Session",
    "__version__",
    "cli",
    "forget_after_fork",
    "latest",
    "start_save",
    "start_write",
    "verify",
]

__version__: str

@final
class SaveJob:
    # True once every byte has left its tensor (a save that failed before never gets there).
    def staged(self) -> bool: ...
    def done(self) -> bool: ...
    # True once every byte has left its tensor OR the save has ended, also by failure; False on
    # timeout. Ctrl-C works.
    def wait_staged(self, timeout: float | None = None) -> bool: ...
    # The same for the end of the save.
    def wait(self, timeout: float | None = None) -> bool: ...
    # JSON SaveReport; raises the save's error. Only after done.
    def result(self) -> str: ...
    # Bytes staged, bytes written, bytes in all.
    def progress(self) -> tuple[int, int, int]: ...
    def cancel(self) -> None: ...
    # Of a job by start_write, after it is done: what the coordinator needs of this rank.
    def receipt(self) -> bytes: ...

# Returns at once. The caller keeps the memory alive and unchanged until staged.
def start_save(tensors: list[TensorSpec], state: str, path: str, config: str) -> SaveJob: ...

# One rank's part of a checkpoint: durable shards that are not committed. Returns at once, and asks
# of the caller what start_save asks.
def start_write(items: list[ItemSpec], path: str, rank: int, config: str) -> SaveJob: ...

# The coordinator's hold on the directory: made before any rank writes.
@final
class Session:
    def __new__(cls, path: str, world_size: int) -> Session: ...
    # The receipts of all ranks, the JSON tree, all that the checkpoint must hold. Returns JSON:
    # generation, files, file_bytes, tensors, seconds.
    def commit(self, receipts: list[bytes], state: str, names: list[str]) -> str: ...
    # Removes what the ranks wrote and lets go of the directory; so does the session's end.
    def abandon(self) -> None: ...

# One tensor's bytes, writable, kept alive by whoever holds the buffer.
@final
class Block:
    nbytes: int
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Checkpoint:
    # Reads and checks the manifest. With foreign also opens a directory of safetensors files.
    def __new__(cls, path: str, foreign: bool = False) -> Checkpoint: ...
    # "ringstow" or "safetensors"
    @property
    def kind(self) -> str: ...
    # name, dtype, shape, whether it is an object, chunks as (offsets, sizes)
    @property
    def entries(
        self,
    ) -> list[
        tuple[str, str, tuple[int, ...], bool, list[tuple[tuple[int, ...], tuple[int, ...]]]]
    ]: ...
    # The JSON tree as saved.
    @property
    def state(self) -> str: ...
    # name, dtype, shape, nbytes
    @property
    def tensors(self) -> list[tuple[str, str, tuple[int, ...], int]]: ...
    # Blocks in the order of names; JSON LoadReport.
    def load(self, names: list[str], verify: bool, config: str) -> tuple[list[Block], str]: ...
    # (name, address, nbytes) of dense writable memory; JSON LoadReport.
    def load_into(self, targets: list[tuple[str, int, int]], verify: bool, config: str) -> str: ...
    # (name, chunk's number, offsets of the box in the chunk, its lengths, address, strides in
    # bytes); no two may overlap. JSON LoadReport.
    def read(
        self,
        slices: list[tuple[str, int, tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]],
        verify: bool,
        config: str,
    ) -> str: ...

# JSON VerifyReport.
def verify(path: str, config: str) -> str: ...

# The newest committed checkpoint under a directory.
def latest(directory: str) -> os.PathLike[str] | None: ...
def cli(argv: Sequence[str]) -> int: ...

# Called in a forked child: drop the handle to threads that do not exist there.
def forget_after_fork() -> None: ...
