# The compiled module, as the Python side sees it. The Rust side is python/src/; the two change
# together. Every method that waits does so without the GIL.

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, final

from ringstow.tensors._memory import Address, ItemSpec, LazyMemory, Memory, Placed

__all__ = [
    "DEPTH_MAX",
    "Block",
    "Checkpoint",
    "Exchange",
    "Pin",
    "SaveJob",
    "Session",
    "Tensors",
    "Watch",
    "__version__",
    "check_config",
    "check_own_share",
    "cli",
    "copy_now",
    "deliver_log",
    "diff",
    "encode",
    "end_jobs",
    "fail_exit",
    "forget_after_fork",
    "found_config",
    "gpus",
    "is_shared",
    "latest",
    "parse_size",
    "prune",
    "remove",
    "retain",
    "start_export",
    "start_save",
    "start_write",
    "steps",
    "swap_names",
    "verify",
    "watch",
]

__version__: str

# How many containers may be in one another.
DEPTH_MAX: int

# name, dtype, shape, whether it is an object (bytes, not a tensor), chunks as (offsets, sizes), and
# likewise boxes that fill what they leave out, which only one rank's part of a whole does
_Entry: TypeAlias = tuple[
    str,
    str,
    tuple[int, ...],
    bool,
    list[tuple[tuple[int, ...], tuple[int, ...]]],
    list[tuple[list[int], list[int]]],
]

# name, number of the chunk in its entry, offsets of the box in the chunk, its lengths, address of
# its first element's place, strides there in bytes
_SliceSpec: TypeAlias = tuple[str, int, tuple[int, ...], tuple[int, ...], Address, tuple[int, ...]]

# torch's tensors by DLPack's C exchange API.
@final
class Exchange:
    # That of the first class, for tensors of exactly these classes and dtypes (with safetensors'
    # names); None if torch has none.
    @staticmethod
    def of(kinds: list[type], dtypes: list[tuple[Any, str]]) -> Exchange | None: ...
    # dtype, shape and address of one that is dense and of a usual dtype; None for any other. Where
    # one on a GPU lies, `address_of` is asked.
    def find(
        self, tensor: Any, address_of: Callable[[Any], Address]
    ) -> tuple[str, tuple[int, ...], Address] | None: ...

# The fields of a Memory or LazyMemory.
_Stored: TypeAlias = tuple[
    str, tuple[int, ...], tuple[int, ...] | None, Address | Callable[[], Placed], int, object
]

# The tensors of a state that is to be saved, each once, under a name of its own; and what keeps
# their memory, for as long as this is held. Iterating gives what start_save has not taken yet.
@final
class Tensors:
    # `taken` are names that no tensor gets.
    def __new__(cls, taken: set[str] = ...) -> Tensors: ...
    # Returns the name under which the tensor is stored: of the one of the same elements in the same
    # memory that was met before; or this one, with "#2" and so on at its end where it is taken.
    def add(self, name: str, memory: Memory | LazyMemory) -> str: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> tuple[str, _Stored]: ...

# What `encode` asks; paths are keys and indices from the root on.
class _Others(Protocol):
    # For the usual tensors, and where one on a GPU lies. Without it, `value` is asked of each.
    exchange: Exchange | None
    address_of: Callable[[Any], Address]
    # A path as Python writes it.
    def describe(self, path: tuple[object, ...], /) -> str: ...
    # The JSON of a value that JSON has not, whose tensor is added; or a container's parts: text as
    # it is, and between it a list, a dict, or a tuple of (name, item), whose items are encoded.
    def value(self, value: object, path: tuple[object, ...], /) -> str | tuple[object, ...]: ...
    # Notes what is wrong with a value that can't be saved.
    def refuse(self, problem: str, /) -> None: ...
    # Notes what can't be a key of the dict there.
    def check_key(self, key: object, path: tuple[object, ...], /) -> None: ...

# The JSON tree of a state dict. Its tensors are added to those given.
def encode(state: object, tensors: Tensors, others: _Others) -> str: ...

# Notes the version of every tensor that has one. A save of these tensors fails with TornSaveError
# if one has changed once the last byte has been copied.
def watch(tensors: Tensors) -> None: ...

