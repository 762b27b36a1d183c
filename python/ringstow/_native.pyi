# The compiled module, which python/src/ implements: change both together. Functions release the GIL
# while they wait, and Ctrl-C interrupts them. Reports and configurations are JSON text.

import datetime
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self, TypeAlias, final

from ringstow._state.tensors._memory import Address, ItemSpec, LazyMemory, Memory, Placed

__all__ = [
    "COPY_PAUSES_S",
    "DEPTH_MAX",
    "FOREIGN_KINDS",
    "POLL_S",
    "SEEN_S",
    "TORCH_ENDINGS",
    "Arrivals",
    "Block",
    "Checkpoint",
    "Clearing",
    "CopyLine",
    "CopyMemory",
    "Copying",
    "Exchange",
    "FileReader",
    "FileWriter",
    "Leaf",
    "Loading",
    "Matches",
    "ModelSession",
    "NodeSession",
    "Previous",
    "Receipts",
    "RunLock",
    "RunSteps",
    "SaveJob",
    "Session",
    "Slot",
    "Tensors",
    "Wanted",
    "Watch",
    "__version__",
    "add_to_history",
    "adopt",
    "after_failure",
    "best_of",
    "boot_id",
    "check_apart",
    "check_config",
    "check_covers",
    "check_metrics",
    "check_own_name",
    "check_own_share",
    "check_url",
    "claim",
    "claim_for",
    "cli",
    "copies_of",
    "copy_now",
    "cores",
    "deepspeed_directory",
    "deliver_log",
    "diff",
    "differing",
    "duration",
    "encode",
    "end_jobs",
    "fail_exit",
    "files_of",
    "files_of_index",
    "fill",
    "follow",
    "foreign_kind",
    "forget_after_fork",
    "found_config",
    "give_up",
    "given_up",
    "go_back",
    "gpus",
    "has_gone",
    "has_weights_by_torch",
    "in_turns",
    "is_one_run",
    "join_run",
    "kept",
    "kind_and_weights",
    "lacking",
    "latest",
    "look_at_once",
    "model_layout",
    "moved",
    "name_run",
    "needed",
    "nesting",
    "newest_of",
    "node_id",
    "nodes_of",
    "numbered_sets",
    "outline",
    "parse_pool_size",
    "parse_size",
    "parse_span",
    "parse_tree",
    "pin",
    "pinned",
    "promote",
    "prune",
    "release_memory",
    "remove",
    "rename_new",
    "retain",
    "run_of",
    "shared_file_system",
    "shows_progress",
    "size",
    "slim",
    "staging_bytes",
    "start_export",
    "start_model_share",
    "start_save",
    "start_write",
    "start_write_dealt",
    "steps",
    "superseded_weights",
    "survey",
    "swap_names",
    "sync_dir",
    "tiles",
    "unfinished",
    "unpin",
    "usual_path",
    "verify",
    "was_removed",
    "watch",
    "weights_in",
]

__version__: str

# Most containers that may be nested in one another.
DEPTH_MAX: int
# How long to wait for what another host has done, and the pause before each further look.
SEEN_S: float
POLL_S: float

# The pause before a manager tries a copy again that failed, and the longest one.
COPY_PAUSES_S: tuple[float, float]

# The kinds of other programs' checkpoints, and how each is recognized.
FOREIGN_KINDS: dict[str, str]
# How the names of files by torch.save end.
TORCH_ENDINGS: tuple[str, ...]

_Shape: TypeAlias = tuple[int, ...]
# Offsets and sizes in elements.
_Region: TypeAlias = tuple[_Shape, _Shape]
# Name, dtype, shape, bytes.
_Row: TypeAlias = tuple[str, str, _Shape, int]
_Displaced: TypeAlias = tuple[Any, Leaf, tuple[Any, ...]]
# Name, dtype, shape, whether it is an object (bytes, not a tensor), chunks, and the regions that
# they leave out. Only one rank's share of a tensor leaves out any.
_Entry: TypeAlias = tuple[str, str, _Shape, bool, list[_Region], list[tuple[list[int], list[int]]]]
# Name, number of the chunk, offsets of the region in the chunk, its sizes, address of its first
# element, strides in bytes.
_SliceSpec: TypeAlias = tuple[str, int, _Shape, _Shape, Address, _Shape]
# The fields of a Memory or LazyMemory.
_Stored: TypeAlias = tuple[str, _Shape, _Shape | None, Address | Callable[[], Placed], int, object]

# Looks at torch's tensors through DLPack's C exchange API.
@final
class Exchange:
    # Takes exactly these classes, whose first has the API, and these dtypes with their names in
    # safetensors. Returns None if torch lacks the API.
    @staticmethod
    def of(kinds: list[type], dtypes: list[tuple[Any, str]]) -> Exchange | None: ...
    # Returns the dtype, shape and address of a dense tensor, and None for any other. Calls
    # `address_of` for a tensor on a GPU.
    def find(
        self, tensor: Any, address_of: Callable[[Any], Address]
    ) -> tuple[str, _Shape, Address] | None: ...

