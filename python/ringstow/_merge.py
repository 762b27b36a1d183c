"""Load into an existing state dict: compare everything, then read everything, then change it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ringstow import _boxes, _native, _ties
from ringstow._boxes import Boxed
from ringstow._collector import collector_paused
from ringstow._errors import Error, InvalidStateError, KeyMismatchError
from ringstow._salvage import find, holds_damage, marked
from ringstow._stateful import _fill
from ringstow._stateful._kinds import is_stateful
from ringstow._stateful._modules import ModuleState
from ringstow._stateful._optimizers import OptimizerState, is_optimizer_state
from ringstow._stateful._parts import OtherState, Part, Parts, are_alike, of_rank, rank_key
from ringstow._stateful._per_rank import PerRank
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
from ringstow.tree import _cycles, _program, _skeleton
from ringstow.tree._alike import Gap
from ringstow.tree._build import Builder, Contents, Survey
from ringstow.tree._damaged import DamagedTensor
from ringstow.tree._encode import encode
from ringstow.tree._fit import fitted
from ringstow.tree._mismatch import LOAD_INTO, Call, Filled, Mismatch
from ringstow.tree._remedies import Refusals, Refused, kind_of, remedy, type_name
from ringstow.tree._rename import Fitting, Rename, below
from ringstow.tree._select import by_keys, by_prefix
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

_log = logging.getLogger("ringstow")
_SEQUENCES = (list, tuple, collections.deque)
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_PLAIN = {type(None), bool, int, float, str, *_DICTS, *_SEQUENCES, collections.Counter}
# Builds a value from the bytes that were read.
Make = Callable[[Builder], Any]
NamedBox = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A tensor's name, and offsets and sizes in it."""
Fetch = Callable[[list[str], list[NamedBox]], None]


