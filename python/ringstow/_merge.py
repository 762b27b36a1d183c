"""Load into an existing state dict: compare everything, then read everything, then change it."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ringstow import _boxes, _native, _ties
from ringstow._boxes import Boxed
from ringstow._collector import collector_paused
from ringstow._errors import InvalidStateError
from ringstow._salvage import find, holds_damage, marked
from ringstow._ties import Fill
from ringstow.foreign import Foreign
from ringstow.tensors import _cuda, _device_array, _numpy, _shards, _torch
from ringstow.tensors._memory import (
    Stored,
    Target,
    dense_strides,
    in_elements,
    moved,
    place_at,
)
from ringstow.tree import _program
from ringstow.tree._build import Builder, Contents, Survey
from ringstow.tree._damaged import DamagedTensor
from ringstow.tree._fit import fitted
from ringstow.tree._remedies import type_name
from ringstow.tree._select import by_slim, check_match
from ringstow.tree._skeleton import parse
from ringstow.tree._walk import (
    METADATA,
    Box,
    Leaf,
    Path,
    describe,
    flat_name,
    metadata_of,
    rebuild_key,
)

if TYPE_CHECKING:
    import torch

    from ringstow._report import LoadReport

_SEQUENCES = (list, tuple, collections.deque)
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
# Builds a value from the bytes that were read.
Make = Callable[[Builder], Any]
NamedBox = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A tensor's name, and offsets and sizes in it."""
Fetch = Callable[[list[str], list[NamedBox]], None]