# The tensors of a state to save, each once under its own name, and what keeps their memory.
# Iterating yields those that start_save has not taken yet.
@final
class Tensors:
    # No tensor gets a name that is in `taken`.
    def __new__(cls, taken: set[str] = ...) -> Tensors: ...
    # Returns the name under which the tensor is stored: that of an earlier one with the same
    # elements in the same memory; otherwise this name, with "#2" and so on if it is taken.
    def add(self, name: str, memory: Memory | LazyMemory) -> str: ...
    # Returns a name that no other tensor gets: this one, with "#2" and so on if it is taken.
    def reserve(self, name: str) -> str: ...
    # Notes what this rank has of a tensor, under a name that was reserved: its memory, the tensor's
    # shape and the offsets in it; and which of how many equal replicas this is.
    def add_region(
        self, name: str, memory: Memory, region: tuple[_Shape, _Shape], replica: tuple[int, int]
    ) -> None: ...
    # The name, dtype and shape of all others. With a checksum of those in host memory that have at
    # most `largest` bytes.
    def replicated(self, largest: int) -> list[tuple[str, str, _Shape, int | None]]: ...
    # The name, offsets, shape and checksum of each region of these tensors. For memory on a GPU,
    # what keeps it is in place of the checksum.
    def checksums(self, names: set[str]) -> list[tuple[str, list[int], list[int], Any]]: ...
    # Keeps what this rank writes of them. Those that `replicated` returns are shared out among
    # `ranks` (this rank's number, and how many there are); `holders` has other ranks by name, and
    # None for what others write.
    def deal(self, ranks: tuple[int, int], holders: dict[str, tuple[int, int] | None]) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> tuple[str, _Stored]: ...

# What `encode` calls. A path has the keys and indices from the root on.
class _Others(Protocol):
    # For usual tensors. Without it, `encode` calls `value` for every tensor.
    exchange: Exchange | None
    address_of: Callable[[Any], Address]
    # Returns a path as Python code.
    def describe(self, path: tuple[object, ...], /) -> str: ...
    # Adds the tensor of a value that `encode` does not know, and returns the value's JSON; or
    # returns a container's parts: text, and lists, dicts or tuples of (name, item) yet to encode.
    def value(self, value: object, path: tuple[object, ...], /) -> str | tuple[object, ...]: ...
    # Notes why a value can't be saved.
    def refuse(self, problem: str, /) -> None: ...
    # Notes a key that the dict at the path can't have.
    def check_key(self, key: object, path: tuple[object, ...], /) -> None: ...

# Adds a state dict's tensors to the given ones, and returns its JSON tree.
def encode(state: object, tensors: Tensors, others: _Others) -> str: ...

# Notes the version of every tensor that has one. A save of these tensors fails with TornSaveError
# if a version has changed once the last byte has been copied.
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

# The versions of tensors by name. Leaves out tensors without a version.
@final
class Watch:
    def __new__(cls, tensors: list[tuple[str, Any]]) -> Watch: ...
    # Returns the names of those that have changed.
    def changed(self) -> list[str]: ...

@final
class SaveJob:
    # True once every byte has left its tensor; never after an earlier failure.
    def staged(self) -> bool: ...
    def done(self) -> bool: ...
    # Waits until every byte has left its tensor or the save has ended. Returns False if the time
    # ran out. Delivers log records meanwhile, if `logs`.
    def wait_staged(self, timeout: float | None = None, *, logs: bool = True) -> bool: ...
    # Waits for the end of the save in the same way.
    def wait(self, timeout: float | None = None, *, logs: bool = True) -> bool: ...
    # After the end: returns the SaveReport, or raises the save's error.
    def result(self) -> str: ...
    # After result, for start_write only: what the coordinator needs of this rank.
    def receipt(self) -> bytes: ...
    # Bytes staged, bytes written, bytes in total.
    def progress(self) -> tuple[int, int, int]: ...
    def cancel(self) -> None: ...

# The base of a save: its path (None: only hash), whether the save goes on without it if it can't be
# opened, and whether its files are linked.
_BaseSpec = tuple[str | None, bool, bool]

# The three start functions return at once. The caller keeps the memory alive and unchanged until it
# is staged. For an address on a GPU, the call records an event on its stream, for which the copies
# wait; a stream that is being captured is refused. A thread of the save loads a LazyMemory once,
# when its first byte is needed, and drops it after its last. `result` raises what loading raises.
def start_save(
    tensors: Tensors,
    state: str,
    path: str,
    config: str,
    noted: tuple[int | None, dict[str, float]] = ...,
    *,
    apart: list[str] = ...,
    base: _BaseSpec | None = None,
    only_new: bool = False,
) -> SaveJob: ...

# Writes a model's weights as Hugging Face's programs read them: plain safetensors files, with an
# index if there are several.
def start_export(tensors: Tensors, path: str, config: str) -> SaveJob: ...

# Writes one rank's share of a checkpoint: durable, not committed. Fails with TornSaveError if a
# watched tensor has changed once all have been copied.
def start_write(
    items: list[ItemSpec],
    path: str,
    rank: int,
    config: str,
    watched: Watch | None = None,
    apart: list[str] = ...,
    base: _BaseSpec | None = None,
) -> SaveJob: ...