# After watch, before start_save: copies tensors of at most `largest` bytes, and those without a
# version; they may be changed from then on. False if it copied only some of them, or none, because
# together they need more than `room` bytes. `copy_gpu` copies tensors on GPUs, and may decline.
# `path` is for the TornSaveError that is raised if another thread changes one meanwhile.
def copy_now(
    tensors: Tensors,
    path: str,
    largest: int,
    room: int,
    copy_gpu: Callable[[list[Any]], Sequence[tuple[Address, object]] | None],
) -> bool: ...

# Tensors whose versions are noted, by name; any without a version is left out.
@final
class Watch:
    def __new__(cls, tensors: list[tuple[str, Any]]) -> Watch: ...
    # The names of those that have changed.
    def changed(self) -> list[str]: ...

@final
class SaveJob:
    # True once every byte has left its tensor (a save that failed before never gets there).
    def staged(self) -> bool: ...
    def done(self) -> bool: ...
    # True once every byte has left its tensor OR the save has ended, also by failure; False on
    # timeout. Ctrl-C works. Delivers log records meanwhile, if `logs`.
    def wait_staged(self, timeout: float | None = None, *, logs: bool = True) -> bool: ...
    # The same for the end of the save.
    def wait(self, timeout: float | None = None, *, logs: bool = True) -> bool: ...
    # JSON SaveReport; raises the save's error. Only after done.
    def result(self) -> str: ...
    # What the coordinator needs of a rank's part. Only of start_write, and only after result.
    def receipt(self) -> bytes: ...
    # Bytes staged, bytes written, bytes in all.
    def progress(self) -> tuple[int, int, int]: ...
    def cancel(self) -> None: ...

# An Address of a GPU names a stream: an event is recorded on it during the call, by the calling
# thread, and the copies wait for that. A stream that is being captured is refused.

# Returns at once. The caller keeps the memory alive and unchanged until staged. A callable in place
# of an address is called from a thread of the save's, once, when the first byte is needed; what it
# returns is let go with the last. What it raises is what `result` raises.
def start_save(
    tensors: Tensors, state: str, path: str, config: str, step: int | None = None
) -> SaveJob: ...

# The weights of a model as Hugging Face's programs read them: plain safetensors files, and an index
# where there are several. The same promises.
def start_export(tensors: Tensors, path: str, config: str) -> SaveJob: ...

# One rank's part of a checkpoint: durable, not committed. The same promises.
# Fails with TornSaveError if one of those watched has changed once all have been copied.
def start_write(
    items: list[ItemSpec], path: str, rank: int, config: str, watched: Watch | None = None
) -> SaveJob: ...

# The coordinator's hold on a directory, begun before any rank writes. Dropped without a commit, it
# removes what the ranks wrote.
@final
class Session:
    # What it is a part of, if each rank saves by itself: rank, number of ranks, which save.
    # And the step of training that it is saved as.
    def __new__(
        cls,
        path: str,
        world_size: int,
        config: str,
        part_of: tuple[int, int, str] | None = None,
        step: int | None = None,
    ) -> Session: ...
    # One receipt a rank; the JSON tree; the tensors and objects that must be there. JSON Committed.
    def commit(self, receipts: list[bytes], state: str, names: list[str]) -> str: ...
    def abandon(self) -> None: ...

