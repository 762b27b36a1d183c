"""Builds the caller's values from a skeleton and the bytes read.

Only this module unpickles, and only if the caller allows it.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import io
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from ringstow import _native
from ringstow._core._errors import FormatError, UnsupportedError
from ringstow._state.tensors import _composites, _numpy, _torch
from ringstow._state.tensors._layouts import TensorParts
from ringstow._state.tensors._memory import Stored
from ringstow._state.tensors._optional_packages import require
from ringstow._state.tree import _custom_types, _packed_values, _small_values
from ringstow._state.tree._damaged_tensors import DamagedTensor
from ringstow._state.tree._skeleton import parse
from ringstow._state.tree._walk import (
    COMPOSITE,
    STORED,
    Box,
    Leaf,
    Make,
    NoKeyError,
    Path,
    check_hashes,
    describe,
    nodes,
    rebuild,
    stored_leaves,
)

_log = logging.getLogger("ringstow")


Row = tuple[str, str, tuple[int, ...], int]
"""A stored tensor: its name, and the fields of `Stored`."""


class Contents:
    """The stored items in a checkpoint's manifest, and whether to unpickle any of them."""

    def __init__(
        self,
        path: str,
        find: Callable[[str], Row | None],
        *,
        allow_pickle: bool = False,
        as_parts: bool = False,
    ) -> None:
        self.path = path
        self.allow_pickle = allow_pickle
        self.as_parts = as_parts
        """Whether tensors that are made of others are loaded as `TensorParts`."""
        self.manifest = f"{path}/manifest.json"
        self._find = find

    def stored(self, leaf: Leaf, path: Path) -> Stored:
        """Return the stored item for the tensor or array leaf at a path.

        Raises:
            FormatError: nothing is stored, or its dtype differs from the leaf's.
        """
        row = self._find(leaf.body)
        if row is None:
            raise self.wrong(path, f"refers to the tensor {leaf.body!r}, which is not stored")
        stored = Stored(*row[1:])
        if leaf.tag == "$object" and (stored.dtype, len(stored.shape)) != ("U8", 1):
            raise self.wrong(path, "is an object but is not stored as a string of bytes")
        if leaf.tag == "$ndarray" and stored.dtype != _numpy.code_of(leaf.dtype):
            raise self.wrong(path, f"is an array of {leaf.dtype!r} but is stored as {stored.dtype}")
        return stored

    def unreadable(self, path: Path, error: Exception) -> FormatError:
        """Return the error for an object whose bytes torch.save did not write."""
        return self.wrong(path, f"is an object that torch.load cannot read: {error}")

    @contextlib.contextmanager
    def keys(self) -> Iterator[None]:
        """Report an invalid key as a FormatError."""
        try:
            yield
        except NoKeyError as error:
            raise self.wrong(error.path, str(error)) from None

    def wrong(self, path: Path, what: str) -> FormatError:
        """Return the error for a value's entry in the manifest."""
        message = f"{self.manifest}: {describe(path)} {what}"
        return FormatError(message, path=self.manifest)


class Loads(Protocol):
    """The source of blocks: a checkpoint of ringstow, or of another program."""

    def load(self, names: list[str]) -> tuple[list[Any], str]:
        """Return the bytes of tensors, in the order of their names, and a report."""


def read(checkpoint: Loads, names: list[str], reports: list[str] | None = None) -> dict[str, Any]:
    """Return the bytes of tensors and objects by name; add the JSON report to ``reports``."""
    if not names:
        return {}
    blocks, report = checkpoint.load(names)
    if reports is not None:
        reports.append(report)
    _log.debug("loaded %s", report)
    return dict(zip(names, blocks, strict=True))