# Writes what `Tensors.deal` has left of a state, as start_write does.
def start_write_dealt(
    tensors: Tensors,
    path: str,
    rank: int,
    config: str,
    *,
    apart: list[str] = ...,
    base: _BaseSpec | None = None,
) -> SaveJob: ...

# Where a model's tensors (name, dtype, shape) are in its files: each file's name, bytes of its
# header and length; each tensor's file and the offset of its first byte there. With `numbers`, each
# tensor has the number of its file, from 1.
def model_layout(
    tensors: Sequence[tuple[str, str, _Shape]], config: str, numbers: list[int] | None = None
) -> tuple[list[tuple[str, int, int]], list[tuple[int, int]]]: ...

# The coordinator's hold on a directory for an export by several ranks: it has created the files of
# the layout, at their final length and with their headers. Dropping it removes them.
@final
class ModelSession:
    def __new__(
        cls,
        path: str,
        tensors: Sequence[tuple[str, str, _Shape]],
        config: str,
        numbers: list[int] | None = None,
    ) -> ModelSession: ...
    # The files to be written, in the order of the layout.
    @property
    def paths(self) -> list[os.PathLike[str]]: ...
    # Once every rank's share is durable: gives the files their names.
    def publish(self) -> None: ...
    def abandon(self) -> None: ...

# Writes one rank's share of such files: durable, not published. A file is its path, its final name
# and its final length. A place is a file's number, the offset in it, an item's number, the offset
# in its bytes, the number of bytes, and a round: places of earlier rounds are written first. Places
# are sorted by file and offset, and fill the pages that they are in.
def start_model_share(
    items: Sequence[Memory | LazyMemory],
    path: str,
    files: Sequence[tuple[str, str, int]],
    places: Sequence[tuple[int, int, int, int, int, int]],
    config: str,
) -> SaveJob: ...

# Whether boxes (offsets and sizes) hold each element of an array exactly once.
def tiles(shape: _Shape, boxes: Sequence[tuple[_Shape, _Shape]]) -> bool: ...

# The receipts of all ranks, merged; one commit takes them.
@final
class Receipts:
    def __new__(cls, receipts: list[bytes]) -> Receipts: ...

# The coordinator's claim on a directory, made before any rank writes. Dropping it without a commit
# removes what the ranks wrote.
@final
class Session:
    # `part_of` is the share that the checkpoint is if each rank saves by itself: the rank, the
    # number of ranks, and the save's id.
    def __new__(
        cls,
        path: str,
        world_size: int,
        config: str,
        part_of: tuple[int, int, str] | None = None,
        step: int | None = None,
        metrics: dict[str, float] = ...,
    ) -> Session: ...
    # Waits until this host sees what the ranks wrote. Takes one receipt per rank, the JSON tree,
    # and the names that must be there. Returns a Committed.
    def commit(self, receipts: Receipts, state: str, names: list[str]) -> str: ...
    def abandon(self) -> None: ...

# Tells the other ranks of the save in progress at a path to stop writing; why one has told so.
def give_up(path: str, rank: int, why: str) -> None: ...
def given_up(path: str) -> str | None: ...

# A node: its id, its host, the ranks that wrote there.
_Node = tuple[str, str, list[int]]

# The id of a directory of checkpoints, which it gets if it has none, and the host that gave it.
def node_id(run: str) -> tuple[str, str]: ...

# Commits another node's checkpoint in a directory, with those of its files that are there.
def adopt(path: str, manifest: bytes) -> None: ...

# Name, path, bytes, and whether it is here, of each file of a checkpoint.
def files_of(checkpoint: Checkpoint) -> list[tuple[str, str, int, bool]]: ...

# The nodes that wrote a checkpoint; none if all ranks shared a directory.
def nodes_of(checkpoint: Checkpoint) -> list[_Node]: ...

# The ranges of files in which tensors and boxes (name, offsets, sizes) are, in whole checksum
# chunks: number of the file, first byte, end.
def needed(
    checkpoint: Checkpoint,
    names: list[str],
    boxes: list[tuple[str, tuple[int, ...], tuple[int, ...]]],
) -> list[tuple[int, int, int]]: ...

# The numbers of items such that the directories they are in, which have numbers, take turns, as in
# a load.
def in_turns(directories: list[int]) -> list[int]: ...

# What differs in bytes of a file that begin with a checksum chunk; None if nothing does.
def differing(checkpoint: Checkpoint, file: int, offset: int, data: Any) -> str | None: ...

# The part that the first rank of a node has in a save by nodes that share no directory. Dropping it
# before the commit removes what its ranks wrote.
@final
class NodeSession:
    # `id` is the session's, of 16 hex digits, on all nodes.
    def __new__(
        cls,
        path: str,
        world_size: int,
        id: str,
        config: str,
        step: int | None,
        metrics: dict[str, float],
    ) -> NodeSession: ...
    # The manifest, from all ranks' receipts.
    def manifest(
        self, receipts: Receipts, state: str, names: list[str], nodes: list[_Node]
    ) -> bytes: ...
    # Writes the manifest under its uncommitted name; takes the receipts of this node's ranks.
    def prepare(self, receipts: Receipts, manifest: bytes) -> None: ...
    # Keeps what was prepared, even if it is abandoned: another node may commit it.
    def keep(self) -> None: ...
    def commit(self) -> None: ...
    # Removes what was replaced, once all nodes have committed.
    def end(self) -> None: ...
    def abandon(self) -> None: ...

