"""Writes a model of many ranks in Hugging Face's format, by all ranks at once.

Rank 0 creates the files at their final length under uncommitted names, and writes their headers.
Every rank writes its share of their pages, and syncs it. Then rank 0 renames the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.tensor import DTensor

from ringstow import _native
from ringstow._core._arguments import StrPath, absolute
from ringstow._core._config import Config, parse_size
from ringstow._core._dispatch_modes import real_tensors
from ringstow._core._errors import InvalidStateError, UnsupportedError
from ringstow._core._gc_pause import collector_paused
from ringstow._publish import _checkpoint_kinds, _replace
from ringstow._ranks._group import team_of
from ringstow._ranks._team import Team
from ringstow._reports._io_reports import SaveReport
from ringstow._state.tensors import _torch
from ringstow._state.tree import _cycles
from ringstow._state.tree._rename import Given, Rename
from ringstow._state.tree._select import listed
from ringstow.dcp._export_dequantized import Planner
from ringstow.dcp._export_layout import Chunk, Held, Model, check_renamed, held, merged
from ringstow.dcp._export_rank import Layout, ShareWriter

_log = logging.getLogger("ringstow")

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportReport:
    """The result of an export; equal on all ranks except ``sent_bytes``, ``save``, ``seconds``."""

    path: str
    """The directory that was written."""
    files: tuple[str, ...]
    """Names of the files with tensors."""
    tensors: int
    """Number of tensors written; tied tensors count once."""
    tensor_bytes: int
    """Bytes of these tensors' data."""
    left_out: tuple[str, ...]
    """Names of values that are not tensors."""
    tied: tuple[tuple[str, str], ...]
    """Each name that was not written, with the written name of the same tensor."""
    sent_bytes: int
    """Bytes that this rank sent to others, which write them."""
    save: SaveReport
    """The native writer's report for this rank."""
    seconds: float
    """Total time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments that must be equal on all ranks."""

    path: str
    prefix: str = ""
    dtype: str | None = None
    max_shard_bytes: int = 0
    overwrite: bool = False
    dequantize: bool = False
    numbers: tuple[tuple[str, int], ...] | Literal["one"] | None = None
    """The number of each tensor's file, from 1, or one file for all, also with an index. None
    splits the tensors by size."""
    rename: Given | None = None


@real_tensors()
def export_hf(
    state_dict: Mapping[str, Any],
    path: StrPath,
    *,
    group: dist.ProcessGroup | None = None,
    prefix: str = "",
    dtype: torch.dtype | Dtype | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    dequantize: bool = False,
    rename: Given | None = None,
    config: Config | None = None,
) -> ExportReport:
    """Write a model as safetensors files for ``from_pretrained``, by all ranks at once.

    Every rank of the group calls this with its model's state dict. Returns once the model is
    durable. The files are identical to an export of the complete tensors by one process, but no
    rank ever holds a complete tensor.

    ::

        ringstow.dcp.export_hf(model.state_dict(), "out/model", dtype=torch.bfloat16)

    At every moment the path holds either the complete model or its earlier contents. If a rank is
    killed or fails, the export fails on all ranks. Do not change the tensors before it returns.

    Args:
        state_dict: this rank's tensors: DTensors of any mesh without partial placements (FSDP2,
            tensor parallelism, HSDP), shards of FSDP1, or plain tensors, each written by one rank.
            Ranks may hold different names. Nested dicts have dotted names.
        path: the directory, created if missing. Refused if it holds tensors or a checkpoint.
        group: the ranks that hold the model; None means all, or this process alone if
            torch.distributed is not initialized.
        prefix: write only tensors whose dotted name starts with this, such as ``"model."``, and
            strip it.
        dtype: cast floating tensors of 16 bits and more, also dequantized ones, to this dtype.
            Codes and scales of bitsandbytes' layers stay as they are.
        max_shard_size: maximum size of a file: bytes, or text such as ``"5GB"``, ``"512MiB"``.
        overwrite: replace a model at the path, once the new one is complete.
        dequantize: write quantized tensors as dense ones, of the dtype that they stand for: those
            of types with a ``dequantize()``, such as torchao's, and the weights of bitsandbytes'
            layers. Each rank dequantizes its own shards, one at a time.
        rename: give the files other names than the state dict's, such as
            ``{"encoder": "backbone"}``; see `ringstow.load_into`, whose checkpoint is the state
            dict here. ``prefix`` is one of the new names. It joins and splits no tensors.
        config: this rank's configuration; None means the defaults.

    Returns:
        The report: what was written and what was left out.

    Raises:
        InvalidStateError: the ranks give different arguments, or together lack elements of a
            tensor; or a tensor cannot be written.
        UnsupportedError: a dtype or kind of tensor can't be written, or only with ``dequantize``;
            or ``rename`` joins or splits tensors.
        KeyMismatchError: no tensor has a name with the prefix; or ``rename`` makes two names one.
        TypeError, ValueError: an invalid ``rename``.
        FileExistsError: the path is not empty, and ``overwrite`` is false.
        BusyError: another export or save writes to the path.
        OSError: the system refused: a full disk, no permission. No files remain.
        NotDurableError: the model is complete, but may not survive a crash.
        Error: another rank has failed; says which and why.
    """

    def planned() -> tuple[Options, SavePlan, SavePlanner]:
        options = Options(
            path=absolute(path),
            prefix=prefix,
            dtype=_dtype_name(dtype),
            max_shard_bytes=parse_size(max_shard_size),
            overwrite=overwrite,
            dequantize=dequantize,
            rename=rename,
        )
        if rename is not None and Rename(rename).joins:
            raise UnsupportedError(
                "export_hf writes each tensor as it is, and its rename= would join or split some: "
                "save the state, and give the checkpoint and rename= to ringstow.convert.convert"
            )
        return options, *_plan(state_dict, options)

    return export_planned(planned, team_of(group), config)


