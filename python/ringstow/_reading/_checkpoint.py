"""Inspect a checkpoint without loading it, and read parts of its tensors: `open`."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from ringstow import _foreign, _native
from ringstow._core._arguments import StrPath
from ringstow._core._config import Config, native_json
from ringstow._core._dispatch_modes import real_tensors
from ringstow._core._errors import KeyMismatchError, UnsupportedError
from ringstow._reading import _resolve, _slicing
from ringstow._reading._load import check_framework
from ringstow._reading._names import skeleton_of
from ringstow._state.tensors import _numpy, _torch
from ringstow._state.tree import _build, _walk
from ringstow._state.tree._select import missing_names
from ringstow._state.tree._walk import COMPOSITE, Box, Leaf, Path, flat_name

if TYPE_CHECKING:
    import numpy as np

    from ringstow._reports._checkpoint_reports import CheckpointInfo

Framework = Literal["torch", "numpy"]
_ELEMENTS = ("$tensor", "$ndarray")
_KINDS = {
    COMPOSITE: "composite",
    "$tensor": "tensor",
    "$ndarray": "array",
    "$object": "object",
    "$pickle": "pickle",
}

_log = logging.getLogger("ringstow")


def open(
    path: StrPath | Sequence[StrPath],
    *,
    verify: bool = True,
    allow_pickle: bool = False,
    framework: Framework = "torch",
    config: Config | None = None,
) -> Checkpoint:
    """Open a checkpoint to inspect it and to read parts of it. Reads no tensor.

    ::

        with ringstow.open("run/step-1000") as ckpt:
            for name, entry in ckpt.items():
                print(name, entry.dtype, entry.shape)
            step = ckpt.value("step")
            bias = ckpt["model.bias"].load()
            rows = ckpt["model.weight"][:16, 3]

    Also opens a directory of plain safetensors files without a manifest, such as those of Hugging
    Face. They have no checksums, and ``info.kind`` is ``"safetensors"``.

    Also opens a checkpoint with missing files, and logs a warning: reading a tensor in one of them
    raises. `load` refuses such a checkpoint.

    Args:
        path: the checkpoint's directory or URL, or a list of the tiers of a run; see `load`.
        verify: verify every checksum chunk (1 MiB) that is read before using any of it. False reads
            only the needed pages.
        allow_pickle: let ``load()`` of pickled values unpickle them, which can run any code.
        framework: how to return torch tensors: as ``"torch"`` tensors or ``"numpy"`` arrays; see
            `load`. Numpy arrays are always read as numpy arrays.
        config: the settings; None means the defaults.

    Raises:
        IncompleteCheckpointError: the directory holds no committed checkpoint.
        CorruptCheckpointError: the manifest is damaged.
        FormatError: the manifest is not ringstow's, or of a newer version.
        ValueError: an unknown ``framework``.
        OSError: the system refused: no such directory, no permission, a failing disk.
    """
    check_framework(framework, None)
    return _resolve.found_again(
        path,
        config,
        lambda found: Checkpoint(
            found,
            native_json(config),
            verify=verify,
            allow_pickle=allow_pickle,
            as_numpy=framework == "numpy",
        ),
    )


class Checkpoint(Mapping[str, "Entry"]):
    """An opened checkpoint: a mapping of the names of its tensors and arrays to their entries.

    Created by `open`. Names are the same as in `load`: the path in the state dict, joined by dots.
    Two names of one tensor, such as tied weights, are two entries. Keeps no file open between
    reads: if a save replaces the checkpoint, reads raise ReplacedCheckpointError, and `open`
    returns the newer one. After `close` every use raises ValueError.
    """

    def __init__(
        self,
        found: _resolve.Found,
        config: str,
        *,
        verify: bool,
        allow_pickle: bool,
        as_numpy: bool,
    ) -> None:
        self.path = path = found.path
        """The checkpoint's directory."""
        self._as_numpy = as_numpy
        opened: _native.Checkpoint | _foreign.Foreign | None
        opened = _foreign.opened(found.path, config, verify=verify, allow_pickle=allow_pickle)
        if opened is None:
            opened = _resolve.opened(
                found,
                lambda where, copies: _native.Checkpoint(
                    where, config, copies=copies, foreign=True, damaged=True, verify=verify
                ),
            )
            self.path = path = opened.path
        if opened.problem is not None:
            _log.warning("%s. Tensors in its other files can be read", opened.problem)
        self._opened: _native.Checkpoint | _foreign.Foreign | None = opened
        is_tree = isinstance(opened, _foreign.Foreign) or (
            opened.kind == "ringstow" and opened.state != "null"
        )
        self._skeleton: dict[Any, Any] = skeleton_of(opened, path) if is_tree else {}
        rows = {row[0]: row for row in opened.tensors}  # copied: ``opened`` may be closed
        self._contents = _build.Contents(
            path, rows.get, allow_pickle=allow_pickle, as_parts=as_numpy
        )
        self._entries = self._all(opened)

    def __getitem__(self, name: str) -> Entry:
        self._alive()
        entry = self._entries.get(name)
        if entry is None:
            raise self._unknown(name)
        return entry

    def __contains__(self, name: object) -> bool:
        self._alive()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self._alive()
        return iter(self._entries)

    def __len__(self) -> int:
        self._alive()
        return len(self._entries)

    def __repr__(self) -> str:
        held = "closed" if self._opened is None else f"{len(self._entries)} tensors"
        return f"<ringstow.Checkpoint {self.path!r}, {held}>"

    def __enter__(self) -> Self:
        self._alive()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the checkpoint. Tensors and values that were read from it stay valid."""
        self._opened = None
        self._entries = {}
        self._skeleton = {}

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._opened is None

    @property
    def info(self) -> CheckpointInfo:
        """The manifest's description of the save: time, version, bytes, ranks."""
        from ringstow._reports._checkpoint_reports import CheckpointInfo

        return CheckpointInfo.from_json(self._alive().info)

    @property
    def tree(self) -> dict[Any, Any]:
        """A new copy of the saved state dict, with an `Entry` for each unread item.

        Unread items are tensors, arrays, objects that need pickle (this unpickles nothing), and
        values of types that this program does not have.
        """
        self._alive()
        builder = _build.Builder(self._contents, {}, as_numpy=self._as_numpy)

        def make(leaf: Leaf | Box, at: Path) -> Any:
            if isinstance(leaf, Leaf) and leaf.tag in _KINDS:
                return self._entry(leaf, at)
            if isinstance(leaf, Box) and leaf.tag == COMPOSITE:
                return Entry(self, flat_name(at), at, leaf.unmade or leaf)
            try:
                return builder.make(leaf, at)
            except UnsupportedError:
                unmade = leaf.unmade if isinstance(leaf, Box) else leaf
                return Entry(self, flat_name(at), at, unmade or leaf)

        return builder.value(self._skeleton, (), make)  # type: ignore[no-any-return]

    def value(self, name: str) -> Any:
        """Return the value of a name, or the dict or list of values; a tensor is an `Entry`.

        Reads no tensor. Reads DCP's objects, and unpickles them with ``weights_only`` unless `open`
        was called with ``allow_pickle``.

        Args:
            name: the path joined by dots: ``"step"``, ``"optimizer.param_groups.0.lr"``.

        Raises:
            KeyMismatchError: there is no such name; the message suggests similar ones.
            UnsupportedError: the value needs torch, ``allow_pickle``, or a type that this program
                does not have.
        """
        self._alive()
        found = _walk.find(self._skeleton, name)
        if found is None:
            raise self._unknown(name)
        path, node = found
        return self._value(node, path)

    def _alive(self) -> _native.Checkpoint | _foreign.Foreign:
        if self._opened is None:
            raise ValueError(f"{self.path} is closed: open it again")
        return self._opened

    @real_tensors()
    def _value(self, node: Any, path: Path, *, entries: bool = True) -> Any:
        """Read a value. Tensors and arrays in it become entries, unless ``entries`` is False."""
        opened = self._alive()

        def is_entry(leaf: Leaf | Box) -> bool:
            return entries and leaf.tag in (*_ELEMENTS, COMPOSITE)

        def make(leaf: Leaf | Box, at: Path) -> Any:
            if is_entry(leaf):
                if isinstance(leaf, Leaf):
                    return self._entry(leaf, at)
                return Entry(self, flat_name(at), at, leaf.unmade or leaf)
            return builder.make(leaf, at)

        survey = _build.Survey(self._contents)
        for at, leaf in _walk.nodes(node, path):
            if not is_entry(leaf):
                survey.add(leaf, at)
        blocks = _build.read(opened, list(survey.objects) if entries else survey.names)
        builder = _build.Builder(self._contents, blocks, as_numpy=self._as_numpy)
        return builder.value(node, path, make)

    def _entry(self, leaf: Leaf, path: Path) -> Entry:
        name = _walk.leaf_name(path, leaf)
        known = self._entries.get(name)
        return Entry(self, name, path, leaf) if known is None or known._leaf != leaf else known

    def _all(self, opened: _native.Checkpoint | _foreign.Foreign) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        unreferenced = {name: None for name, *_ in opened.tensors}
        for path, leaf in _walk.leaves(self._skeleton):
            if isinstance(leaf, Leaf) and leaf.tag in _walk.STORED:
                unreferenced.pop(leaf.body, None)
                if leaf.tag != "$object":
                    name = _walk.leaf_name(path, leaf)
                    entries.setdefault(name, Entry(self, name, path, leaf))
        for name in unreferenced:
            entries.setdefault(name, Entry(self, name, (name,), Leaf("$tensor", name)))
        return entries

    def _unknown(self, name: str) -> KeyMismatchError:
        if _walk.find(self._skeleton, name) is not None:
            text = f"{self.path}: {name!r} is not a tensor: value({name!r}) returns it"
            return KeyMismatchError(text, path=self.path, missing=[name])
        names = self._skeleton or dict(self._entries)
        return missing_names([name], [name], names, self.path, self._alive().dropped)

    @real_tensors()
    def _read(self, entry: Entry, index: Any) -> Any:
        leaf = entry._leaf
        self._alive()
        if leaf.tag not in _ELEMENTS:
            raise TypeError(f"{entry.name} is not a tensor: load() it")
        if self._contents.stored(leaf, entry._path).dtype == "F4":
            raise UnsupportedError(
                f"{entry.name} holds 4-bit numbers: load() it, and index the result"
            )
        selection = _slicing.select(index, entry.shape, entry.name)
        is_whole = tuple(r.size for r in selection.ranges) == entry.shape
        if is_whole and not any(r.flipped for r in selection.ranges):
            return self._shaped(entry.load(), selection.shape)
        part = self._read_part(entry, selection)
        if leaf.dtype.startswith(">"):
            part = part.astype(leaf.dtype)
        return self._shaped(part, selection.shape)

    def _read_part(self, entry: Entry, selection: _slicing.Selection) -> Any:
        opened, leaf = self._alive(), entry._leaf
        stored = self._contents.stored(leaf, entry._path)
        module: Any = _numpy if self._as_numpy or leaf.tag == "$ndarray" else _torch
        dtype = module.dtype_of(stored.dtype, entry.name)
        if math.prod(selection.shape) == 0:
            return module.empty(selection.shape, dtype)
        opened.check_whole([leaf.body])
        reading = _slicing.plan(selection.ranges, entry.shape, dtype.itemsize)
        memory = module.empty(reading.shape, dtype)
        address = module.address_of(memory)
        slices = [
            (leaf.body, number, offsets, lengths, address + at, reading.strides)
            for number, offsets, lengths, at in _slicing.in_chunks(
                reading, opened.chunks(leaf.body)
            )
        ]
        _log.debug("read %s", opened.read(slices))
        return module.dense(memory[reading.keep])

    def _shaped(self, value: Any, shape: tuple[int, ...]) -> Any:
        shaped = value.reshape(shape)
        return shaped[()] if shape == () and _numpy.is_array(shaped) else shaped


