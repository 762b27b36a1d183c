"""Converts checkpoints between other formats and ringstow's, a few tensors in memory at a time.

=============  ===================================================================================
kind           meaning
=============  ===================================================================================
``ringstow``   a ringstow checkpoint
``dcp``        a directory by torch.distributed.checkpoint's own writer, of any number of ranks
``torch``      a file by ``torch.save``
``hf``         a directory of safetensors files in Hugging Face's format
``lightning``  a directory of Lightning's sharded strategies; only read, like all kinds below
``trainer``    a ``checkpoint-N`` of Transformers' Trainer
``accelerate`` a directory of Accelerate's ``save_state``
``deepspeed``  a directory of DeepSpeed's, of any stage of ZeRO
``megatron``   a directory of Megatron-Core's ``torch_dist``
=============  ===================================================================================

`convert` takes any two kinds; each other function converts one pair. Each reads the target again
and compares it with the source, bit by bit. This module needs torch; ``import ringstow`` does not
import it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Literal, TypedDict, Unpack

from ringstow import _native
from ringstow._core._arguments import StrPath, absolute, object_url
from ringstow._core._config import Config, parse_size
from ringstow._core._dispatch_modes import real_tensors
from ringstow._core._errors import (
    CorruptCheckpointError,
    Error,
    IncompleteCheckpointError,
    InvalidStateError,
    ReplacedCheckpointError,
)
from ringstow._foreign import _nested_states
from ringstow._foreign._nested_states import State, stored, total_bytes
from ringstow._publish import _checkpoint_kinds, _replace
from ringstow._reading import _run_steps
from ringstow._reports._io_reports import SaveReport
from ringstow._state.tensors import _torch
from ringstow._state.tree._rename import Given, Rename
from ringstow._state.tree._select import listed
from ringstow._state.tree._walk import describe
from ringstow.convert import _dequantized, _targets
from ringstow.convert._check import Comparison
from ringstow.convert._sources import Options, open_source

__all__ = [
    "ConvertReport",
    "convert",
    "dcp_to_ringstow",
    "hf_to_ringstow",
    "parse_size",
    "ringstow_to_dcp",
    "ringstow_to_hf",
    "ringstow_to_torch",
    "torch_to_ringstow",
]

Kind = Literal["ringstow", "dcp", "torch", "hf"]
SourceKind = Kind | Literal["lightning", "trainer", "accelerate", "deepspeed", "megatron"]
Dtype = Literal["float32", "bfloat16", "float16"]

Progress = Callable[[str, int, int], None]
"""Called with the phase (``"writing"``, ``"verifying"``), its bytes done, and its bytes in all."""

_log = logging.getLogger("ringstow")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertReport:
    """The result of a conversion."""

    source: str
    """The path that was read."""
    target: str
    """The path that was written."""
    source_kind: str
    """One of the kinds above."""
    target_kind: str
    """``"ringstow"``, ``"dcp"``, ``"torch"`` or ``"hf"``."""
    tensors: int
    """Number of tensors and arrays written; tied tensors count once."""
    tensor_bytes: int
    """Bytes of these tensors' data."""
    left_out: tuple[str, ...]
    """Names of values that the target can't hold: for ``hf`` all but tensors, empty dicts for
    ``dcp``."""
    tied: tuple[tuple[str, str], ...]
    """For ``hf``: each name that was not written, with the written name of the same tensor."""
    verified: bool
    """Whether the target was read again and compared."""
    save: SaveReport | None
    """The native writer's report, for ``ringstow`` and ``hf``."""
    seconds: float
    """Total time, verification included."""