def _dtype_name(dtype: torch.dtype | str | None) -> str | None:
    name = _torch.dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    if name not in (None, *_torch.CASTS):
        raise InvalidStateError(f"dtype {name!r} is not one of {', '.join(_torch.CASTS)}")
    return name


def _plan(state_dict: Mapping[str, Any], options: Options) -> tuple[SavePlan, SavePlanner]:
    if not isinstance(state_dict, Mapping):
        raise InvalidStateError(
            f"{type(state_dict).__name__} is not a state dict: pass model.state_dict()"
        )
    planner = Planner()
    with _cycles.naming_cycles(state_dict):
        planner.set_up_planner(dict(state_dict), None, True)
    state = planner.state_dict
    # Ignore empty containers: they hold nothing that could be left out.
    empty = [
        name
        for name, value in state.items()
        if isinstance(value, (dict, list, tuple)) and not value
    ]
    planner.state_dict = {name: value for name, value in state.items() if name not in empty}
    partial = [
        name
        for name, value in state.items()
        if isinstance(value, DTensor) and any(one.is_partial() for one in value.placements)
    ]
    if partial:
        raise InvalidStateError(
            f"{listed('ranks hold only summands of', partial)}: call .redistribute() first"
        )
    if options.dequantize:
        planner.dequantize(options.prefix)
    else:
        planner.refuse_quantized(options.prefix)
    # torch computes offsets with tensors on the default device, which may hold no numbers.
    with torch.device("cpu"), planner.naming_tensors():
        return planner.create_local_plan(), planner


Planned = Callable[[], tuple[Options, SavePlan, SavePlanner]]
"""Returns this rank's part of the export, or raises why it has none."""


def export_planned(planned: Planned, team: Team, config: Config | None) -> ExportReport:
    """Export by each rank's plan; every rank of the team calls this.

    Raises:
        Exception: any error of `export_hf`.
    """
    started = time.monotonic()
    export = _Export(team, config or Config())
    with collector_paused():  # the many small objects of large models are all needed
        said = team.together(lambda: export.describe(planned))
    _check_same([one.options for one in said])
    with contextlib.ExitStack() as room:
        with collector_paused():
            first = team.together(lambda: export.begin(said, room))[0]
        report = export.writer.write(*first, export.config)
        team.together(room.close)
    return export.report(report, time.monotonic() - started)


class _Said(NamedTuple):
    """A rank's message to the others."""

    options: Options
    chunks: list[Chunk]
    left_out: list[str]
    outside: set[str]
    renamed: dict[str, str]


