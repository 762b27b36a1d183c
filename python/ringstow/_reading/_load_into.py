"""Load into an existing state dict: compare everything, then read everything, then change it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ringstow import _native
from ringstow._core._errors import InvalidStateError
from ringstow._core._gc_pause import collector_paused
from ringstow._foreign import Foreign
from ringstow._reading import _shard_boxes, _tied_memory
from ringstow._reading._load_plan import Merge
from ringstow._reading._mapped_tensors import Fetch, Mapped, Opened, in_stored
from ringstow._reading._names import ALL, Names, tell_idle
from ringstow._reading._salvage import find
from ringstow._reading._tied_memory import Fill
from ringstow._state.objects._state_dicts import Parts
from ringstow._state.tensors import _numpy, _torch
from ringstow._state.tensors._memory import dense_strides, moved, place_at
from ringstow._state.tree._build import Builder, Contents
from ringstow._state.tree._dcp_containers import fitted
from ringstow._state.tree._mismatch import LOAD_INTO, Call
from ringstow._state.tree._refusals import type_name
from ringstow._state.tree._rename import Rename
from ringstow._state.tree._walk import flat_name

if TYPE_CHECKING:
    from ringstow._reports._io_reports import LoadReport


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
    read: Callable[[], None] = lambda: None,
    fetch: Fetch | None = None,
    kind: type[Merge] = Merge,
    parts: Parts | None = None,
    names: Names = ALL,
    call: Call = LOAD_INTO,
) -> LoadReport:
    """Fill a state dict from the checkpoint at a path, if everything fits.

    Calls ``fetch`` before the first byte is read, with what is read before anything changes, and
    what is read into the state. Calls ``ready`` once everything fits, before anything changes; an
    error of ``ready`` ends the load. Calls ``read`` once everything is read, before objects get
    their states, which may communicate. ``parts`` are the objects of the state, if the caller has
    taken their states.

    Raises:
        KeyMismatchError: lists all mismatches.
        IncompleteCheckpointError: it is a rank checkpoint, and holds only part of a tensor.
        InvalidStateError: the state dict is not a dict.
        FormatError: ringstow did not write the checkpoint's tree.
    """
    if not isinstance(state, dict):
        is_object = hasattr(state, "state_dict")
        remedy = ': give {"model": model}, or its state_dict()' if is_object else ""
        raise InvalidStateError(f"a state dict must be a dict, not {type_name(state)}{remedy}")
    from ringstow._reports._io_reports import LoadReport

    skeleton = names.skeleton(checkpoint, path)
    parts = Parts(state) if parts is None else parts
    if isinstance(checkpoint, Foreign) and checkpoint.has_text_keys:
        skeleton = fitted(skeleton, state, parts.state_of)
    rename = None if names.rename is None else Rename(names.rename)
    source: Opened = checkpoint
    if rename is not None and rename.joins:
        source = Mapped(checkpoint)
    contents = Contents(path, source.tensor, allow_pickle=allow_pickle)
    damaged = find(checkpoint, skeleton) if skips else {}
    merge = kind(contents, source, cast=cast, damaged=damaged, state=state, parts=parts)
    if rename is not None:
        skeleton = merge.renamed(state, skeleton, rename)
        tell_idle(rename, path)
        if isinstance(source, Mapped):
            merge.damaged = source.with_views(damaged)
    with _torch.without_autograd():
        merge.merge(state, skeleton, ())
        merge.displace()
    ways = _split(merge.fills)
    if fetch is not None:  # before anything is read, also if something does not fit
        first = [*merge.survey.names, *(fill.leaf.body for fill in ways.copied)]
        then = [fill.leaf.body for fill in ways.direct + ways.strided()]
        then += [] if merge.matches is None else merge.matches.names()
        boxes = [(box.leaf.body, box.offsets, box.shape) for box in merge.boxes]
        fetch(in_stored(source, first), in_stored(source, then, boxes))
    merge.mismatched += _tied_memory.differing(source, merge.fills)
    found = merge.found(path, state, call, checkpoint.dropped, names.prefix or "")
    merge.check(found, strict=strict)
    for fill in ways.copied:
        merge.survey.add(fill.leaf)
    targets = [(fill.leaf.body, fill.target.address, fill.stored.nbytes) for fill in ways.direct]

    # Objects' tensors are read after the first change, so check them now.
    late = [fill.leaf.body for fill in ways.strided()] + [box.leaf.body for box in merge.boxes]
    source.check_whole(late)
    blocks, of_values = source.load(merge.survey.names)
    named = dict(zip(merge.survey.names, blocks, strict=True))
    builder = Builder(contents, named)
    values = [(assign, make(builder)) for assign, make in merge.assigns]
    arrays = Builder(contents, named, as_numpy=True)
    sources = [
        (arrays if _numpy.is_array(fill.target.value) else builder).value(fill.leaf)
        for fill in ways.copied
    ]

    if merge.mismatched:  # mismatches found when objects were read
        different = merge.mismatched
        raise dataclasses.replace(found, missing=(), unexpected=(), different=different).error()
    ready()
    # From here on the state dict changes.
    matches = merge.matches
    report = LoadReport.from_json((matches or source).load_into(targets))
    boxed = _shard_boxes.fill(source, merge.boxes)
    if boxed is not None:
        report = report.followed_by(boxed)
    for fills in filter(None, ways.regions):
        regions = source.read(_slices(fills, source))
        report = report.followed_by(LoadReport.from_json(regions))
    filled = [fill.target.value for fill in ways.direct + ways.strided()]
    filled += [] if matches is None else matches.tensors()
    _torch.mark_changed(filter(_torch.is_tensor, filled))
    for fill, source in zip(ways.copied, sources, strict=True):
        module: Any = _torch if _torch.is_tensor(fill.target.value) else _numpy
        module.copy_into(fill.target.value, source)
    for assign, value in values:
        assign(value)
    read()
    merge.objects.hand_over(path)
    report = report.followed_by(LoadReport.from_json(of_values))
    missing, unexpected = (
        tuple(flat_name(at) for at, _ in gaps) for gaps in (merge.missing, merge.unexpected)
    )
    left = tuple(damaged.values())
    return dataclasses.replace(report, missing=missing, unexpected=unexpected, damaged=left)


class _Ways(NamedTuple):
    """How each target is filled."""

    direct: list[Fill]
    """Fills of dense memory: read directly into it."""
    regions: list[list[Fill]]
    """Fills of strided memory on GPUs: read region by region, one list after the other."""
    copied: list[Fill]
    """All other fills: read into temporary memory, then copied."""

    def strided(self) -> list[Fill]:
        """Return all of `regions`."""
        return [fill for fills in self.regions for fill in fills]


def _split(fills: list[Fill]) -> _Ways:
    """Choose how to perform each fill.

    Targets that share one memory, such as tied weights, are filled once. Each stored tensor is read
    into one address, and each address is read into once; all other fills are copies. Another
    library's array on a GPU can't be the target of a copy: it is always read into directly.
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


def _slices(fills: list[Fill], checkpoint: Opened) -> list[Any]:
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