class Merge:
    """Compares a state dict with a skeleton, and collects the changes and the mismatches."""

    rank = 0
    """Whose of the ranks' values are loaded."""

    def __init__(
        self,
        contents: Contents,
        checkpoint: _native.Checkpoint | Foreign,
        *,
        cast: bool,
        damaged: Mapping[str, DamagedTensor],
        state: dict[Any, Any],
        parts: Parts,
    ) -> None:
        self.contents = contents
        self._parts = parts
        self._layouts = _fill.Layouts(state, parts)
        self.loads: list[tuple[int, Path, Callable[[], None]]] = []
        """What hands the objects of the state what was read, in the order of the numbers."""
        self.kept: list[str] = []
        """Objects of which the checkpoint has states of ranks, and none of this one."""
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
        self.missing: list[Gap] = []
        self.unexpected: list[Gap] = []
        self.mismatched: list[str] = []
        self.differs: set[str] = set()
        """In what these do: see `Mismatch.kinds`."""
        self._usual = _torch.usual()
        self._address_of = _cuda.finder()
        self.matches: _native.Matches | None = None
        """Usual tensors that fit, which are not in ``fills``."""
        exchange = self._usual.exchange
        if exchange is not None and not isinstance(checkpoint, Foreign) and not damaged:
            self.matches = _native.Matches(checkpoint, exchange, self._address_of)

    def check(self, found: Mismatch, *, strict: bool) -> None:
        """Raise a KeyMismatchError that lists all mismatches, or says that nothing would be filled.

        Warns if little would.
        """
        if found.different or (strict and (found.missing or found.unexpected)):
            raise found.error(strict=strict)
        if found.missing:
            judge(found, [found.filled()], 0)

    def found(
        self, path: str, state: object, call: Call, dropped: list[str], below: str
    ) -> Mismatch:
        """Return what differs."""
        return Mismatch(
            path,
            state,
            self.missing,
            self.unexpected,
            self.mismatched,
            self.differs,
            call,
            lambda: _leaves(state, (), self._parts),
            self.kind_of,
            dropped,
            below,
        )

    def renamed(self, state: dict[Any, Any], skeleton: dict[Any, Any], rename: Rename) -> Any:
        """Return a skeleton with the names of the state dict; note what has no place in it."""
        fitting = Fitting(rename, self._key, self.contents.path)
        with self.contents.keys():
            fitted = fitting.fit(state, skeleton)
        self.unexpected += (gap for at, node in fitting.left for gap in _leaves(node, at))
        return fitted

    def kind_of(self, value: Any) -> object:
        """Return the dtype and shape of a tensor here or in the checkpoint, else the type."""
        if isinstance(value, Leaf) and value.tag in ("$tensor", "$ndarray"):
            stored = self.contents.stored(value, ())
            return stored.dtype, tuple(stored.shape)
        if _torch.is_tensor(value):
            code = _torch.CODES.get(_torch.dtype_name(value.dtype))
            return code, in_elements(tuple(value.shape), code or "")
        if _numpy.is_array(value):
            return _numpy.code_of_array(value), tuple(value.shape)
        return type(value)

    def merge(self, target: Any, node: Any, path: Path) -> Make | None:
        """Plan the changes that make the target at a path equal to the skeleton's node.

        Returns:
            A function that builds the new value; None if the target stays the same object.
        """
        part = self._parts.of(target)
        if part is not None and not isinstance(node, Box):
            self._object(part, node, path)
            return None
        if type(target) is PerRank:
            self._per_rank(target, node, path)
            return None
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
            if _has_a_place(target):
                self._differ(path, f"a value ({type_name(target)})", _kind(node))
            else:
                self._refuse(target, node, path)
        elif not is_opaque and not _has_a_place(target):
            self._refuse(target, node, path)
        elif not self.is_damaged(node):
            self.survey.add(node, path)
            return lambda builder: builder.value(node, path)
        return None

    def replace(self, holder: dict[Any, Any], key: Any, node: Any, path: Path) -> None:
        """Plan to put the value of a node into a dict, whatever is there now."""
        at = (*path, key)
        if not self.is_damaged(node):
            self.survey.add(node, at)
            self._assign(holder.__setitem__, {key: lambda builder: builder.value(node, at)})

    def _object(self, part: Part, node: Any, path: Path) -> None:
        """Plan what an object's state becomes, and hand it to the object afterwards."""
        if isinstance(part, ModuleState):
            self.merge(part.state, part.fitting(node), path)
            self.loads.append((0, path, part.load))
        elif isinstance(part, OptimizerState):
            state = part.state
            if part.is_known and is_optimizer_state(node):
                like = _fill.like_of(part)
                state = _fill.optimizer(self, state, node, path, like, new=True)
            else:
                self.merge(state, node, path)
            self.loads.append((1, path, functools.partial(part.load, state)))
        else:
            self._other(part, node, path)

    def _other(self, part: OtherState, node: Any, path: Path) -> None:
        """Plan what the state of an object becomes that is neither a module nor an optimizer."""
        is_apart, own = of_rank(node, self.rank)
        load = (2, path, part.load)
        if _holds(part.state, _shards.is_sharded):
            self.merge(part.state, own, path)
            self.loads.append(load)
            return
        wanted = node if own is None and is_apart else own
        if self.is_damaged(wanted):
            return

        def take(value: Any) -> None:
            if wanted is not node or not is_apart:
                part.state = value
            elif part.is_per_rank or not are_alike([*value.values()]):
                self.kept.append(f"{flat_name(path)} (saved by {len(value)} ranks)")
                return
            else:
                part.state = value[rank_key(0)]
            self.loads.append(load)

        self.survey.add(wanted, path)
        self.assigns.append((take, lambda builder: builder.value(wanted, path)))

    def _per_rank(self, target: PerRank, node: Any, path: Path) -> None:
        """Fill it with the value of the rank of the same number."""
        key = str(self.rank)
        if not isinstance(node, dict) or key not in node:
            self.differs.add("ranks")
            ranks = len(node) if isinstance(node, dict) else 0
            self.mismatched.append(
                f"{flat_name(path)} is a PerRank here, and the checkpoint has no value of rank "
                f"{key}: it has those of {ranks} ranks"
            )
            return
        make = self.merge(target.value, node[key], (*path, key))
        if make is not None:
            self.assigns.append((functools.partial(setattr, target, "value"), make))

    def is_damaged(self, node: Any) -> bool:
        """Return whether a part of a skeleton holds a damaged tensor."""
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
        if self.is_damaged(node):
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
        there = (stored.dtype, stored.shape)
        if here == there or (cast and self.cast):
            return True
        kind = "size" if here[1] != there[1] else "cast" if cast else "dtype"
        self._differ(path, *(f"{dtype} {list(shape)}" for dtype, shape in (here, there)), kind=kind)
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
        if _fill.differs(target, node):
            _fill.optimizer(self, target, node, path, self._layouts.of(target), new=False)
            return None
        saved: dict[Any, Any] = {}
        with self.contents.keys():
            for key, child in node.items():
                saved[key if type(key) is str else self._key(key, path, saved)] = child
        self._assign(target.__setitem__, self._items(target, saved, path))
        metadata = metadata_of(node)
        is_held = isinstance(target, collections.OrderedDict)
        if metadata is not None and is_held and not self.is_damaged(metadata):
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
        try:
            here = _program.fields_of(target)
        except Refused as refused:
            self._refuse(target, node, path, refused.reason)
            return None
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
                self.unexpected += _leaves(node, (*path, step))
            elif (make := self.merge(here[step], node, (*path, step))) is not None:
                makes[step] = make
        if not here.keys() <= saved.keys():
            for step, value in here.items():
                if step not in saved:
                    self.missing += _leaves(value, (*path, step), self._parts)
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

    def _key(self, key: Any, path: Path, others: Container[Any] = ()) -> Any:
        self.survey.add(key, path)
        return rebuild_key(key, path, Builder(self.contents, {}).make, others)

    def _differ(self, path: Path, here: str, there: str, *, kind: str = "kind") -> None:
        self.differs.add(kind)
        self.mismatched.append(f"{flat_name(path)} is {here} here and {there} in the checkpoint")

    def hand_over(self, path: str) -> None:
        """Hand the objects of the state what was read: models first, then optimizers.

        Raises:
            Exception: what an object's ``load_state_dict`` raises, with the object's key as a note.
        """
        for _, at, load in sorted(self.loads, key=lambda one: one[0]):
            try:
                load()
            except Exception as error:
                error.add_note(f"raised by load_state_dict() of {describe(at)}")
                raise
        if self.kept:
            _log.warning(
                "%s has states of other ranks, and they differ, so rank %d keeps its own: %s",
                path,
                self.rank,
                ", ".join(self.kept),
            )

    def _refuse(self, target: Any, node: Any, path: Path, reason: str = "") -> None:
        """Note an object that the checkpoint has a value for, and a load cannot fill."""
        self.differs.add("object")
        self.mismatched.append(
            f"{flat_name(path)} is {kind_of(target)} here, {reason or 'which a load cannot fill'}, "
            f"and {_kind(node)} in the checkpoint: put {remedy(target)} in its place, where x is "
            "the object, and set x from it after the load"
        )