class Survey:
    """Gathers the tensors that skeletons need, each once, and refuses forbidden pickles.

    With ``apart``, leaves that become torch tensors are gathered separately: they have another
    target.
    """

    def __init__(self, contents: Contents, *, apart: bool = False) -> None:
        self._contents = contents
        self._names: dict[str, None] = {}
        self._apart = apart
        self.tensors: dict[str, Stored] = {}
        """The separately gathered items, by name."""
        self.objects: dict[str, tuple[Leaf, Path]] = {}
        """The objects among the names: they are checked before any tensor is read."""

    @property
    def names(self) -> list[str]:
        """The tensors' names in the order of the walk."""
        return list(self._names)

    def add(self, node: object, path: Path = ()) -> None:
        """Add a skeleton, or the part of a skeleton at a path.

        Raises:
            FormatError: the skeleton refers to a tensor that is not stored.
            UnsupportedError: a pickled value that may not be unpickled; names its key.
        """
        for at, leaf in nodes(node, path):
            self._note(leaf, at)

    def add_all(self, skeleton: object, checkpoint: _native.Checkpoint) -> Wanted:
        """Add a whole skeleton; return, instead of adding, the tensors outside rare containers.

        Raises:
            Exception: any error of `add`.
        """
        tensors, others = _native.survey(checkpoint, skeleton)
        if tensors is None:
            self.add(skeleton)
            raise AssertionError("a tensor is not stored")
        for path, node in others:
            self.add(node, path)
        return Wanted(checkpoint, tensors, not any(_looks_at_bytes(node) for _, node in others))

    @property
    def rest(self) -> list[str]:
        """The names without the objects' names."""
        return [name for name in self._names if name not in self.objects]

    def _note(self, leaf: Leaf | Box, path: Path) -> None:
        if isinstance(leaf, Box):
            if leaf.tag == COMPOSITE:
                self.note_context(leaf, path)
            elif isinstance(leaf.items, dict):
                _custom_types.check_fields(leaf, describe(path))
        elif leaf.tag in STORED:
            stored = self._contents.stored(leaf, path)
            if self._apart and leaf.tag == "$tensor":
                self.tensors[leaf.body] = stored
            else:
                self._names[leaf.body] = None
            if leaf.tag == "$object":
                self.objects[leaf.body] = (leaf, path)
        elif leaf.tag == "$pickle" and not self._contents.allow_pickle:
            raise UnsupportedError(
                f"{describe(path)} was saved with pickle, which can run any code when it is "
                "loaded: if you trust who wrote the checkpoint, pass allow_pickle=True; or load "
                "the rest with prefix= or keys= of ringstow.load"
            )
        elif leaf.tag in _TYPED:
            _of_type(leaf, describe(path))

    def note_context(self, box: Box, path: Path) -> None:
        """Refuse a composite that can't be made; gather what is stored in its context."""
        inside = nodes(box.context, path)
        if not self._contents.as_parts:
            _composites.check(box.name, describe(path))
        else:
            inside = [one for one in inside if isinstance(one[1], Leaf) and one[1].tag in STORED]
        for at, leaf in inside:
            self._note(leaf, at)


class Wanted(NamedTuple):
    """The tensors of a skeleton that `_native.fill` makes."""

    checkpoint: _native.Checkpoint
    tensors: _native.Wanted
    may_be_early: bool
    """Whether everything can be made before the tensors' bytes are read."""

    def names(self) -> list[str]:
        """Return the names of the tensors."""
        rows = self.checkpoint.tensors
        return [rows[number][0] for number in self.tensors.numbers]


def _looks_at_bytes(node: object) -> bool:
    """Return whether making a value may need the bytes of the tensors and arrays in it."""
    if isinstance(node, Leaf):
        return node.tag == "$ndarray" and str(node.dtype).startswith(">")  # copied, and swapped
    return any(leaf.tag != "$object" for leaf in stored_leaves(node))  # a type's own code reads


# Leaves that a type of the program makes.
_TYPED = ("$enum", "$str")


def _of_type(leaf: Leaf, key: str) -> Any:
    make = _custom_types.member_at if leaf.tag == "$enum" else _custom_types.text_as
    return make(leaf.dtype, leaf.body, key)