@real_tensors()
def convert(
    src: StrPath,
    dst: StrPath,
    *,
    source: SourceKind | None = None,
    target: Kind | None = None,
    progress: Progress | None = None,
    verify: bool = True,
    overwrite: bool = False,
    allow_pickle: bool = False,
    config: Config | None = None,
    rename: Given | None = None,
    dequantize: bool = False,
    prefix: str = "",
    dtype: Dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> ConvertReport:
    """Convert a checkpoint, with no more than a few tensors in memory at a time.

    Args:
        src: the checkpoint to read: its path, or the URL of a ringstow checkpoint in an object
            store.
        dst: the path to write, not a URL. Refused if it exists, except for files of a killed
            conversion and, for ``hf``, files of other programs.
        source: the kind of ``src``; None detects it.
        target: the kind of ``dst``; None means ringstow, or torch for a name such as ``x.pt`` if
            ``src`` is not such a file.
        progress: called repeatedly with the phase, its bytes done, and its bytes in all.
        verify: verify the source's checksums if it has any; read the target again and compare it,
            tensor by tensor, bit by bit.
        overwrite: replace a checkpoint of the target's kind at ``dst`` once the new one is
            complete. Until then, and after a failure, the old one stays unchanged.
        allow_pickle: unpickle (and pickle) values other than tensors and plain values, which can
            run any code.
        config: the configuration of reading and writing; None means the defaults.
        rename: give the target other names than the source's, and join or split its tensors, such
            as one tensor an expert: see `ringstow.load_into`, whose state dict is the target here.
            A joined tensor is in memory as a whole.
        dequantize: write quantized tensors as dense ones, of the dtype that they stand for: those
            of types with a ``dequantize()``, such as torchao's, and the weights of bitsandbytes'
            layers. Each is in memory as a whole. Their library must be installed.
        prefix: for ``hf``: write only tensors whose dotted name starts with this, such as
            ``"model."``, and strip it. None writes the model's weights of a trainer's directory; of
            any other source, all tensors except an optimizer's.
        dtype: for ``hf``: cast floating tensors of 16 bits and more, also dequantized ones, to this
            dtype. Codes and scales of bitsandbytes' layers stay as they are.
        max_shard_size: for ``hf``: maximum size of a file: bytes, or text such as ``"5GB"``,
            ``"512MiB"``.

    Returns:
        The report: what was written and what was left out.

    Raises:
        InvalidStateError: the kinds can't be detected, the two paths are the same, the target is
            a URL, or can't hold a value or name.
        UnsupportedError: a dtype or value can't be read or written, or a pickle needs
            ``allow_pickle``; or ``rename`` joins or splits an optimizer's state, which only a
            target of ``hf`` leaves out.
        CorruptCheckpointError: the source is damaged; or the target differs from the source (names
            the first difference; the target is kept).
        BusyError: another conversion writes to ``dst``.
        ReplacedCheckpointError: another program has replaced ``dst`` before it was verified.
        OSError: the system refused: no such path, ``dst`` exists, a full disk. No file that looks
            like a checkpoint remains. An error during the final comparison has a note that the
            target is complete.
    """
    started = time.monotonic()
    here, there = object_url(src) or absolute(src), _target(dst)
    _replace.put_back(there)
    source_kind = _source_kind(here, source)
    target_kind = target or _checkpoint_kinds.target_kind(
        source_kind, there, changes=rename is not None
    )
    _checkpoint_kinds.check_other(here, there)
    check = functools.partial(
        _checkpoint_kinds.check_target, there, target_kind, overwrite=overwrite
    )
    check()
    _check_options(target_kind, prefix, dtype)
    options = Options(
        allow_pickle=allow_pickle,
        verify=verify,
        overwrite=overwrite,
        config=config or Config(),
        prefix=prefix,
        dtype=dtype,
        max_shard_bytes=parse_size(max_shard_size),
        dequantize=dequantize,
        rename=None if rename is None else Rename(rename),
        keeps_optimizers=target_kind == "hf",
    )
    advance = progress or (lambda phase, done, total: None)

    state = open_source(here, source_kind, options)
    if not isinstance(state, dict):
        raise InvalidStateError(f"{here} holds a {type(state).__name__}, not a state dict")
    if source_kind != "ringstow":
        _nested_states.check(here, state)
        state = _nested_states.resolved(state)
        at, _ = max(stored(state), key=lambda one: one[1].nbytes, default=((), None))
        _nested_states.check_size(here, total_bytes(state), describe(at))
    if target_kind == "hf" and not prefix:
        prefix = _targets.prefix_of(state, here, source_kind)
        options = dataclasses.replace(options, prefix=prefix)
    if dequantize:
        state = _dequantized.dequantized(state, here, _targets.writes(target_kind, options))
    _targets.refuse_composites(state, here, target_kind, options)
    with _replace.Outcome(there, target_kind) as outcome:
        with _replace.place(there, target_kind, check, overwrite=overwrite) as to:
            written = _targets.WRITERS[target_kind](state, to, advance, options)
            is_there = _recognizer(to, there, target_kind, written.report)
        outcome.is_placed = True
        if written.left_out:
            _log.warning("%s", listed(f"{there} can't hold, and is without", [*written.left_out]))
        if verify:
            with _noting_replaced(there, is_there):
                _verify(here, there, target_kind, written.expected, options, advance)
    return ConvertReport(
        source=here,
        target=there,
        source_kind=source_kind,
        target_kind=target_kind,
        tensors=len({id(value) for _, value in stored(written.expected)}),
        tensor_bytes=total_bytes(written.expected),
        left_out=written.left_out,
        tied=written.tied,
        verified=verify,
        save=written.report and dataclasses.replace(written.report, path=there),
        seconds=time.monotonic() - started,
    )


def _target(path: StrPath) -> str:
    """Return the absolute path of a target.

    Raises:
        InvalidStateError: the target is a URL.
    """
    if url := object_url(path):
        raise InvalidStateError(
            f"{url} is a URL, and a conversion writes to a directory: convert to ringstow in a "
            f"directory DIR, then copy it by `ringstow promote DIR --to {url}`"
        )
    return absolute(path)


def _source_kind(path: str, kind: SourceKind | None) -> str:
    """Return the kind of a source: the given one, or the detected one.

    Raises:
        InvalidStateError: the kind can't be detected, or can't be read by URL.
    """
    if object_url(path) is None:
        return kind or _checkpoint_kinds.kind_of(path)
    if kind not in (None, "ringstow"):
        raise InvalidStateError(
            f"{path} is a URL, and only ringstow checkpoints are read from object stores: copy the "
            f"{kind} checkpoint to a directory, and convert it there"
        )
    return "ringstow"


class _Options(TypedDict, total=False):
    progress: Progress | None
    verify: bool
    overwrite: bool
    allow_pickle: bool
    config: Config | None
    rename: Given | None
    dequantize: bool


class _HfOptions(_Options, total=False):
    prefix: str
    dtype: Dtype | None
    max_shard_size: int | str


def torch_to_ringstow(src: StrPath, dst: StrPath, **options: Unpack[_Options]) -> ConvertReport:
    """Convert a file by ``torch.save`` to a ringstow checkpoint; see `convert`.

    A file in the format of torch before 1.6 is loaded into memory at once, with a warning.
    """
    return convert(src, dst, source="torch", target="ringstow", **options)


def dcp_to_ringstow(src: StrPath, dst: StrPath, **options: Unpack[_Options]) -> ConvertReport:
    """Convert a directory by torch.distributed.checkpoint to a ringstow checkpoint; see `convert`.

    Tensors of several ranks are assembled. The metadata is a pickle; without ``allow_pickle`` only
    classes of DCP's metadata are unpickled.
    """
    return convert(src, dst, source="dcp", target="ringstow", **options)


def hf_to_ringstow(src: StrPath, dst: StrPath, **options: Unpack[_Options]) -> ConvertReport:
    """Convert a directory of safetensors files to a ringstow checkpoint of a flat state.

    See `convert`.
    """
    return convert(src, dst, source="hf", target="ringstow", **options)


def ringstow_to_torch(src: StrPath, dst: StrPath, **options: Unpack[_Options]) -> ConvertReport:
    """Convert a ringstow checkpoint to a file that ``torch.load`` reads; see `convert`.

    While it runs, it needs twice the tensors' size as free space in the target's directory.
    """
    return convert(src, dst, source="ringstow", target="torch", **options)


def ringstow_to_dcp(src: StrPath, dst: StrPath, **options: Unpack[_Options]) -> ConvertReport:
    """Convert a ringstow checkpoint to a directory that torch.distributed.checkpoint reads.

    As in torch's own format, keys become text, each of several tied tensors is stored, and empty
    dicts are left out. See `convert`.
    """
    return convert(src, dst, source="ringstow", target="dcp", **options)


def ringstow_to_hf(src: StrPath, dst: StrPath, **options: Unpack[_HfOptions]) -> ConvertReport:
    """Convert the tensors of a ringstow checkpoint to consolidated safetensors; see `convert`.

    Writes ``model.safetensors``, or numbered files with ``model.safetensors.index.json``. Tied
    tensors are written once; values other than tensors are left out. The report names both.
    """
    return convert(src, dst, source="ringstow", target="hf", **options)


def _check_options(kind: str, prefix: str, dtype: str | None) -> None:
    if kind != "hf" and (prefix or dtype):
        raise InvalidStateError(
            f"prefix and dtype are for hf; a conversion to {kind} leaves all tensors as they are"
        )
    if dtype not in (None, *_torch.CASTS):
        raise InvalidStateError(f"dtype {dtype!r} is not one of {', '.join(_torch.CASTS)}")


def _recognizer(to: str, path: str, kind: str, report: SaveReport | None) -> Callable[[], bool]:
    """Return a function that returns whether the target just written is still at a path.

    Args:
        to: the path to which it was written.
        path: its current path.
        kind: the kind of the target.
        report: the report of a ringstow checkpoint.
    """
    if kind == "ringstow" and report is not None:
        generation = report.generation

        def has_generation() -> bool:
            info = json.loads(_native.Checkpoint(path, Config().to_json(), damaged=True).info)
            return bool(info["generation"] == generation)

        return has_generation
    made = os.stat(to)
    return lambda: os.path.samestat(made, os.stat(path)) and _checkpoint_kinds.kind_of(path) == kind


@contextlib.contextmanager
def _noting_replaced(path: str, is_there: Callable[[], bool]) -> Iterator[None]:
    """Raise a difference as damage, or as the replacement by another program."""
    try:
        yield
    except (Error, OSError) as error:
        try:
            replaced = not is_there()
        except (FileNotFoundError, IncompleteCheckpointError):
            replaced = True
        except (Error, OSError):
            replaced = False  # unknown: raise the difference, which says more
        if not replaced:
            raise
        raise ReplacedCheckpointError(
            f"{path} was written, and another program has replaced or removed it, or saved beside "
            "it, before it was verified: convert to a path to which no other program writes",
            path=path,
        ) from error


def _verify(
    source: str,
    target: str,
    kind: str,
    expected: State,
    options: Options,
    advance: Progress,
) -> None:
    """Compare the target with the source; verify a ringstow target's checksums too."""
    if kind == "ringstow":
        damage = _run_steps.verify(target, config=options.reading).damage
        if damage:
            where = f"{damage[0].file} at byte {damage[0].offset}"
            raise CorruptCheckpointError(
                f"{target} is not what was written: {where}. The disk may be failing",
                file=damage[0].file,
                offset=damage[0].offset,
                expected=damage[0].expected,
                got=damage[0].got,
            )
    with _targets.counted(advance, "verifying", total_bytes(expected)) as compared:
        found = open_source(target, kind, dataclasses.replace(options, rename=None))
        Comparison(source, target, compared).check(expected, found)