# One tensor's bytes. They are writable, and stay while any buffer of them is held.
@final
class Block:
    nbytes: int
    def __buffer__(self, flags: int, /) -> memoryview: ...

# A value that is not made yet. `tag` is the tree's: "$tensor"; `body` what it holds, such as the
# tensor's name; `dtype` numpy's dtype string, for arrays and scalars, and the type's name, for an
# Enum or a str.
@final
class Leaf:
    def __new__(cls, tag: str, body: object, dtype: str | None = None) -> Leaf: ...
    @property
    def tag(self) -> str: ...
    @property
    def body(self) -> Any: ...
    @property
    def dtype(self) -> str: ...

# The skeleton of a JSON tree; None for one that has something unusual, which may be an error.
# `tagged` makes a node of an object whose first key is a tag. Raises what that raises.
def parse_tree(text: str, tagged: Callable[[list[tuple[str, Any]]], object]) -> Any | None: ...

# Usual tensors of a state dict and the stored ones that fit them, each once. `_Displaced` is a
# tensor, its leaf and its path.
@final
class Matches:
    def __new__(
        cls, checkpoint: Checkpoint, exchange: Exchange, address_of: Callable[[Any], Address]
    ) -> Matches: ...
    # Takes those of a dict at a path. Returns the keys of `saved` that it leaves alone, and what
    # it took earlier and gives up, since one of these keys has the same memory or stored tensor.
    def take(
        self, here: dict[Any, Any], saved: dict[Any, Any], path: tuple[Any, ...]
    ) -> tuple[list[Any], list[_Displaced]]: ...
    # Gives up what has one of these stored names, or one of these addresses.
    def displace(self, others: list[tuple[str, Address]]) -> list[_Displaced]: ...
    # The names of the stored tensors.
    def names(self) -> list[str]: ...
    def tensors(self) -> list[Any]: ...
    # As `Checkpoint.load_into`, and into all that it has taken.
    def load_into(self, targets: list[tuple[str, Address, int]]) -> str: ...

# Numbers of stored tensors.
@final
class Wanted:
    def __len__(self) -> int: ...
    @property
    def numbers(self) -> list[int]: ...

# The tensors that a load reads, while `fill` makes values of them.
@final
class Loading:
    # These raise KeyError. `tensor` returns an object of its own to each call.
    def tensor(self, name: str, path: tuple[object, ...]) -> Any: ...
    def block(self, name: str) -> Block: ...

# The tensors of a skeleton, None if one is not stored; and all nodes that neither this nor `fill`
# knows, with their paths. `fill` needs a skeleton that was surveyed for the same checkpoint.
def survey(
    checkpoint: Checkpoint, skeleton: object
) -> tuple[Wanted | None, list[tuple[tuple[object, ...], Any]]]: ...

class _Builder(Protocol):
    # Called first: where its functions find what they need.
    def begin(self, loading: Loading) -> None: ...
    # Makes the value of a node that `survey` returned.
    def value(self, node: Any, path: tuple[Any, ...], /) -> Any: ...
    # Makes a tensor that `exchange` does not make.
    def over(
        self, block: Any, dtype: str, shape: tuple[int, ...], nbytes: int, path: tuple[Any, ...]
    ) -> Any: ...
    # Makes another tensor over the memory of one.
    def alias(self, made: Any) -> Any: ...

# Loads tensors, and puts values in the place of the skeleton's nodes. What has the names of
# `blocks` is loaded into blocks. With `early` all values are made while the bytes are read. Raises
# what `Checkpoint.load` raises, and what the builder does. Returns the value and a LoadReport.
def fill(
    checkpoint: Checkpoint,
    skeleton: object,
    wanted: Wanted,
    blocks: list[str],
    builder: _Builder,
    exchange: Exchange | None,
    *,
    early: bool,
) -> tuple[Any, str]: ...