class _Export:
    """One rank's part in an export."""

    model: Model
    layout: Layout
    writer: ShareWriter

    def __init__(self, team: Team, config: Config) -> None:
        self._team = team
        self.config = config
        self._options = Options(path="")
        self._mine = Held([], [], [], set(), {})

    def describe(self, planned: Planned) -> _Said:
        """Return this rank's tensors and options."""
        if self._team.rank < 0:
            raise InvalidStateError(
                "this process is not in the group: call export_hf on the group's ranks only"
            )
        self._options, plan, planner = planned()
        self.config = dataclasses.replace(self.config, shard_bytes=self._options.max_shard_bytes)
        options, given = self._options, self._options.rename
        rename = None if given is None else Rename(given)
        self._mine = mine = held(plan, planner, options.prefix, options.dtype, rename)
        return _Said(options, mine.chunks, mine.left_out, mine.outside, mine.renamed)

    def begin(self, said: list[_Said], room: contextlib.ExitStack) -> tuple[str, list[str]]:
        """Plan this rank's share; on rank 0 also create the files.

        Returns:
            On rank 0, the directory to write, and the files in it.
        """
        check_renamed((one.renamed for one in said), self._options.path)
        model = merged(
            [(one.chunks, one.left_out, one.outside) for one in said], self._options.prefix
        )
        specs, numbers = model.specs(), _numbers(self._options, model)
        knobs = self.config.to_json()
        self.model = model
        self.layout = Layout(*_native.model_layout(specs, knobs, numbers))
        self.writer = ShareWriter(model, self._mine, self.layout, self._team)
        if self._team.rank != 0:
            return "", []
        begin = functools.partial(
            _native.ModelSession, tensors=specs, config=knobs, numbers=numbers
        )
        return room.enter_context(_room(self._options, begin))

    def report(self, written: SaveReport, seconds: float) -> ExportReport:
        """Return the report of an export that has ended."""
        path, model = self._options.path, self.model
        if model.left_out and self._team.rank == 0:
            _log.warning("%s", listed(f"{path} can't hold, and is without", model.left_out))
        return ExportReport(
            path=path,
            files=tuple(name for name, _, _ in self.layout.files),
            tensors=len(model.tensors),
            tensor_bytes=sum(tensor.nbytes for tensor in model.tensors),
            left_out=tuple(model.left_out),
            tied=tuple(model.tied),
            sent_bytes=self.writer.sent_bytes,
            save=dataclasses.replace(written, path=path),
            seconds=seconds,
        )


def _check_same(options: list[Options]) -> None:
    """Refuse different arguments on different ranks."""
    first = options[0]
    for rank, other in enumerate(options):
        for field in dataclasses.fields(Options):
            one, two = (repr(getattr(each, field.name)) for each in (first, other))
            if one != two:
                raise InvalidStateError(
                    f"{field.name} is {one:.200} on rank 0 and {two:.200} on rank {rank}: give "
                    "the same arguments on all ranks"
                )


def _numbers(options: Options, model: Model) -> list[int] | None:
    """Return the number of each tensor's file, if the caller gave them."""
    if options.numbers is None:
        return None
    if options.numbers == "one":
        return [1] * len(model.tensors)
    known = dict(options.numbers)
    missing = [tensor.name for tensor in model.tensors if tensor.name not in known]
    if missing:
        raise InvalidStateError(listed("fqn_to_index_mapping has no file for", missing))
    return [known[tensor.name] for tensor in model.tensors]


@contextlib.contextmanager
def _room(
    options: Options, begin: Callable[[str], _native.ModelSession]
) -> Iterator[tuple[str, list[str]]]:
    """Create the files of a model, and publish them when the block ends; on one rank only."""
    path = options.path
    _replace.put_back(path)
    check = functools.partial(
        _checkpoint_kinds.check_target, path, "hf", overwrite=options.overwrite
    )
    check()
    with (
        _replace.Outcome(path, "hf"),
        _replace.place(path, "hf", check, overwrite=options.overwrite) as to,
    ):
        session = begin(to)
        try:
            yield to, [os.fspath(file) for file in session.paths]
            session.publish()
        finally:
            session.abandon()