def judge(found: Mismatch, filled: list[Filled], rank: int) -> None:
    """Refuse a load without ``strict`` that fills nothing on any rank; warn if it fills little.

    Raises:
        KeyMismatchError: nothing would be filled.
    """
    if any(one.of_names for one in filled) and not any(one.names for one in filled):
        raise found.error(strict=False)
    little = [number for number, one in enumerate(filled) if one.is_little()]
    if little[:1] == [rank]:
        _log.warning("%s", found.warning(filled[rank]))


def skeleton_of(checkpoint: _native.Checkpoint | Foreign, path: str) -> dict[Any, Any]:
    """Return the skeleton of a checkpoint: of another program's, too.

    Raises:
        Exception: as `_skeleton.parse` and `Foreign.tree_of`.
    """
    if isinstance(checkpoint, Foreign):
        return checkpoint.tree
    if checkpoint.kind == "ringstow":
        return _skeleton.parse(checkpoint.state, path)
    return {name: Leaf("$tensor", name) for name, *_ in checkpoint.tensors}


def part_of(
    checkpoint: _native.Checkpoint | Foreign,
    path: str,
    prefix: str | None,
    names: list[str] | None = None,
) -> dict[Any, Any]:
    """Return the skeleton of the leaves below a prefix, or of those with these names.

    Parses only names near the selected ones. If one is missing, it parses all names, so that the
    error can suggest similar ones.

    Raises:
        KeyMismatchError: nothing is there.
    """

    def select(skeleton: dict[Any, Any]) -> dict[Any, Any]:
        if names is None:
            return by_prefix(skeleton, prefix or "", path, checkpoint.dropped)
        return by_keys(skeleton, names, path, checkpoint.dropped)

    if isinstance(checkpoint, Foreign):
        return select(checkpoint.tree_of(prefix, names))
    if checkpoint.kind != "ringstow":
        return select(skeleton_of(checkpoint, path))
    part = _skeleton.parse(checkpoint.part_of_state(prefix, names), path)
    if part:
        with contextlib.suppress(KeyMismatchError):
            return select(part)
    return select(_skeleton.parse(checkpoint.state, path))