class Merge:
    """Compares a state dict with a skeleton, and collects the changes and the mismatches."""

    def __init__(
        self,
        contents: Contents,
        checkpoint: _native.Checkpoint | Foreign,
        *,
        cast: bool,
        damaged: Mapping[str, DamagedTensor],
    ) -> None:
        self.contents = contents
        self.damaged = damaged
        """What is compared like everything else, and stays as it is."""
        self.cast = cast
        self.survey = Survey(contents)
        """The tensors that new values need."""
        self.fills: list[Fill] = []
        self.boxes: list[Boxed] = []
        """What is filled with only a part of a stored tensor."""
        self.assigns: list[tuple[Callable[[Any], None], Make]] = []
        """Pairs of a function that stores a new value and one that builds it."""
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.mismatched: list[str] = []
        self.needs_cast = False
        """Whether ``cast=True`` would make some of them fit."""
        self._usual = _torch.usual()
        self._address_of = _cuda.finder()
        self.matches: _native.Matches | None = None
        """Usual tensors that fit, which are not in ``fills``."""
        exchange = self._usual.exchange
        if exchange is not None and not isinstance(checkpoint, Foreign) and not damaged:
            self.matches = _native.Matches(checkpoint, exchange, self._address_of)

    def check(self, path: str, *, strict: bool, dropped: list[str]) -> None:
        """Raise a KeyMismatchError that lists all mismatches."""
        advice = by_slim(self.missing, dropped)
        if self.needs_cast and not self.cast:
            advice.append("cast=True converts floating-point elements to the dtype that is here")
        names = (self.missing, self.unexpected) if strict else ([], [])
        check_match(path, *names, self.mismatched, *advice)

    def merge(self, target: Any, node: Any, path: Path) -> Make | None:
        """Plan the changes that make the target at a path equal to the skeleton's node.

        Returns:
            A function that builds the new value; None if the target stays the same object.
        """
        is_opaque = isinstance(node, Leaf) and node.tag in ("$pickle", "$object")
        is_array = isinstance(node, Leaf) and node.tag in ("$tensor", "$ndarray")
        if type(target) not in self._usual.kinds and _shards.is_sharded(target):
            self._sharded(target, node, path)
        elif type(target) in self._usual.kinds or _torch.is_tensor(target):
            self._fill(target, node, path, self._tensor, ("$tensor",), "a tensor")
        elif _numpy.is_array(target) and _numpy.code_of_array(target):
            if isinstance(node, Leaf) and node.tag == "$object":
                self._fill_by_object(target, node, path)
            else:
                tags = ("$ndarray", "$tensor")
                self._fill(target, node, path, self._array, tags, "a numpy array")
        elif (interface := _device_array.interface_of(target)) is not None:
            target_of = functools.partial(self._device_array, interface)
            self._fill(target, node, path, target_of, ("$ndarray",), "an array on a GPU")
        elif type(target) is collections.Counter and isinstance(node, dict):
            self.survey.add(node, path)
            return lambda builder: collections.Counter(builder.value(node, path))
        elif isinstance(target, dict) and not is_opaque and type(target) is not collections.Counter:
            self._dict(target, node, path)
        elif type(target) in _SEQUENCES and not is_opaque and _holds_tensors(target):
            return self._sequence(target, node, path)
        elif _program.has_fields(target) and not is_opaque and _holds_tensors(target):
            return self._fields(target, node, path)
        elif is_array and not isinstance(target, DamagedTensor | None):
            self._differ(path, f"a value ({type_name(target)})", _kind(node))
        elif not self._is_damaged(node):
            self.survey.add(node, path)
            return lambda builder: builder.value(node, path)
        return None

    def _is_damaged(self, node: Any) -> bool:
        return bool(self.damaged) and holds_damage(marked(node, self.damaged))

    def _tensor(self, tensor: torch.Tensor, path: Path) -> Target:
        if self._usual.exchange is not None:
            found = self._usual.exchange.find(tensor, self._address_of)
            if found is not None:
                return Target(tensor, *found, strides=None)
        return _torch.target_of(tensor, describe(path), self._address_of)

    def _array(self, array: Any, path: Path) -> Target:
        return _numpy.target_of(array)

    def _device_array(self, interface: Mapping[str, Any], array: Any, path: Path) -> Target:
        return _device_array.target_of(array, interface, describe(path))

    def _fill(
        self,
        value: Any,
        node: Any,
        path: Path,
        target_of: Callable[[Any, Path], Target],
        tags: tuple[str, ...],
        kind: str,
    ) -> None:
        if not (isinstance(node, Leaf) and node.tag in tags):
            return self._differ(path, kind, _kind(node))
        target = target_of(value, path)
        if target.problem:
            return self._differ(path, f"{target.problem}, which can't be filled,", _kind(node))
        stored = self.contents.stored(node, path)
        cast = target.value is not None and _can_cast(stored, target.dtype, target.shape)
        if not self._fits(stored, (target.dtype, target.shape), path, cast=cast):
            return None
        if stored.nbytes and node.body not in self.damaged:
            self.fills.append(Fill(target, node, stored, cast, path))
        return None

    def _fill_by_object(self, array: Any, node: Leaf, path: Path) -> None:
        """Plan to fill an array from an object, whose bytes alone say whether it fits."""
        if self._is_damaged(node):
            return
        self.survey.add(node, path)

        def make(builder: Builder) -> Any:
            value, target = builder.value(node, path), self._array(array, path)
            code = _numpy.code_of_array(value) if _numpy.is_array(value) else None
            if target.problem:
                here = f"{target.problem}, which can't be filled,"
                self._differ(path, here, "a numpy array")
            elif code is None:
                self._differ(path, "a numpy array", f"a {type_name(value)}")
            else:
                stored = Stored(code, value.shape, value.nbytes)
                cast = _can_cast(stored, target.dtype, target.shape)
                self._fits(stored, (target.dtype, target.shape), path, cast=cast)
            return value

        self.assigns.append((functools.partial(_numpy.copy_into, array), make))

    def _fits(
        self, stored: Stored, here: tuple[str, tuple[int, ...]], path: Path, *, cast: bool
    ) -> bool:
        self.needs_cast = self.needs_cast or cast
        there = (stored.dtype, stored.shape)
        if here == there or (cast and self.cast):
            return True
        self._differ(path, *(f"{dtype} {list(shape)}" for dtype, shape in (here, there)))
        return False

    def _sharded(self, tensor: Any, node: Any, path: Path) -> None:
        if not (isinstance(node, Leaf) and node.tag == "$tensor"):
            return self._differ(path, "a sharded tensor", _kind(node))
        stored = self.contents.stored(node, path)
        shape, pieces, _ = _shards.sharded(tensor, functools.partial(describe, path))
        code = _torch.code_of(tensor, describe(path))
        here = (code, in_elements(shape, code))
        if not self._fits(stored, here, path, cast=_can_cast(stored, *here)):
            return None
        for local, offsets, _ in pieces:
            at = in_elements(offsets, code)
            if node.body not in self.damaged:
                self.boxes.append(Boxed(local.detach(), at, node, stored, path))
        return None

    def _dict(self, target: dict[Any, Any], node: Any, path: Path) -> None:
        if not isinstance(node, dict):
            return self._differ(path, f"a {type_name(target)}", _kind(node))
        saved: dict[Any, Any] = {}
        with self.contents.keys():
            for key, child in node.items():
                saved[key if type(key) is str else self._key(key, path, saved)] = child
        self._assign(target.__setitem__, self._items(target, saved, path))
        metadata = metadata_of(node)
        is_held = isinstance(target, collections.OrderedDict)
        if metadata is not None and is_held and not self._is_damaged(metadata):
            at = (*path, METADATA)
            self.survey.add(metadata, at)
            assign = functools.partial(vars(target).__setitem__, str(METADATA))
            self.assigns.append((assign, lambda b: b.value(metadata, at)))

    def _sequence(self, target: Any, node: Any, path: Path) -> Make | None:
        if type(node) is not type(target):
            self._differ(path, f"a {type_name(target)}", _kind(node))
            return None
        makes = self._items(dict(enumerate(target)), dict(enumerate(node)), path)
        if not isinstance(target, tuple):
            self._assign(target.__setitem__, makes)
        elif makes:
            return lambda b: tuple(makes[n](b) if n in makes else v for n, v in enumerate(target))
        return None

    def _fields(self, target: Any, node: Any, path: Path) -> Make | None:
        here = _program.fields_of(target)
        assert here is not None
        if not isinstance(node, Box) or (node.tag, node.name) != (here.tag, here.name):
            self._differ(path, f"a {type_name(target)}", _kind(node))
            return None
        held = dict(here.steps())
        makes = self._items(held, dict(node.steps()), path)
        if not _program.is_frozen(target):
            self._assign(functools.partial(_program.set_field, target), makes)
        elif makes:
            return lambda b: _program.with_fields(
                Box(here.tag, here.name, held | {name: make(b) for name, make in makes.items()}),
                describe(path),
            )
        return None

    def _items(self, here: dict[Any, Any], saved: dict[Any, Any], path: Path) -> dict[Any, Make]:
        """Plan the changes of a container's items; return what builds those that are replaced."""
        makes: dict[Any, Make] = {}
        steps: Iterable[Any] = saved
        if self.matches is not None and type(here) in _DICTS:
            steps, displaced = self.matches.take(here, saved, path)
            self._fill_displaced(displaced)
        for step in steps:
            node = saved[step]
            if step not in here:
                self.unexpected += _names(node, (*path, step))
            elif (make := self.merge(here[step], node, (*path, step))) is not None:
                makes[step] = make
        if not here.keys() <= saved.keys():
            for step, value in here.items():
                if step not in saved:
                    self.missing += _names(value, (*path, step))
        return makes

    def displace(self) -> None:
        """Take from ``matches`` what shares memory or a stored tensor with one of the fills."""
        if self.matches is not None:
            others = [(fill.leaf.body, fill.target.address) for fill in self.fills]
            self._fill_displaced(self.matches.displace(others))

    def _fill_displaced(self, displaced: Iterable[tuple[Any, Leaf, Path]]) -> None:
        for tensor, leaf, path in displaced:
            self._fill(tensor, leaf, path, self._tensor, ("$tensor",), "a tensor")

    def _assign(self, store: Callable[[Any, Any], None], makes: dict[Any, Make]) -> None:
        self.assigns += [(functools.partial(store, step), make) for step, make in makes.items()]

    def _key(self, key: Any, path: Path, others: dict[Any, Any]) -> Any:
        self.survey.add(key, path)
        return rebuild_key(key, path, Builder(self.contents, {}).make, others)

    def _differ(self, path: Path, here: str, there: str) -> None:
        self.mismatched.append(f"{flat_name(path)} is {here} here and {there} in the checkpoint")