@final
class Checkpoint:
    # Reads and checks the manifest. What the checkpoint lacks or has damaged, loads read from
    # `copies`, the nearest first.
    # `foreign` also opens a directory of safetensors files without a manifest: of torch's
    # HuggingFaceStorageWriter, or plain Hugging Face. `damaged` also opens one whose files are
    # missing or cut. With `verify`, loads verify every checksum chunk they read. While a load runs,
    # its thread calls `progress` ten times a second with the bytes read and their total; the total
    # is 0 until the load is planned.
    def __new__(
        cls,
        path: str,
        config: str,
        *,
        copies: Sequence[str] = ...,
        foreign: bool = False,
        damaged: bool = False,
        verify: bool = True,
        progress: Callable[[int, int], object] | None = None,
    ) -> Checkpoint: ...
    @property
    def path(self) -> str: ...
    # "ringstow"; or "safetensors", which has no checksums to verify.
    @property
    def kind(self) -> str: ...
    # From now on loads read through the page cache, which the processes of this host share, unless
    # the configuration says how to read.
    def read_through_page_cache(self) -> None: ...
    # From now on loads take from these what comes; from files alone, if there are none.
    def take_from(self, arrivals: Arrivals | None) -> None: ...
    # The checkpoint's fingerprint; None for another program's files.
    @property
    def stamp(self) -> str | None: ...
    # The saved JSON tree.
    @property
    def state(self) -> str: ...
    # Names below which everything was dropped.
    @property
    def dropped(self) -> list[str]: ...
    # The tree with at least what a prefix or names need. Raises ValueError.
    def part_of_state(self, prefix: str | None, names: list[str] | None) -> str: ...
    @property
    def tensors(self) -> list[_Row]: ...
    def tensor(self, name: str) -> _Row | None: ...
    @property
    def entries(self) -> list[_Entry]: ...
    # Why not all of it can be loaded, if that is known without reading the files.
    @property
    def problem(self) -> str | None: ...
    # CheckpointInfo.
    @property
    def info(self) -> str: ...
    # Raises KeyError.
    def chunks(self, name: str) -> list[_Region]: ...
    # Raises MissingShareError if this is one rank's share, with only some of one of these tensors.
    def check_whole(self, names: list[str]) -> None: ...
    # Reads and checks the tensors of these names. Returns a list of DamagedTensor.
    def damaged(self, names: list[str]) -> str: ...
    # These three raise ReplacedCheckpointError if a save has replaced the checkpoint since it was
    # opened, and return a LoadReport. `read` reads regions of chunks into strided memory; no two
    # may share memory. `load` returns blocks in the order of names. `load_into` takes the name,
    # address and bytes of dense, writable memory.
    def read(self, slices: list[_SliceSpec]) -> str: ...
    def load(self, names: list[str]) -> tuple[list[Block], str]: ...
    def load_into(self, targets: list[tuple[str, Address, int]]) -> str: ...
    # Blocks that are views of the files, copied on write; None for tensors that must be read.
    # Nothing is read or compared.
    def map(self, names: list[str]) -> tuple[list[Block | None], str]: ...

# Parts of a checkpoint's files, by file, first byte and end, that come in this order. A load takes
# them in place of reading the files. `slots` are kept at most, each of at most `slot_bytes`.
# What does not come, or is damaged, is read from its file.
@final
class Arrivals:
    def __new__(
        cls,
        checkpoint: Checkpoint,
        parts: list[tuple[int, int, int]],
        slots: int,
        slot_bytes: int,
        direct: bool,
    ) -> Arrivals: ...
    # Memory for a part, which may be longer; None if there is none now, unless this waits for some.
    def slot(self, waits: bool) -> Slot | None: ...
    # Reads bytes of a file from a multiple of 4096 on, past the page cache if `direct`, unchecked.
    def read(self, slot: Slot, file: int, begin: int, nbytes: int) -> None: ...
    # Says that a part is in a slot, to which nobody writes from now on. `own`: this rank read it.
    def put(self, number: int, slot: Slot, own: bool) -> None: ...
    # Says that a part does not come.
    def lost(self, number: int) -> None: ...
    # Says that nothing comes any more.
    def close(self) -> None: ...

# Memory for a part. With the last reference it is free for another.
@final
class Slot:
    def __buffer__(self, flags: int, /) -> memoryview: ...

# Host memory for copies, which counts with what background saves may take together. With the last
# reference to it, it is kept for the next copies, unless `discard` was called.
@final
class CopyMemory:
    def __new__(cls, nbytes: int) -> CopyMemory: ...
    # At least as many as were asked for.
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    # Registers it with CUDA for every GPU, the first time, in pieces of so many bytes; returns why
    # it is not. CUDA refuses a copy that touches two pieces.
    def pin(self, piece: int) -> str | None: ...
    def discard(self) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

# The GPUs, and what they can do.
def gpus() -> str: ...

# The configuration that the environment and ringstow.toml ask for.
def found_config() -> str: ...
def check_config(json: str) -> None: ...

# Gives staging memory back that no save or load uses now. Returns how many bytes.
def release_memory() -> int: ...

# Sizes and times in words, and what was moved in how many seconds, at how many GB/s, and how.
def size(bytes: float) -> str: ...
def duration(seconds: float) -> str: ...
def moved(
    figures: tuple[float, float, float], engine: str, fixed_buffers: int, direct: bool
) -> str: ...

# Bytes of staging memory that any save or load with a configuration may take.
def staging_bytes(json: str) -> int: ...

# Whether the environment allows progress bars: RINGSTOW_PROGRESS is not 0, off, no or false.
# Has this process look at once, as often, where it waits for what another host has done. For tests.
def look_at_once() -> None: ...
def shows_progress() -> bool: ...

# Checks the number of metrics, and the length of their names.
def check_metrics(metrics: dict[str, float]) -> None: ...

# Returns the bytes of a size such as "64M". Raises ValueError.
def parse_size(text: str) -> int: ...