class Names(NamedTuple):
    """Which part of a checkpoint is loaded, and how its names become those of the state dict."""

    prefix: str | None = None
    rename: Mapping[str, str] | None = None

    def check(self) -> None:
        """Raise TypeError or ValueError if these are not such arguments of a load."""
        if not isinstance(self.prefix, str | None):
            raise TypeError(f"prefix is one name, not {self.prefix!r}")
        if self.rename is not None:
            Rename(self.rename)

    def shown(self) -> list[str]:
        """Return those that are given, as the call has them."""
        return [f"{name}={one!r}" for name, one in self._asdict().items() if one is not None]

    def skeleton(self, checkpoint: _native.Checkpoint | Foreign, path: str) -> dict[Any, Any]:
        """Return the skeleton of the part.

        Raises:
            KeyMismatchError: there is no such part, or it is one value.
        """
        if not self.prefix:
            return skeleton_of(checkpoint, path)
        part: dict[Any, Any] | None = below(part_of(checkpoint, path, self.prefix), self.prefix)
        if part is None:
            raise KeyMismatchError(
                f"{path} has one value at {self.prefix!r}, and prefix= names a part: "
                f"ringstow.load(path, keys=[{self.prefix!r}]) loads it",
                path=path,
                missing=[self.prefix],
            )
        return part


_ALL = Names()


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
    parts: Parts | None = None,
    names: Names = _ALL,
    call: Call = LOAD_INTO,
) -> LoadReport:
    """Fill a state dict from the checkpoint at a path, if everything fits.

    Calls ``fetch``, before the first byte is read, with the names of the tensors that are read
    whole, and with the boxes of others.
    Calls ``ready`` once it does, before anything changes; what that raises ends the load.
    ``parts`` are the objects of the state, if the caller has taken their states.

    Raises:
        KeyMismatchError: lists all mismatches.
        IncompleteCheckpointError: it is a rank checkpoint, and holds only some of a tensor.
        InvalidStateError: the state dict is not a dict.
        FormatError: ringstow did not write the checkpoint's tree.
    """
    if not isinstance(state, dict):
        raise InvalidStateError(f"a state dict must be a dict, not {type_name(state)}")
    from ringstow._report import LoadReport

    skeleton = names.skeleton(checkpoint, path)
    parts = Parts(state) if parts is None else parts
    if isinstance(checkpoint, Foreign) and checkpoint.has_text_keys:
        skeleton = fitted(skeleton, state, parts.state_of)
    contents = Contents(path, checkpoint.tensor, allow_pickle=allow_pickle)
    damaged = find(checkpoint, skeleton) if skips else {}
    merge = kind(contents, checkpoint, cast=cast, damaged=damaged, state=state, parts=parts)
    if names.rename is not None:
        skeleton = merge.renamed(state, skeleton, Rename(names.rename))
    with _torch.without_autograd():
        merge.merge(state, skeleton, ())
        merge.displace()
    if fetch is not None:  # before anything is read, and whether it all fits or not
        whole = [*merge.survey.names, *(fill.leaf.body for fill in merge.fills)]
        whole += [] if merge.matches is None else merge.matches.names()
        fetch(whole, [(box.leaf.body, box.offsets, box.shape) for box in merge.boxes])
    merge.mismatched += _ties.differing(checkpoint, merge.fills)
    found = merge.found(path, state, call, checkpoint.dropped, names.prefix or "")
    merge.check(found, strict=strict)
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

    if merge.mismatched:  # what objects turned out to be
        different = merge.mismatched
        raise dataclasses.replace(found, missing=(), unexpected=(), different=different).error()
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
    merge.hand_over(path)
    report = report.followed_by(LoadReport.from_json(read))
    missing, unexpected = (
        tuple(flat_name(at) for at, _ in gaps) for gaps in (merge.missing, merge.unexpected)
    )
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
    """Return whether a value, or a part of a skeleton, holds what is filled in place."""
    return _holds(value, _is_filled)