def skeleton_of(checkpoint: _native.Checkpoint | Foreign, path: str) -> dict[Any, Any]:
    """Return the skeleton of a checkpoint: of another program's, too.

    Raises:
        Exception: as `_skeleton.parse` and `Foreign.tree_of`.
    """
    if isinstance(checkpoint, Foreign):
        return checkpoint.tree
    if checkpoint.kind == "ringstow":
        return parse(checkpoint.state, path)
    return {name: Leaf("$tensor", name) for name, *_ in checkpoint.tensors}


@collector_paused()
def load_into(
    state: object,
    path: str,
    checkpoint: _native.Checkpoint | Foreign,
    *,
    strict: bool,
    skips: bool,
    allow_pickle: bool,
    cast: bool,
    ready: Callable[[], None] = lambda: None,
    fetch: Fetch | None = None,
    kind: type[Merge] = Merge,
) -> LoadReport:
    """Fill a state dict from the checkpoint at a path, if everything fits.

    Calls ``fetch``, before the first byte is read, with the names of the tensors that are read
    whole, and with the boxes of others.
    Calls ``ready`` once it does, before anything changes; what that raises ends the load.

    Raises:
        KeyMismatchError: lists all mismatches.
        IncompleteCheckpointError: it is a rank checkpoint, and holds only some of a tensor.
        InvalidStateError: the state dict is not a dict.
        FormatError: ringstow did not write the checkpoint's tree.
    """
    if not isinstance(state, dict):
        raise InvalidStateError(f"a state dict must be a dict, not {type_name(state)}")
    from ringstow._report import LoadReport

    skeleton = skeleton_of(checkpoint, path)
    if isinstance(checkpoint, Foreign) and checkpoint.has_text_keys:
        skeleton = fitted(skeleton, state)
    contents = Contents(path, checkpoint.tensor, allow_pickle=allow_pickle)
    damaged = find(checkpoint, skeleton) if skips else {}
    merge = kind(contents, checkpoint, cast=cast, damaged=damaged)
    with _torch.without_autograd():
        merge.merge(state, skeleton, ())
        merge.displace()
    if fetch is not None:  # before anything is read, and whether it all fits or not
        whole = [*merge.survey.names, *(fill.leaf.body for fill in merge.fills)]
        whole += [] if merge.matches is None else merge.matches.names()
        fetch(whole, [(box.leaf.body, box.offsets, box.shape) for box in merge.boxes])
    merge.mismatched += _ties.differing(checkpoint, merge.fills)
    merge.check(path, strict=strict, dropped=checkpoint.dropped)
    ways = _split(merge.fills)
    for fill in ways.copied:
        merge.survey.add(fill.leaf)
    targets = [(fill.leaf.body, fill.target.address, fill.stored.nbytes) for fill in ways.direct]

    # These are read after the first change, so check their tensors now.
    late = [fill.leaf.body for fill in ways.strided()] + [box.leaf.body for box in merge.boxes]
    checkpoint.check_whole(late)
    blocks, read = checkpoint.load(merge.survey.names)
    named = dict(zip(merge.survey.names, blocks, strict=True))
    builder = Builder(contents, named)
    values = [(assign, make(builder)) for assign, make in merge.assigns]
    arrays = Builder(contents, named, as_numpy=True)
    sources = [
        (arrays if _numpy.is_array(fill.target.value) else builder).value(fill.leaf)
        for fill in ways.copied
    ]

    Merge.check(merge, path, strict=False, dropped=[])  # what objects turned out to be
    ready()
    # From here on the state dict changes.
    matches = merge.matches
    report = LoadReport.from_json((matches or checkpoint).load_into(targets))
    boxed = _boxes.fill(checkpoint, merge.boxes)
    if boxed is not None:
        report = report.followed_by(boxed)
    for fills in filter(None, ways.regions):
        regions = checkpoint.read(_slices(fills, checkpoint))
        report = report.followed_by(LoadReport.from_json(regions))
    filled = [fill.target.value for fill in ways.direct + ways.strided()]
    filled += [] if matches is None else matches.tensors()
    _torch.mark_changed(filter(_torch.is_tensor, filled))
    for fill, source in zip(ways.copied, sources, strict=True):
        module: Any = _torch if _torch.is_tensor(fill.target.value) else _numpy
        module.copy_into(fill.target.value, source)
    for assign, value in values:
        assign(value)
    report = report.followed_by(LoadReport.from_json(read))
    missing, unexpected = tuple(merge.missing), tuple(merge.unexpected)
    left = tuple(damaged.values())
    return dataclasses.replace(report, missing=missing, unexpected=unexpected, damaged=left)