# The time that a text such as "1h30min" names. Raises ValueError that says what is wrong.
def parse_span(text: str) -> datetime.timedelta: ...

# Likewise of the pool, 0 for "auto".
def parse_pool_size(text: str) -> int: ...

# Adds a line of JSON to the history of a run. Raises InvalidStateError if something else has the
# file's name.
def add_to_history(run: str, line: str) -> None: ...

# Returns the name of the file system of a path, or of the directory in which it would be, if other
# hosts may use it.
@final
class RunLock:
    def __new__(cls, root: str) -> RunLock: ...
    @staticmethod
    def is_own(root: str) -> bool: ...
    def check(self) -> None: ...
    def release(self) -> None: ...

def has_gone(path: str) -> bool: ...
def shared_file_system(path: str) -> str | None: ...

# Returns a VerifyReport. Calls `progress` as a Checkpoint does.
def verify(
    path: str, config: str, *, progress: Callable[[int, int], object] | None = None
) -> str: ...

# Raises InvalidStateError for a URL of an object store that cannot be understood.
def check_url(url: str) -> None: ...

# Raises InvalidStateError if a place is in one of the others, or one of them in it.
def check_apart(place: str, others: Sequence[str]) -> None: ...

# The copies of a directory's checkpoints that were begun there and have not ended: of which, and
# where to.
def unfinished(run: str) -> list[tuple[str, str]]: ...

# Whether the run files of two checkpoints' directories name the same run.
def is_one_run(one: str, other: str) -> bool: ...

# Returns where the tiers of a run may have a copy of a checkpoint: under the same name, which a
# link's is not.
def copies_of(path: str, tiers: Sequence[str]) -> list[str]: ...

# Returns the run whose steps a directory or a URL has.
def run_of(place: str) -> str | None: ...

# Raises InvalidStateError if the steps in a run's directory and in further places are of two runs.
# Notes in a new directory that it goes on with the run of the places.
def join_run(root: str, places: Sequence[str], config: str) -> None: ...

# Notes which run's steps a place has, in place of what was noted.
def name_run(place: str, run: str) -> None: ...

# Notes that a place has the steps of a run, and returns its name; without one, of the run whose
# steps are there, or of a new one. Raises InvalidStateError if the place has another run's steps.
def claim(place: str, run: str | None) -> str: ...

# The same of one of its places for a directory's run, which gets a name if it has none. A place
# that has a former name of it gets the present. A run that the directory goes on with first gets a
# new name, there and in its places.
def claim_for(root: str, places: Sequence[str], place: str) -> str: ...

# Returns a PromotionReport. `how` is the rate, the number of uploads, the bytes of a part, whether
# an older checkpoint is replaced, a link is refused and replicas are sent, and the seconds of
# patience.
def promote(
    path: str,
    to: str,
    how: tuple[int, int, int, bool, bool, bool, float],
    config: str,
    *,
    progress: Callable[[int, int], object] | None = None,
) -> str: ...

# Returns a DiffReport. With `values`, it counts the elements that differ.
def diff(a: str, b: str, values: bool, config: str) -> str: ...

# Returns the newest step that can be loaded in a list of Found, which may be empty; with `verify`,
# whose every byte is intact; with `before`, which is older than that step or path. Of several
# directories, the nearest copy.
def latest(
    directories: Sequence[str],
    verify: bool,
    before: int | str | None,
    pattern: str | None,
    config: str,
) -> str: ...

# Returns the steps in a directory as a list of Found, oldest first.
def steps(directory: str, pattern: str | None, config: str) -> str: ...

# last, every, every_time, within and best of a Retention.
_Rules: TypeAlias = tuple[
    int | None,
    int | None,
    datetime.timedelta | None,
    datetime.timedelta | None,
    tuple[str, str, int] | None,
]

# What goes from a run's directory after a save. `slim` is how many of the newest steps stay whole
# and the parts that older ones lose, `eviction` the tiers and how many of the newest steps stay
# once all of them have them.
@final
class Clearing:
    def __new__(
        cls,
        root: str,
        rules: _Rules,
        slim: tuple[int, list[str]] | None,
        eviction: tuple[Sequence[str], int] | None,
        config: str,
    ) -> Self: ...
    # Removes and slims steps on one look at the run, but none that are `waiting` for a copy.
    # Returns a Retained, why something failed, and the steps that a tier lacks.
    def after_save(
        self, waiting: Sequence[str]
    ) -> tuple[str | None, Exception | None, list[str]]: ...
    # Removes what all tiers have; returns the steps that one lacks.
    def evict(self, waiting: Sequence[str]) -> list[str]: ...
    # Whether so many free bytes are enough for a save like the newest step.
    def has_room(self, free_bytes: int) -> bool: ...
    # The steps that can be copied, oldest first.
    def copyable(self) -> list[str]: ...
    def note_damage(self, path: str) -> None: ...
    def is_damaged(self, path: str) -> bool: ...