class Entry:
    """An unread tensor, array or object of a checkpoint.

    ``entry.load()`` reads the whole entry. ``entry[a:b, c]`` reads only the selection, by numpy's
    rules for integers, slices with any step, ``...`` and None. The result has its own memory.
    ``numpy.asarray(entry)`` works too.
    """

    __slots__ = ("_checkpoint", "_leaf", "_path", "name")

    def __init__(self, checkpoint: Checkpoint, name: str, path: Path, leaf: Leaf | Box) -> None:
        self._checkpoint = checkpoint
        self._path = path
        self._leaf: Any = leaf
        self.name = name
        """The path in the state dict, joined by dots."""

    @property
    def kind(self) -> str:
        """The kind: ``"tensor"``, ``"array"`` (numpy), ``"object"`` (DCP) or ``"pickle"``.

        ``"composite"`` is a tensor that is made of others: its inner tensors are entries, too, of
        its name, a dot and theirs. ``"value"`` is a value of a type that this program does not
        have.
        """
        return _KINDS.get(self._leaf.tag, "value")

    @property
    def dtype(self) -> str:
        """The element type's name in torch and numpy: ``"float32"``; empty for an object."""
        if self.kind not in ("tensor", "array"):
            return ""
        code = self._checkpoint._contents.stored(self._leaf, self._path).dtype
        return _torch.NAMES.get(code, code)

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements per dimension; empty for an object."""
        if self.kind not in ("tensor", "array"):
            return ()
        return self._checkpoint._contents.stored(self._leaf, self._path).shape

    @property
    def nbytes(self) -> int:
        """Bytes of data; 0 for a value."""
        if self.kind == "composite":
            inside = ((self._path, leaf) for leaf in _walk.stored_leaves(self._leaf))
            return sum(self._checkpoint._contents.stored(leaf, at).nbytes for at, leaf in inside)
        if self.kind == "value":
            return 0
        if self.kind == "pickle":
            return len(self._leaf.body) * 3 // 4
        return self._checkpoint._contents.stored(self._leaf, self._path).nbytes

    def load(self) -> Any:
        """Read the whole entry.

        Returns:
            A new tensor or array, or the unpickled object.

        Raises:
            UnsupportedError: the entry is pickled, and `open` was called without ``allow_pickle``;
                or it needs torch or a numpy dtype that is unavailable.
            ReplacedCheckpointError: a save replaced the checkpoint since it was opened.
            CorruptCheckpointError: bytes on disk are damaged.
            IncompleteCheckpointError: the checkpoint was removed; or a file of this tensor is
                missing; or it is a rank checkpoint, and holds only part of this tensor.
            ValueError: the checkpoint is closed.
        """
        return self._checkpoint._value(self._leaf, self._path, entries=False)

    def __getitem__(self, index: Any) -> Any:
        """Read a selection. Raises errors of `load`; IndexError or TypeError for bad indices."""
        return self._checkpoint._read(self, index)

    def __array__(
        self, dtype: np.dtype[Any] | None = None, copy: bool | None = None
    ) -> np.ndarray[Any, Any]:
        """Read the whole entry as a numpy array."""
        if copy is False:
            raise ValueError(f"{self.name} is in a file: reading it makes a copy")
        import numpy

        return numpy.asarray(self.load(), dtype)

    def __repr__(self) -> str:
        if self.kind not in ("tensor", "array"):
            return f"<ringstow.Entry {self.name!r}, {self.kind}>"
        return f"<ringstow.Entry {self.name!r}, {self.dtype} {list(self.shape)}>"