class _Ways(NamedTuple):
    """How each target is filled."""

    direct: list[Fill]
    """Dense memory: read straight into it."""
    regions: list[list[Fill]]
    """Strided memory on GPUs: read region by region, one list after the other."""
    copied: list[Fill]
    """Everything else: read into other memory, then copied."""

    def strided(self) -> list[Fill]:
        """Return all of `regions`."""
        return [fill for fills in self.regions for fill in fills]


def _split(fills: list[Fill]) -> _Ways:
    """Choose a way for each fill.

    Targets that share one memory, such as tied weights, are filled once. Each stored tensor is read
    into one address, and each address is read into once; everything else is copied. Another
    library's array on a GPU can't be copied to: it is always read into.
    """
    ways = _Ways([], [[]], [])
    seen: set[tuple[object, ...]] = set()
    names: set[str] = set()
    places: set[tuple[int, int | None]] = set()
    for fill in fills:
        name, target = fill.leaf.body, fill.target
        place = place_at(target.address)
        is_free = name not in names and place not in places and not fill.cast
        if (name, place, target.strides) in seen:
            continue
        seen.add((name, place, target.strides))
        if is_free and target.strides is None:
            ways.direct.append(fill)
        elif is_free and target.takes_regions:
            ways.regions[0].append(fill)
        elif target.value is None:
            ways.regions.append([fill])
        else:
            ways.copied.append(fill)
            continue
        names.add(name)
        places.add(place)
    return ways