# The steps of a run in its directory and on tiers, newest first, of copies the nearest first.
# Methods return a list of Step.
@final
class RunSteps:
    def __new__(cls, root: str, places: Sequence[str], config: str) -> Self: ...
    # What a restore may load, damaged ones too. With `previous`, only the newest that is intact
    # if a manifest is on bad sectors.
    def candidates(self, previous: bool) -> str: ...
    # The committed steps in the directory alone, damaged ones too.
    def committed(self) -> str: ...
    # Those that can be loaded; the first of them, or none; the copies of one step.
    def loadable(self) -> str: ...
    def newest(self) -> str: ...
    def named(self, step: int) -> str: ...
    # The committed steps on the tiers alone.
    def there(self) -> str: ...

# Returns the newest step of which tiers have all files together, and its copies on the others.
def newest_of(tiers: Sequence[str], config: str) -> tuple[str, list[str]]: ...

# Returns where a step is saved, unless the run has it under another name.
def usual_path(root: str, step: int) -> str: ...

# What a manager remembers of the steps that it saved, to link their files.
@final
class Previous:
    def __new__(cls, full_every: int | None) -> Self: ...
    # Returns the last step, and whether the next save is to share no file with earlier ones.
    def next(self) -> tuple[str | None, bool]: ...
    def saved(self, path: str) -> None: ...
    def restored(self, path: str) -> None: ...

# Returns what follows a load that failed: "again" looks at the run again, "raise" raises, "pass"
# goes on to the next copy or an earlier step.
def after_failure(
    path: str, has_copies: bool, is_damage: bool, is_missing: bool, previous: bool
) -> str: ...

# Returns the paths of the whole steps in a run's directory of which a tier lacks a whole copy:
# paths, orders, and whether they are whole.
def lacking(
    found: Sequence[tuple[str, tuple[int, int, int, int], bool]], places: Sequence[str]
) -> list[str]: ...

# Returns which of these steps, newest first, has the best number; of equals, the newest.
def best_of(numbers: Sequence[float | None], mode: str) -> int | None: ...

# How the steps of a run get to its tiers; `rules` are what stays on each.
@final
class Copying:
    def __new__(
        cls,
        root: str,
        tiers: Sequence[str],
        rate: int,
        rules: _Rules,
        config: str,
    ) -> Self: ...
    # Copies a step to a tier, and removes there what the rules no longer keep. Returns a
    # PromotionReport; None if a rule has removed the step here meanwhile, which is fine.
    def send(
        self, step: str, is_new: bool, tier: str, progress: Callable[[int, int], object] | None
    ) -> str | None: ...
    # Removes what the rules no longer keep in a tier.
    def clear(self, tier: str) -> None: ...

# The steps that wait for their copies. See `ringstow._saving._copy_queue.Stays` for what it is
# made with; `is_shared` if ranks copy together.
@final
class CopyLine:
    def __new__(cls, has_rule: bool, evicts: bool, every: int | None, is_shared: bool) -> Self: ...
    # Adds a step; returns whether the caller is to start a thread that takes turns.
    def add(self, path: str, is_new: bool) -> bool: ...
    def waiting(self) -> list[str]: ...
    # Waits for the next step. Returns its path and whether it was just saved, or None after which
    # the thread ends; those that are passed over; and whether a step was saved since the turn
    # before. `agree` takes and returns how many steps were added, and whether the line is closing.
    def next(
        self,
        pauses: tuple[float, float],
        agree: Callable[[int, bool], tuple[int, bool]] | None,
        is_exiting: Callable[[], bool],
    ) -> tuple[tuple[str, bool] | None, list[str], bool]: ...
    def ended(self, is_worth_another: bool) -> None: ...
    def pause_s(self, pauses: tuple[float, float]) -> float | None: ...
    # Wait until nothing is left to copy but what failed; or until the thread has ended.
    def wait_idle(self, timeout: float | None) -> bool: ...
    def wait_ended(self, timeout: float | None) -> bool: ...
    def end_retries(self) -> None: ...
    def give_up(self) -> None: ...

# Checks that what a setting keeps in the places, a name and a number of steps, is all that the
# other settings keep. Raises InvalidStateError.
def check_covers(there: tuple[str, int], others: Sequence[tuple[str, int]]) -> None: ...

# Refuses to load a rank's own share of what ranks saved each by itself, in rank00003 below path,
# if it is missing or not of the same save as rank 0's; for rank 0 also if any share is missing.
# Raises MissingShareError.
def check_own_share(path: str, rank: int) -> None: ...

# Removes a checkpoint; with `recycle`, keeps its files for the next save to write over.
# Returns Removed.
def remove(path: str, recycle: bool, config: str) -> str: ...

# Removes all steps in a directory except those that a rule keeps, and the newest. Returns Retained.
def retain(
    directory: str,
    rules: _Rules,
    recycle: bool,
    pattern: str | None,
    dry_run: bool,
    config: str,
) -> str: ...

# Notes the order of a step of a run that may be in another place: what this process saves to the
# run from now on is newer.
def follow(root: str, newest: tuple[int, int, int, int]) -> None: ...