def _holds(value: Any, wanted: Callable[[Any], bool]) -> bool:
    """Return whether a value, or one at any depth in it, is wanted."""
    return any(map(wanted, _cycles.reached(value, _inside)))


def _is_filled(value: Any) -> bool:
    if isinstance(value, Leaf):
        return value.tag in ("$tensor", "$ndarray")
    return type(value) is PerRank or is_stateful(value) or _is_array(value)


def _inside(value: Any) -> Iterator[Any]:
    if not (isinstance(value, Leaf) or is_stateful(value)):
        with contextlib.suppress(Refused):  # it has more to it than its fields: `_has_a_place`
            yield from (item for _, item in _program.parts(value) or ())


# Dtypes that `cast` converts between. Not integers: they could overflow or lose a fraction.
_FAMILIES = (
    {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"},
    {"C128", "C64", "C32"},
)


def _can_cast(stored: Stored, dtype: str, shape: tuple[int, ...]) -> bool:
    """Return whether ``cast=True`` makes a stored tensor one of that dtype and shape."""
    is_family = any({stored.dtype, dtype} <= family for family in _FAMILIES)
    return stored.dtype != dtype and stored.shape == shape and is_family


def _leaves(
    value: Any, path: Path, parts: Parts | None = None, above: tuple[int, ...] = ()
) -> Iterator[Gap]:
    """Yield the paths and values in a value and its objects; a list without tensors is one.

    So is a container that is in itself: ``above`` has the ids of those that it is in.
    """
    part = None if parts is None else parts.of(value)
    if part is not None:
        value = part.state
    if id(value) in above:
        pairs: Any = None
    elif isinstance(value, dict):
        pairs = value.items()
    elif type(value) in _SEQUENCES and _holds_tensors(value):
        pairs = enumerate(value)
    else:
        pairs = None
    if pairs is None:
        yield path, value
        return
    for key, item in pairs:
        yield from _leaves(item, (*path, key), parts, (*above, id(value)))


def _is_array(value: Any) -> bool:
    return (
        _torch.is_tensor(value)
        or _numpy.is_array(value)
        or _device_array.interface_of(value) is not None
    )


def _has_a_place(value: Any) -> bool:
    """Return whether a save takes a value, so that a load may put another in its place.

    Anything else is an object of the program's: whoever holds it would not see the change.
    """
    if type(value) in _PLAIN or isinstance(value, DamagedTensor):
        return True
    refusals = Refusals()
    with contextlib.suppress(Error):
        encode({"x": value}, refusals=refusals)
    return not refusals


def _kind(node: Any) -> str:
    if isinstance(node, Box):
        return f"a {node.name.replace(':', '.') or node.tag[1:]}"
    if not isinstance(node, Leaf):
        return f"a {type_name(node)}"
    kinds = {"$tensor": "a tensor", "$ndarray": "a numpy array", "$pickle": "a pickled value"}
    kinds["$object"] = "an object"
    return kinds.get(node.tag, f"a {node.tag[1:]}")