def _slices(fills: list[Fill], checkpoint: _native.Checkpoint | Foreign) -> list[Any]:
    """Return the stored chunks to read, each with the strided region of its target."""
    slices = []
    for fill in fills:
        name, target = fill.leaf.body, fill.target
        strides = target.strides
        if strides is None:
            strides = dense_strides(target.shape, fill.stored.nbytes // math.prod(target.shape))
        for number, (offsets, sizes) in enumerate(checkpoint.chunks(name)):
            ahead = sum(n * step for n, step in zip(offsets, strides, strict=True))
            address = moved(target.address, ahead)
            slices.append((name, number, (0,) * len(sizes), sizes, address, strides))
    return slices


def _holds_tensors(value: Any) -> bool:
    """Return whether a value, or a part of a skeleton, holds a tensor or array at any depth."""
    if isinstance(value, Leaf):
        return value.tag in ("$tensor", "$ndarray")
    items = _program.parts(value)
    if items is not None:
        return any(_holds_tensors(item) for _, item in items)
    return (
        _torch.is_tensor(value)
        or _numpy.is_array(value)
        or _device_array.interface_of(value) is not None
    )


# Dtypes that `cast` converts between. Not integers: they could overflow or lose a fraction.
_FAMILIES = (
    {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"},
    {"C128", "C64", "C32"},
)


def _can_cast(stored: Stored, dtype: str, shape: tuple[int, ...]) -> bool:
    """Return whether ``cast=True`` makes a stored tensor one of that dtype and shape."""
    is_family = any({stored.dtype, dtype} <= family for family in _FAMILIES)
    return stored.dtype != dtype and stored.shape == shape and is_family


def _names(value: Any, path: Path) -> Iterator[str]:
    """Yield the flat names in a value; a list without tensors has one name."""
    if isinstance(value, dict):
        pairs: Any = value.items()
    elif type(value) in _SEQUENCES and _holds_tensors(value):
        pairs = enumerate(value)
    else:
        yield flat_name(path)
        return
    for key, item in pairs:
        yield from _names(item, (*path, key))


def _kind(node: Any) -> str:
    if isinstance(node, Box):
        return f"a {node.name.replace(':', '.') or node.tag[1:]}"
    if not isinstance(node, Leaf):
        return f"a {type_name(node)}"
    kinds = {"$tensor": "a tensor", "$ndarray": "a numpy array", "$pickle": "a pickled value"}
    kinds["$object"] = "an object"
    return kinds.get(node.tag, f"a {node.tag[1:]}")