# One tensor's bytes, writable, kept alive by whoever holds the buffer.
@final
class Block:
    nbytes: int
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Checkpoint:
    # Reads and checks the manifest. With `foreign`, opens where there is none also a directory of
    # safetensors files: of torch's HuggingFaceStorageWriter, or plain Hugging Face. With `damaged`,
    # opens one whose files are missing or cut. With `verify`, loads verify every checksum chunk
    # that they read.
    def __new__(
        cls,
        path: str,
        config: str,
        *,
        foreign: bool = False,
        damaged: bool = False,
        verify: bool = True,
    ) -> Checkpoint: ...
    # "ringstow", or "safetensors": without checksums, so that no load is verified.
    @property
    def kind(self) -> str: ...
    # The same text for whoever opens this very checkpoint, and another for one that replaced it.
    # None for one of others' files.
    @property
    def stamp(self) -> str | None: ...
    # The JSON tree as saved.
    @property
    def state(self) -> str: ...
    # The same of what is needed for a prefix or for names, or of more. Raises ValueError.
    def part_of_state(self, prefix: str | None, names: list[str] | None) -> str: ...
    # name, dtype, shape, nbytes
    @property
    def tensors(self) -> list[tuple[str, str, tuple[int, ...], int]]: ...
    # Of these names alone, those that are there.
    def tensors_named(self, names: list[str]) -> list[tuple[str, str, tuple[int, ...], int]]: ...
    @property
    def entries(self) -> list[_Entry]: ...
    # JSON CheckpointInfo: what the manifest says of the save.
    @property
    def info(self) -> str: ...
    # Offsets and sizes of a tensor's chunks. Raises KeyError.
    def chunks(self, name: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]: ...
    # Raises MissingShareError if this is one rank's part, and has only some of one.
    def check_whole(self, names: list[str]) -> None: ...
    # JSON list of DamagedTensor: reads and checks the tensors of these names.
    def damaged(self, names: list[str]) -> str: ...
    # This and the two below raise ReplacedCheckpointError if another save came since it was opened.
    # Boxes of chunks to strided memory; JSON LoadReport. No two may share memory.
    def read(self, slices: list[_SliceSpec]) -> str: ...
    # Blocks in the order of names; JSON LoadReport.
    def load(self, names: list[str]) -> tuple[list[Block], str]: ...
    # (name, address, nbytes) of dense writable memory; JSON LoadReport.
    def load_into(self, targets: list[tuple[str, Address, int]]) -> str: ...

# Host memory registered with CUDA, for every GPU, until this is let go; the memory must be there
# until then. At once up to 64 MiB, else in pieces of that: CUDA refuses a copy that touches two.
@final
class Pin:
    # Raises UnsupportedError or GpuError, with the reason, where it is refused.
    def __new__(cls, address: int, nbytes: int) -> Pin: ...

# JSON: the GPUs, and what they can do.
def gpus() -> str: ...

# JSON Config: what the environment and ringstow.toml ask for.
def found_config() -> str: ...

# Checks a JSON Config.
def check_config(json: str) -> None: ...

# Bytes of a size in words; ValueError says what a size is.
def parse_size(text: str) -> int: ...

# JSON VerifyReport.
def verify(path: str, config: str) -> str: ...

# JSON DiffReport; with `values`, elements are counted.
def diff(a: str, b: str, values: bool, config: str) -> str: ...

# The newest step in a directory that can be loaded; with `verify`, after every byte was checked.
# With `before`, a step or a path, an older one than that.
def latest(
    directory: str, verify: bool, before: int | str | None, pattern: str | None, config: str
) -> os.PathLike[str] | None: ...

# JSON list of Found: the steps in a directory, oldest first.
def steps(directory: str, pattern: str | None, config: str) -> str: ...

# Refuses to load a rank's own share of what ranks saved each by itself, in rank00003 below path,
# if it is missing or not of the same save as rank 0's; for rank 0 also if any share is missing.
# Raises MissingShareError.
def check_own_share(path: str, rank: int) -> None: ...

# Removes a checkpoint; with `recycle`, its files stay to be written over.
def remove(path: str, recycle: bool, config: str) -> None: ...

# JSON Retained: all steps in a directory but the newest `keep` are removed, or would be.
def retain(
    directory: str, keep: int, recycle: bool, pattern: str | None, dry_run: bool, config: str
) -> str: ...

# JSON Swept: what killed saves and removals left in a directory, and in those directly in it, goes.
# With `recycled`, so do the files that wait to be written over.
def prune(directory: str, recycled: bool, no_other_writers: bool, config: str) -> str: ...
def swap_names(one: str, other: str) -> None: ...

# Whether other hosts may use the file system of an existing path.
def is_shared(path: str) -> bool: ...
def cli(argv: Sequence[str]) -> int: ...

# Passes the log records of native threads to `logging`, which they never call themselves: a signal
# handler that saves may have interrupted a thread that holds a logging handler's lock.
def deliver_log() -> None: ...

# Waits for the saves in progress and cancels the loads, at the interpreter's exit. Other threads
# can start neither from then on.
def end_jobs() -> None: ...

# Has the process exit with 1 where it would exit with 0.
def fail_exit() -> None: ...

# Called in a forked child: drop the handle to threads that do not exist there.
def forget_after_fork() -> None: ...
