"""Compares a state dict with a checkpoint, and plans the changes of a load. Changes nothing."""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Callable, Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ringstow import _native
from ringstow._foreign import Foreign
from ringstow._reading import _composite_tensors, _quantized_states
from ringstow._reading._mapped_tensors import KnownTensors, Mapped, Opened
from ringstow._reading._object_states import Objects
from ringstow._reading._salvage import holds_damage, marked
from ringstow._reading._shard_boxes import Boxed
from ringstow._reading._targets import (
    DICTS,
    SEQUENCES,
    can_cast,
    has_a_place,
    holds_tensors,
    kind_there,
    leaves,
)
from ringstow._reading._tied_memory import Fill
from ringstow._state.objects import _new_optimizers
from ringstow._state.objects._optimizers import OptimizerState, is_optimizer_state
from ringstow._state.objects._per_rank import PerRank
from ringstow._state.objects._state_dicts import Parts
from ringstow._state.tensors import (
    _composite_shards,
    _composites,
    _cuda,
    _device_arrays,
    _numpy,
    _shards,
    _torch,
)
from ringstow._state.tensors._memory import (
    Stored,
    Target,
    in_elements,
)
from ringstow._state.tensors._optional_packages import imported
from ringstow._state.tree import _custom_types
from ringstow._state.tree._build import Builder, Contents, Survey
from ringstow._state.tree._damaged_tensors import DamagedTensor
from ringstow._state.tree._fitting import Fitting
from ringstow._state.tree._mismatch import Call, Filled, Mismatch
from ringstow._state.tree._refusals import Refused, kind_of, remedy, type_name
from ringstow._state.tree._rename import Rename
from ringstow._state.tree._similar_names import Gap
from ringstow._state.tree._walk import (
    COMPOSITE,
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


_log = logging.getLogger("ringstow")
# Builds a value from the bytes that were read.
Make = Callable[[Builder], Any]


class Merge:
    """Compares a state dict with a skeleton, and collects the changes and the mismatches."""

    rank = 0
    """The rank whose `PerRank` values are loaded."""

    def __init__(
        self,
        contents: Contents,
        checkpoint: Opened,
        *,
        cast: bool,
        damaged: Mapping[str, DamagedTensor],
        state: dict[Any, Any],
        parts: Parts,
    ) -> None:
        self.contents = contents
        self._parts = parts
        self._layouts = _new_optimizers.Layouts(state, parts)
        self.objects = Objects(self.rank)
        self.in_object = False
        """Whether the state that is compared is an object's, which is passed to the object."""
        self.sources: dict[tuple[str, int], tuple[Path, Any]] = {}
        """What sparse and jagged targets get, by the place of each inner tensor."""
        self.damaged = damaged
        """Targets that are compared, but not changed."""
        self.cast = cast
        self.survey = Survey(contents)
        """The tensors that new values need."""
        self.fills: list[Fill] = []
        self.boxes: list[Boxed] = []
        """Targets that are filled with only a part of a stored tensor."""
        self.assigns: list[tuple[Callable[[Any], None], Make]] = []
        """Pairs of a function that stores a new value and one that builds it."""
        self.missing: list[Gap] = []
        self.unexpected: list[Gap] = []
        self.mismatched: list[str] = []
        self.differs: set[str] = set()
        """How they differ: see `Mismatch.kinds`."""
        self.turned: list[Path] = []
        """Tensors whose two dimensions are swapped."""
        self._usual = _torch.usual()
        self._may_be_packed = imported("bitsandbytes") is not None
        self._address_of = _cuda.finder()
        self.matches: _native.Matches | None = None
        """Plain tensors that fit; they are not in ``fills``."""
        exchange = self._usual.exchange
        self._mapped = checkpoint if isinstance(checkpoint, Mapped) else None
        if not (exchange is None or damaged or isinstance(checkpoint, Foreign | Mapped)):
            self.matches = _native.Matches(checkpoint, exchange, self._address_of)

    def check(self, found: Mismatch, *, strict: bool) -> None:
        """Raise a KeyMismatchError that lists all mismatches, or says that nothing would be filled.

        Warns if little would be filled.
        """
        if found.different or (strict and (found.missing or found.unexpected)):
            raise found.error(strict=strict)
        if found.missing:
            judge(found, [found.filled()], 0)

    def found(
        self, path: str, state: object, call: Call, dropped: list[str], below: str
    ) -> Mismatch:
        """Return the mismatches."""
        return Mismatch(
            path,
            state,
            self.missing,
            self.unexpected,
            self.mismatched,
            self.differs,
            call,
            lambda: leaves(state, (), self._parts),
            self.kind_of,
            dropped,
            below,
            self.turned,
        )

    def renamed(self, state: dict[Any, Any], skeleton: dict[Any, Any], rename: Rename) -> Any:
        """Return a skeleton with the state dict's names; note values without a place in it."""

        def shapes() -> dict[str, tuple[int, ...]]:
            every = leaves(state, (), self._parts)
            kinds = ((flat_name(path), self.kind_of(value)) for path, value in every)
            return {name: kind[1] for name, kind in kinds if isinstance(kind, tuple)}

        tensors = KnownTensors(self.contents, self._mapped, shapes)
        fitting = Fitting(rename, self._key, self.contents.path, tensors)
        optimizers = {
            key: _new_optimizers.renamed(skeleton[key], rename, self.contents.path)
            for key, value in state.items()
            if isinstance(self._parts.of(value), OptimizerState)
            and is_optimizer_state(skeleton.get(key))
        }
        here, there = (
            {key: one for key, one in whole.items() if key not in optimizers}
            for whole in (state, skeleton)
        )
        with self.contents.keys():
            fitted = fitting.fit(self._parts.opened(here), there) | optimizers
        self.unexpected += (gap for at, node in fitting.left for gap in leaves(node, at))
        return fitted

    def kind_of(self, value: Any) -> object:
        """Return the dtype and shape of a tensor here or in the checkpoint, otherwise the type."""
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
            self.in_object = True
            self.objects.merge(self, part, node, path)
            self.in_object = False
            return None
        if type(target) is PerRank:
            self.objects.merge_per_rank(self, target, node, path)
            return None
        is_opaque = isinstance(node, Leaf) and node.tag in ("$pickle", "$object")
        is_array = isinstance(node, Leaf) and node.tag in ("$tensor", "$ndarray")
        if type(target) not in self._usual.kinds and _shards.is_sharded(target):
            self._sharded(target, node, path)
        elif isinstance(node, Box) and node.tag == COMPOSITE:
            return _composite_tensors.merge(self, target, node, path)
        elif type(target) in self._usual.kinds or _torch.is_tensor(target):
            self._fill(target, node, path, self._tensor, ("$tensor",), "a tensor")
        elif _numpy.is_array(target) and _numpy.code_of_array(target):
            if isinstance(node, Leaf) and node.tag == "$object":
                self._fill_by_object(target, node, path)
            else:
                tags = ("$ndarray", "$tensor")
                self._fill(target, node, path, self._array, tags, "a numpy array")
        elif (interface := _device_arrays.interface_of(target)) is not None:
            target_of = functools.partial(self._device_array, interface)
            self._fill(target, node, path, target_of, ("$ndarray",), "an array on a GPU")
        elif type(target) is collections.Counter and isinstance(node, dict):
            self.survey.add(node, path)
            return lambda builder: collections.Counter(builder.value(node, path))
        elif isinstance(target, dict) and not is_opaque and type(target) is not collections.Counter:
            self._dict(target, node, path)
        elif type(target) in SEQUENCES and not is_opaque and holds_tensors(target):
            return self._sequence(target, node, path)
        elif _custom_types.has_fields(target) and not is_opaque and holds_tensors(target):
            return self._fields(target, node, path)
        elif is_array and not isinstance(target, DamagedTensor | None):
            if has_a_place(target):
                self.differ(path, f"a value ({type_name(target)})", kind_there(node))
            else:
                self._refuse(target, node, path)
        elif not is_opaque and not has_a_place(target):
            self._refuse(target, node, path)
        elif not self.is_damaged(node):
            self.survey.add(node, path)
            return lambda builder: builder.value(node, path)
        return None

    def replace(self, holder: dict[Any, Any], key: Any, node: Any, path: Path) -> None:
        """Plan to put the value of a node into a dict, replacing any current value."""
        at = (*path, key)
        if not self.is_damaged(node):
            self.survey.add(node, at)
            self.assign(holder.__setitem__, {key: lambda builder: builder.value(node, at)})

    def is_damaged(self, node: Any) -> bool:
        """Return whether a part of a skeleton holds a damaged tensor."""
        return bool(self.damaged) and holds_damage(marked(node, self.damaged))

    def _tensor(self, tensor: torch.Tensor, path: Path) -> Target:
        if self._usual.exchange is not None:
            found = self._usual.exchange.find(tensor, self._address_of)
            if found is not None:
                return Target(tensor, *found, strides=None)
        if _composites.is_composite(tensor):
            problem = _composite_tensors.kind_here(tensor)
            return Target(tensor, "", (), 0, None, problem=problem)
        return _torch.target_of(tensor, describe(path), self._address_of)

    def _array(self, array: Any, path: Path) -> Target:
        return _numpy.target_of(array)

    def _device_array(self, interface: Mapping[str, Any], array: Any, path: Path) -> Target:
        return _device_arrays.target_of(array, interface, describe(path))

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
            return self.differ(path, kind, kind_there(node))
        target = target_of(value, path)
        if target.problem:
            return self.differ(path, f"{target.problem}, which can't be filled,", kind_there(node))
        stored = self.contents.stored(node, path)
        cast = target.value is not None and can_cast(stored, target.dtype, target.shape)
        if not self._fits(stored, (target.dtype, target.shape), path, cast=cast):
            return None
        if stored.nbytes and node.body not in self.damaged:
            self.fills.append(Fill(target, node, stored, cast, path))
        return None

    def _fill_by_object(self, array: Any, node: Leaf, path: Path) -> None:
        """Plan to fill an array from an object; only reading its bytes shows whether it fits."""
        if self.is_damaged(node):
            return
        self.survey.add(node, path)

        def make(builder: Builder) -> Any:
            value, target = builder.value(node, path), self._array(array, path)
            code = _numpy.code_of_array(value) if _numpy.is_array(value) else None
            if target.problem:
                here = f"{target.problem}, which can't be filled,"
                self.differ(path, here, "a numpy array")
            elif code is None:
                self.differ(path, "a numpy array", f"a {type_name(value)}")
            else:
                stored = Stored(code, value.shape, value.nbytes)
                cast = can_cast(stored, target.dtype, target.shape)
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
        if kind == "size" and len(here[1]) == 2 and here == (there[0], there[1][::-1]):
            kind = "turned"
            self.turned.append(path)
        self.differ(path, *(f"{dtype} {list(shape)}" for dtype, shape in (here, there)), kind=kind)
        return False

    def _sharded(self, tensor: Any, node: Any, path: Path) -> None:
        key = functools.partial(describe, path)
        found = _shards.sharded(tensor, key)
        whole = None
        if _composite_shards.may_be_whole(found, self._usual.kinds):
            whole = _composite_shards.whole_of(tensor, found, key)
        if whole is not None:
            kind = f"a DTensor of a {whole.parts.type.replace(':', '.')}"
            if not (isinstance(node, Box) and node.tag == COMPOSITE):
                return self.differ(path, kind, kind_there(node))
            for name, leaf in _composite_tensors.shards(self, whole, node, path):
                self._pieces(whole.inner[name][:2], leaf, (*path, name))
            return None
        if not (isinstance(node, Leaf) and node.tag == "$tensor"):
            return self.differ(path, "a sharded tensor", kind_there(node))
        return self._pieces(found[:2], node, path, _torch.code_of(tensor, key))

    def _pieces(
        self,
        of_rank: tuple[_shards.Shape, list[_shards.Piece]],
        node: Leaf,
        path: Path,
        code: str = "",
    ) -> None:
        """Plan to fill this rank's regions of a tensor."""
        shape, pieces = of_rank
        stored = self.contents.stored(node, path)
        if pieces and not code:
            code = _torch.code_of(pieces[0].local, functools.partial(describe, path))
        if not code:  # a composite of which this rank has nothing
            return None
        here = (code, in_elements(shape, code))
        if not self._fits(stored, here, path, cast=can_cast(stored, *here)):
            return None
        for local, offsets, _ in pieces:
            at = in_elements(offsets, code)
            if node.body not in self.damaged:
                self.boxes.append(Boxed(local.detach(), code, at, node, stored, path))
        return None

    def _dict(self, target: dict[Any, Any], node: Any, path: Path) -> None:
        if not isinstance(node, dict):
            return self.differ(path, f"a {type_name(target)}", kind_there(node))
        if _new_optimizers.differs(target, node):
            _new_optimizers.optimizer(self, target, node, path, self._layouts.of(target), new=False)
            return None
        saved: dict[Any, Any] = {}
        with self.contents.keys():
            for key, child in node.items():
                saved[key if type(key) is str else self._key(key, path, saved)] = child
        self.assign(target.__setitem__, self.items(target, saved, path))
        metadata = metadata_of(node)
        is_held = isinstance(target, collections.OrderedDict)
        if metadata is not None and is_held and not self.is_damaged(metadata):
            at = (*path, METADATA)
            self.survey.add(metadata, at)
            assign = functools.partial(vars(target).__setitem__, str(METADATA))
            self.assigns.append((assign, lambda b: b.value(metadata, at)))

    def _sequence(self, target: Any, node: Any, path: Path) -> Make | None:
        if type(node) is not type(target):
            self.differ(path, f"a {type_name(target)}", kind_there(node))
            return None
        makes = self.items(dict(enumerate(target)), dict(enumerate(node)), path)
        if not isinstance(target, tuple):
            self.assign(target.__setitem__, makes)
        elif makes:
            return lambda b: tuple(makes[n](b) if n in makes else v for n, v in enumerate(target))
        return None

    def _fields(self, target: Any, node: Any, path: Path) -> Make | None:
        try:
            here = _custom_types.fields_of(target)
        except Refused as refused:
            self._refuse(target, node, path, refused.reason)
            return None
        assert here is not None
        if not isinstance(node, Box) or (node.tag, node.name) != (here.tag, here.name):
            self.differ(path, f"a {type_name(target)}", kind_there(node))
            return None
        held = dict(here.steps())
        makes = self.items(held, dict(node.steps()), path)
        if not _custom_types.is_frozen(target):
            self.assign(functools.partial(_custom_types.set_field, target), makes)
        elif makes:
            return lambda b: _custom_types.with_fields(
                Box(here.tag, here.name, held | {name: make(b) for name, make in makes.items()}),
                describe(path),
            )
        return None

    def items(self, here: dict[Any, Any], saved: dict[Any, Any], path: Path) -> dict[Any, Make]:
        """Plan the changes of a container's items; return the builders of the replaced items."""
        makes: dict[Any, Make] = {}
        if self._may_be_packed:
            here, saved = _quantized_states.without_packed(self, here, saved, path)
        steps: Iterable[Any] = saved
        if self.matches is not None and type(here) in DICTS:
            steps, displaced = self.matches.take(here, saved, path)
            self._fill_displaced(displaced)
        for step in steps:
            node = saved[step]
            if step not in here:
                self.unexpected += leaves(node, (*path, step))
            elif (make := self.merge(here[step], node, (*path, step))) is not None:
                makes[step] = make
        if not here.keys() <= saved.keys():
            for step, value in here.items():
                if step not in saved:
                    self.missing += leaves(value, (*path, step), self._parts)
        return makes

    def displace(self) -> None:
        """Move from ``matches`` to the fills what shares memory or a stored tensor with a fill."""
        if self.matches is not None:
            others = [(fill.leaf.body, fill.target.address) for fill in self.fills]
            self._fill_displaced(self.matches.displace(others))

    def _fill_displaced(self, displaced: Iterable[tuple[Any, Leaf, Path]]) -> None:
        for tensor, leaf, path in displaced:
            self._fill(tensor, leaf, path, self._tensor, ("$tensor",), "a tensor")

    def assign(self, store: Callable[[Any, Any], None], makes: dict[Any, Make]) -> None:
        """Plan to store the new items of a container."""
        self.assigns += [(functools.partial(store, step), make) for step, make in makes.items()]

    def _key(self, key: Any, path: Path, others: Container[Any] = ()) -> Any:
        self.survey.add(key, path)
        return rebuild_key(key, path, Builder(self.contents, {}).make, others)

    def differ(
        self, path: Path, here: str, there: str, *, kind: str = "kind", remedy: str = ""
    ) -> None:
        """Note that a value is of another kind, dtype or size in the checkpoint."""
        self.differs.add(kind)
        text = f"{flat_name(path)} is {here} here and {there} in the checkpoint"
        self.mismatched.append(f"{text}: {remedy}" if remedy else text)

    def _refuse(self, target: Any, node: Any, path: Path, reason: str = "") -> None:
        """Note an object that a load cannot fill, although the checkpoint has a value for it."""
        self.differs.add("object")
        self.mismatched.append(
            f"{flat_name(path)} is {kind_of(target)} here, {reason or 'which a load cannot fill'}, "
            f"and {kind_there(node)} in the checkpoint: put {remedy(target)} in its place, where x "
            "is the object, and set x from it after the load"
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