class Builder:
    """Makes values of skeletons that a `Survey` accepted, from the blocks that were read.

    Leaves that name the same tensor get separate tensor objects over one storage: the 1-d tensor in
    ``flat`` if it was loaded to a device, otherwise the block. With ``as_numpy``, torch's tensors
    are made as numpy's arrays, without torch.
    """

    def __init__(
        self,
        contents: Contents,
        blocks: dict[str, Any],
        *,
        as_numpy: bool = False,
    ) -> None:
        self._contents = contents
        self._blocks = blocks
        self._as_numpy = as_numpy
        self._flat: dict[str, Any] = {}
        self._made: dict[str, Any] = {}
        """The first tensor object over each storage."""
        self._objects: dict[str, Any] = {}
        """The values of the objects that have been made, by name."""
        self._dtypes: dict[str, Any] = {}
        self._ragged: dict[str, Any] = {}
        """The first tensor of offsets over each storage: only nested tensors with one object of
        offsets have one shape."""
        self._loading: _native.Loading | None = None
        """The blocks and tensors that `fill` uses."""

    def make_objects(self, survey: Survey) -> None:
        """Make the values of all objects ahead, and free their blocks.

        Raises:
            UnsupportedError, FormatError: any error of `value`.
        """
        for name, (leaf, path) in survey.objects.items():
            self._objects[name] = self._object(leaf, path)
            del self._blocks[name]

    def add(self, blocks: dict[str, Any], flat: dict[str, Any]) -> None:
        """Add newly read blocks, and tensors that have been loaded to a device."""
        self._blocks.update(blocks)
        self._flat.update(flat)

    def fill(
        self, skeleton: object, survey: Survey, wanted: Wanted, reports: list[str]
    ) -> dict[Any, Any]:
        """Load everything that a skeleton needs; return its value, made of its own containers.

        Raises:
            Exception: any error of `value` and of `_native.Checkpoint.load`.
        """
        rest = survey.rest
        if not (len(wanted.tensors) or rest):
            return self.value(skeleton)  # type: ignore[no-any-return]
        makes_torch = len(wanted.tensors) and not self._as_numpy
        exchange = _torch.maker() if makes_torch else None  # imports torch
        try:
            value, report = _native.fill(
                wanted.checkpoint,
                skeleton,
                wanted.tensors,
                rest,
                self,
                exchange,
                early=wanted.may_be_early,
            )
        except BaseException:
            # Drop it: its tensors have no memory, and printing a traceback's locals would read
            # them.
            if isinstance(skeleton, dict):
                skeleton.clear()
            raise
        finally:
            self._loading = None
        _log.debug("loaded %s", report)
        reports.append(report)
        return value  # type: ignore[no-any-return]

    # Methods that `_native.fill` calls, besides `value`.

    def begin(self, loading: _native.Loading) -> None:
        """Set the blocks and tensors to use from now on."""
        self._loading = loading

    def over(self, block: Any, dtype: str, shape: tuple[int, ...], nbytes: int, path: Path) -> Any:
        """Return the first tensor or array over a block."""
        stored = Stored(dtype, shape, nbytes)
        if self._as_numpy:
            return _numpy.array_of(block, stored, _numpy.dtype_of(dtype, describe(path)))
        flat = _torch.flat_over(block, stored, self._dtype(dtype, path))
        _torch.reshape(flat, stored)
        return flat

    def alias(self, made: Any) -> Any:
        """Return another tensor or array over the memory of an existing one."""
        return made[...] if self._as_numpy else _torch.alias_of(made)

    def value(self, node: object, path: Path = (), make: Make | None = None) -> Any:
        """Return the value of a skeleton, or of the part of a skeleton at a path.

        Args:
            node: the skeleton.
            path: its path.
            make: makes the leaves and boxes instead of `make`.

        Raises:
            UnsupportedError: the value needs torch or numpy, which is missing or too old; or only
                pickle can make it, which was not allowed.
            FormatError: an object that torch.save did not write, or an invalid key.
        """
        with self._contents.keys():
            return rebuild(node, path, make or self.make)

    def make(self, leaf: Leaf | Box, path: Path) -> Any:
        """Return the value of a leaf, or of a box whose items have been made; see `value`."""
        if isinstance(leaf, Box):
            return self._boxed(leaf, path)
        if leaf.tag == "$tensor":
            return self._tensor(leaf, path)
        key = describe(path)
        if leaf.tag in _TYPED:
            return _of_type(leaf, key)
        if self._as_numpy and leaf.tag in ("$size", "$dtype", "$device"):
            return _numpy.instead_of_torch(leaf.tag, leaf.body, key)
        match leaf.tag:
            case "$ndarray":
                stored = self._contents.stored(leaf, path)
                return _numpy.array_over(self._block(leaf), stored, leaf.dtype, key)
            case "$object":
                return self._object(leaf, path)
            case "$scalar":
                return _numpy.scalar_from(leaf.body, leaf.dtype, key)
            case "$counter":
                return collections.Counter(leaf.body)
            case "$size":
                return require("torch", key).Size(leaf.body)
            case "$dtype":
                return _torch.dtype_named(leaf.body, key)
            case "$device":
                return _torch.device_named(leaf.body, key)
            case "$value":
                return self._fixed(leaf, path)
            case "$pickle":
                import pickle

                return pickle.loads(base64.b64decode(leaf.body))
        raise AssertionError(leaf.tag)

    def _composite(self, box: Box, path: Path) -> Any:
        assert isinstance(box.items, dict)
        tensors, contents = box.items, self._contents
        as_parts = contents.as_parts or any(isinstance(t, DamagedTensor) for t in tensors.values())
        context: Any = None
        try:
            context = self.value(box.context, path)
        except UnsupportedError:
            if not as_parts:
                raise
        offsets = None if box.unmade is None else dict(box.unmade.steps()).get("offsets")
        if box.name == "jagged" and isinstance(offsets, Leaf):
            tensors = tensors | {
                "offsets": self._ragged.setdefault(offsets.body, tensors["offsets"])
            }
        parts = TensorParts(box.name, tensors, context)
        if as_parts:
            return parts
        try:
            return _composites.make(parts, describe(path))
        except ValueError as error:
            raise contents.wrong(path, f"is no {box.name.replace(':', '.')}: {error}") from None

    def _boxed(self, box: Box, path: Path) -> Any:
        if box.tag == COMPOSITE:
            return self._composite(box, path)
        if isinstance(box.items, dict):
            return _custom_types.with_fields(box, describe(path))
        try:
            check_hashes(box.items)
            return (set if box.tag == "$set" else frozenset)(box.items)
        except (TypeError, ValueError) as error:  # for example of a list in it
            raise self._contents.wrong(path, f"is no set: {error}") from error

    def _fixed(self, leaf: Leaf, path: Path) -> Any:
        name, args, key = leaf.dtype, leaf.body, describe(path)
        if self._as_numpy and _small_values.needs(name) == "torch":
            return args[0]
        try:
            return _small_values.make(name, args, key)
        except ValueError as error:
            raise self._contents.wrong(path, f"can't be made: {error}") from None

    def _object(self, leaf: Leaf, path: Path) -> Any:
        if leaf.body in self._objects:
            return self._objects[leaf.body]
        import pickle

        key = describe(path)
        self._contents.stored(leaf, path)
        block = bytes(self._blocks[leaf.body])
        if _packed_values.is_packed(block):
            return unpack(block, self._contents.path, key, as_numpy=self._as_numpy)
        torch = require("torch", key)
        blob = io.BytesIO(block)
        try:
            return torch.load(
                blob, map_location="cpu", weights_only=not self._contents.allow_pickle
            )
        except pickle.UnpicklingError as error:
            if self._contents.allow_pickle:
                raise self._contents.unreadable(path, error) from error
            raise UnsupportedError(
                f"{key} is an object that torch.load does not read with weights_only=True: if "
                "you trust who wrote the checkpoint, pass allow_pickle=True, which can run any "
                "code; or load the rest with prefix= or keys= of ringstow.load. torch said: "
                f"{error}"
            ) from error
        except (RuntimeError, ValueError, EOFError) as error:
            raise self._contents.unreadable(path, error) from error

    def _block(self, leaf: Leaf) -> Any:
        loading = self._loading
        return self._blocks[leaf.body] if loading is None else loading.block(leaf.body)

    def _tensor(self, leaf: Leaf, path: Path) -> Any:
        name = leaf.body
        if self._loading is not None:
            return self._loading.tensor(name, path)
        made = self._made.get(name)
        if made is not None:
            return self.alias(made)
        stored = self._contents.stored(leaf, path)
        made = self._flat.get(name)
        if made is None:
            made = self.over(self._blocks[name], *stored, path)
        else:
            _torch.reshape(made, stored)
        self._made[name] = made
        return made

    def _dtype(self, code: str, path: Path) -> Any:
        dtype = self._dtypes.get(code)
        if dtype is None:
            dtype = self._dtypes[code] = _torch.dtype_of(code, describe(path))
        return dtype


def unpack(data: bytes, path: str, key: str, *, as_numpy: bool = False) -> Any:
    """Return the value of packed bytes.

    Args:
        data: the bytes.
        path: the checkpoint's directory, for the messages.
        key: the value's name, for the messages.
        as_numpy: as for a `Builder`.

    Raises:
        FormatError: `_packed_values.pack` did not make the bytes.
        UnsupportedError: the value needs a type, torch or numpy that is missing.
    """
    try:
        tree, tensors, blocks = _packed_values.split(data)
        root = parse(tree, path)
        if len(root) != 1:
            raise ValueError("it holds more than one value")
    except (ValueError, RecursionError, FormatError) as error:
        message = f"{path}: the object {key!r} cannot be read: {error}"
        raise FormatError(message, path=path) from None
    rows = {row[0]: row for row in tensors}
    contents = Contents(path, rows.get)
    (node,) = root.values()
    Survey(contents).add(node, (key,))
    return Builder(contents, dict(blocks), as_numpy=as_numpy).value(node, (key,))