# Warns of the steps in some places of a run that are newer than a restored one, by its order. With
# `drop_newer`, removes them, except those that are kept.
def go_back(
    root: str,
    places: Sequence[str],
    restored: tuple[int, int, int, int],
    drop_newer: bool,
    config: str,
) -> None: ...

# Whether a step is gone because a rule or a person has removed it, and so is not to be copied.
def was_removed(path: str, config: str) -> bool: ...

# Raises InvalidStateError if a path that a manager has named is a link, or a copy of another step.
def check_own_name(path: str) -> None: ...

# Keeps a step, whatever the rules say.
def pin(step: str) -> None: ...

# Lets it go, and returns whether it was kept.
def unpin(step: str) -> bool: ...

# Returns where the step of this number is that is kept, also if somebody has removed it.
def kept(run: str, step: int) -> str | None: ...

# Returns the names of the steps of a run that are kept.
def pinned(run: str) -> list[str]: ...

# Returns a Slimmed as JSON.
def slim(path: str, drop: list[str], config: str) -> str: ...

# Removes what killed saves and removals left in a directory and directly below it; with `recycled`,
# also the recycled files. `no_other_writers` promises that no other host writes there.
def prune(
    directory: str, recycled: bool, no_other_writers: bool, dry_run: bool, config: str
) -> str: ...

# A hash of a JSON tree's structure, one of its values, and the names of the tensors in it. Two
# processes with the same build get the same.
def outline(tree: str) -> tuple[int, int, list[str]]: ...

# The kind of another program's checkpoint, a key of `FOREIGN_KINDS`; None if none is recognized.
# NotCommittedError: its save has not ended. UnsupportedError: its format is not read.
def foreign_kind(path: str) -> str | None: ...

# The same, and whether it is a directory of a model whose weights torch.save wrote; that alone,
# also of other kinds. A Checkpoint opens all other models. Errors also of `weights_in`.
def kind_and_weights(path: str) -> tuple[str | None, bool]: ...
def has_weights_by_torch(path: str) -> bool: ...

# The directory with DeepSpeed's files: the path, or the one that its file `latest` names.
def deepspeed_directory(path: str) -> str | None: ...

# The file of a model's weights in a directory, or the index of their files, as `from_pretrained`
# chooses it; None if no file has a known name. `warns`: log which others are not read.
# InvalidStateError: several variants of the weights, and none without one.
def weights_in(path: str, warns: bool) -> str | None: ...

# The files that an index such as `pytorch_model.bin.index.json` lists, sorted.
# MissingFilesError: some are not there. FormatError: it is no index.
def files_of_index(path: str, index: str) -> list[str]: ...

# The sets of numbered files among these, such as `model-00001-of-00003.bin`: of each the name of
# its index, the files that are there, and the first thousand that are not.
def numbered_sets(names: list[str]) -> list[tuple[str, list[str], list[str]]]: ...

# The files of weights among these that no program takes, since it finds others first.
def superseded_weights(names: list[str]) -> list[str]: ...

# Tells this boot of this machine from all others: processes with the same text share a page cache.
# Where the system does not say, each process shares with none.
def boot_id() -> str: ...

# How many cores this process may use: those that it is bound to, and no more than its container's
# share.
def cores() -> int: ...

# The nesting depth of valid JSON.
def nesting(json: str) -> int: ...
def swap_names(one: str, other: str) -> None: ...

# Renames a file; FileExistsError if something has the other name.
def rename_new(source: str, target: str) -> None: ...

# Makes the names in a directory durable.
def sync_dir(path: str) -> None: ...
def cli(argv: Sequence[str]) -> int: ...

# Passes the log records of native threads to `logging`, which they never call themselves: a signal
# handler that saves may have interrupted a thread that holds a logging handler's lock.
def deliver_log() -> None: ...

# At the interpreter's exit: waits for the saves in progress and cancels the loads. From then on,
# other threads can start neither.
def end_jobs() -> None: ...

# Makes the process exit with 1 where it would exit with 0.
def fail_exit() -> None: ...

# In a forked child: drops the handles of threads that do not exist there.
def forget_after_fork() -> None: ...

# A file that is written as a stream. After an error, nothing can be published.
@final
class FileWriter:
    def __new__(cls, path: str, config: str, overwrite: bool, checksums: bool) -> FileWriter: ...
    # Copies all bytes of a contiguous buffer of bytes.
    def write(self, bytes: memoryview) -> int: ...
    def tell(self) -> int: ...
    # Publishes the file; returns its report.
    def finish(self) -> str: ...
    def abort(self) -> None: ...

# A file that is read as a stream.
@final
class FileReader:
    def __new__(cls, path: str, config: str) -> FileReader: ...
    @property
    def size(self) -> int: ...
    # Why no checksums are compared; None if they are.
    @property
    def unchecked(self) -> str | None: ...
    def readinto(self, to: memoryview) -> int: ...
    # `len` must not be more than is left.
    def read(self, len: int) -> bytes: ...
    def peek(self, len: int) -> bytes: ...
    def seek(self, position: int) -> None: ...
    def tell(self) -> int: ...
    # The engine, and whether it uses O_DIRECT.
    def moved(self) -> tuple[str, bool]: ...
    def close(self) -> None: ...
