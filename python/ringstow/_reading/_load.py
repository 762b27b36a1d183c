"""Load a checkpoint: `load` creates new tensors, `load_into` fills existing ones."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ringstow import _foreign, _native
from ringstow._core import _arguments, _formatting
from ringstow._core._arguments import StrPath, brief
from ringstow._core._config import Config, native_json
from ringstow._core._dispatch_modes import real_tensors
from ringstow._core._errors import (
    FormatError,
    IncompleteCheckpointError,
    ReplacedCheckpointError,
    UnsupportedError,
)
from ringstow._core._gc_pause import collector_paused
from ringstow._core._waiting import Again
from ringstow._ranks import _shared_fs_lag
from ringstow._reading import _load_into, _mapped_files, _resolve, _salvage
from ringstow._reading._mapped_files import MappedFiles, Verify
from ringstow._reading._mapped_tensors import Mapped, Opened, in_stored
from ringstow._reading._names import Names, check_cut, part_of, skeleton_of, tell_idle
from ringstow._reports import _done_callbacks
from ringstow._reports._progress import Progress
from ringstow._saving import _tier_copies
from ringstow._state.tensors import _cuda, _torch
from ringstow._state.tensors._memory import InFiles, Stored
from ringstow._state.tree import _build, _dcp_containers, _mismatch, _select
from ringstow._state.tree._damaged_tensors import Salvaged
from ringstow._state.tree._fitting import renamed_tree
from ringstow._state.tree._rename import Given, Rename

if TYPE_CHECKING:
    import torch

    from ringstow._reports._io_reports import LoadReport
    from ringstow._state.tree._damaged_tensors import DamagedTensor

_T = TypeVar("_T")
Planned = Callable[[_native.Checkpoint, list[InFiles]], None]
"""Called with a checkpoint, and what each pass is about to read."""

_log = logging.getLogger("ringstow")


@_arguments.explained(_arguments.LOAD_ARGUMENTS)
def load(
    path: StrPath | Sequence[StrPath],
    *,
    prefix: str | None = None,
    keys: Iterable[str] | None = None,
    rename: Given | None = None,
    mmap: bool = False,
    verify: Verify = True,
    on_corrupt: Literal["raise", "skip"] = "raise",
    allow_pickle: bool = False,
    config: Config | None = None,
    device: str | torch.device | None = None,
    framework: Literal["torch", "numpy"] = "torch",
    tensor_parts: bool = False,
) -> dict[Any, Any]:
    """Load a checkpoint, or a part of it, into new tensors.

    The result equals the saved state, including types and order, with two exceptions: Parameters
    become plain tensors, and the elements of a strided tensor are dense. Tensors that shared the
    same elements, such as tied weights, share memory again; other overlapping views do not. A
    loaded tensor's storage can't be resized.

    With ``prefix`` or ``keys`` the result has the same structure but only the selected leaves, and
    only their bytes are read. A leaf's name is its path joined by dots, such as
    ``optimizer.state.0.exp_avg``. A list or tuple is complete if any of its leaves is selected.

    If a save replaces the checkpoint meanwhile, the result is entirely the old or entirely the new
    one.

    Args:
        path: the checkpoint's directory, or its URL in an object store. A list names the tiers of a
            run, the nearest first, such as ``["/nvme/run", "s3://bucket/run"]``: the load takes the
            newest step of all tiers from the nearest tier. Missing files and damaged checksum
            chunks come from the next tier's copy, with a warning. The same applies to a path whose
            copies are on ``config.tiers``.
        prefix: select the leaf of this name and all below it: ``"model"`` selects ``model.*``, but
            not ``model_ema.*``.
        keys: select the leaves of exactly these names.
        rename: give the result other names than the checkpoint's, and join or split its tensors;
            see `load_into`. ``prefix`` and ``keys`` are the checkpoint's names.
        mmap: return tensors that are views of the mapped files, in a `MappedState`: a byte is read
            when it is touched, so that a server starts in milliseconds. A write to a tensor changes
            this process's copy of the page, and never the file. The tensors keep their bytes,
            although the checkpoint is removed or replaced. If another program cuts a file, or the
            disk cannot read a page, the kernel sends SIGBUS, which ends the process: without
            ``mmap`` both are errors. Tensors that several ranks have saved in parts are read, with
            a warning. Not for object stores, GPUs and kinds other than ringstow's and safetensors.
        verify: verify every checksum chunk that is read before using any of it. With ``mmap``, True
            reads and compares all of the mapped tensors before the return, ``"background"``
            afterwards, in a thread: `MappedState.wait_verified` waits for it and raises, and an
            error is logged. False compares nothing.
        on_corrupt: how to treat damaged tensors, arrays and objects. ``"raise"`` raises. ``"skip"``
            returns the intact ones in a `Salvaged`, a dict whose ``damaged`` lists the missing
            ones, and warns with CorruptCheckpointWarning. Dicts lack the damaged keys; lists,
            tuples, defaultdicts and fields hold a `DamagedTensor` instead. Missing and truncated
            files count as damage; a damaged manifest still raises. Reads everything twice: to check
            it, and to load it.
        allow_pickle: unpickle what was saved with ``allow_pickle``, and objects that torch.load
            refuses with ``weights_only``; this can run any code.
        config: the settings; None means the defaults.
        device: where to put torch tensors: ``"cpu"``, also for None; ``"cuda"``, the current
            device; or ``"cuda:1"``. A load to a GPU goes through the staging memory. Everything
            else stays on the host, including numpy arrays and arrays that were saved from a GPU.
        framework: how to return torch tensors: as ``"torch"`` tensors, or as ``"numpy"`` arrays,
            which needs no torch. bfloat16 and 8-bit floats then need the package ``ml_dtypes``.
            A torch.Size becomes a tuple, a torch.dtype numpy's dtype, a torch.device its name.
        tensor_parts: return tensors that are made of others, such as quantized and sparse ones, as
            `TensorParts`, their inner tensors by name. That needs no library but torch. With
            ``framework="numpy"`` they are always `TensorParts`.

    Returns:
        The state dict.

    Raises:
        ValueError: both ``prefix`` and ``keys`` are given, or an unknown ``framework`` or
            ``on_corrupt``, or a ``device`` for numpy, or ``on_corrupt="skip"`` without ``verify``;
            or ``mmap`` with a GPU, with ``on_corrupt="skip"``, or with a ``rename`` that joins or
            splits tensors.
        KeyMismatchError: no name starts with ``prefix``, or ``keys`` are missing (all listed); or
            ``rename`` makes two names one, or joins tensors that are missing, not selected, or do
            not fit.
        UnsupportedError: a pickled value without ``allow_pickle``; a value of a type that the
            program has not imported; tensors without torch, or of a dtype that numpy lacks; an
            unknown ``device``; a ``rename`` that joins or splits an optimizer's state.
        IncompleteCheckpointError: the directory holds no committed checkpoint; or the path is
            None, which `latest` returns if there is none.
        ReplacedCheckpointError: saves kept replacing it before the load could finish.
        CorruptCheckpointError: bytes on disk are damaged; names the
            tensors.
        FormatError: the manifest is not ringstow's, or a newer version's.
        OSError: the system refused: no such directory, no permission, a failing disk.
    """
    state, _ = loaded(
        path,
        prefix=prefix,
        keys=keys,
        rename=rename,
        mmap=mmap,
        verify=verify,
        on_corrupt=on_corrupt,
        allow_pickle=allow_pickle,
        config=config,
        device=device,
        framework=framework,
        tensor_parts=tensor_parts,
    )
    return state


@real_tensors()
def loaded(
    path: StrPath | Sequence[StrPath],
    *,
    prefix: str | None = None,
    keys: Iterable[str] | None = None,
    rename: Given | None = None,
    mmap: bool = False,
    verify: Verify = True,
    on_corrupt: Literal["raise", "skip"] = "raise",
    allow_pickle: bool = False,
    config: Config | None = None,
    device: str | torch.device | None = None,
    framework: Literal["torch", "numpy"] = "torch",
    tensor_parts: bool = False,
    planned: Planned | None = None,
) -> tuple[dict[Any, Any], LoadReport]:
    """Load as `load` does; also return the report.

    Calls ``planned`` before it reads tensors: again if it starts again, and never for checkpoints
    of another program that it does not read natively.
    """
    if prefix is not None and keys is not None:
        raise ValueError("give prefix or keys, not both")
    if isinstance(keys, str):
        raise TypeError("keys is a collection of names; for one name give [name]")
    if not isinstance(prefix, str | None):
        raise TypeError(f"prefix is one name, not {brief(prefix)}; for several names give keys=")
    check_framework(framework, device)
    mapping = None if rename is None else Rename(rename)
    skips = _salvage.check_choice(on_corrupt, verify=bool(verify))
    _mapped_files.check(mmap=mmap, verify=verify, device=device, skips=skips)
    if mmap and mapping is not None and mapping.joins:
        raise ValueError(
            "mmap=True maps tensors as they are stored: no rename= joins or splits them"
        )
    source = _Source(path, config)
    found = source.found
    where = found.path
    gpu = _cuda.device_named(device)
    names = None if keys is None else list(keys)
    progress = Progress(f"loading {os.path.basename(where)}")
    with _done_callbacks.failing("load", where), _resolve.telling(found), progress:
        state, report = source.read(
            lambda found: _load(
                found.path,
                _opened(
                    found,
                    config,
                    progress,
                    damaged=skips,
                    verify=bool(verify),
                    allow_pickle=allow_pickle,
                ),
                prefix,
                names,
                gpu,
                rename=mapping,
                mapped=verify if mmap else None,
                skips=skips,
                allow_pickle=allow_pickle,
                as_numpy=framework == "numpy",
                as_parts=tensor_parts or framework == "numpy",
                planned=planned,
            )
        )
    tell(report)
    damaged = report.damaged
    if not skips:
        return state, report
    salvaged = Salvaged(state)
    vars(salvaged).update(getattr(state, "__dict__", {}), damaged=damaged)
    _salvage.warn(where, damaged, "the load skipped tensors")
    return salvaged, report


def tell(report: LoadReport) -> None:
    """Report a finished load: write the log line, and call the callbacks of `on_done`."""
    _tier_copies.loaded(report.path)
    _done_callbacks.tell(_done_callbacks.Outcome(kind="load", path=report.path, report=report))
    _done_callbacks.log(_formatting.of_load(report))


class _Source:
    """The checkpoint to load."""

    def __init__(self, path: StrPath | Sequence[StrPath], config: Config | None) -> None:
        """Find the checkpoint; for tiers, report a failed search as a failed load."""
        self._path = path
        self._config = config
        if isinstance(path, list | tuple):
            with _done_callbacks.failing("load", _resolve.shown(path)):
                self.found = _resolve.find(path, config)
        else:
            self.found = _resolve.find(path, config)

    def read(self, attempt: Callable[[_resolve.Found], _T]) -> _T:
        """Open and load the checkpoint; start again if a save replaced it meanwhile.

        For tiers, search for the newest step again if another process has removed it.

        Raises:
            ReplacedCheckpointError: saves replaced it every time.
        """
        again = Again()
        found = self.found
        while True:
            try:
                return attempt(found)
            except ReplacedCheckpointError as error:
                if not again.may_try():
                    raise
                _log.debug("retrying the load: %s", error)
            except (IncompleteCheckpointError, FileNotFoundError) as error:
                if not _resolve.has_gone(self._path, found) or not again.may_try():
                    raise
                _log.debug("looking again for the newest step: %s", error)
                found = _resolve.find(self._path, self._config)


def _opened(
    found: _resolve.Found,
    config: Config | None,
    progress: Progress,
    *,
    damaged: bool,
    verify: bool,
    allow_pickle: bool,
) -> _native.Checkpoint | _foreign.Foreign:
    settings = native_json(config)
    others = _foreign.opened(
        found.path, settings, verify=verify, allow_pickle=allow_pickle, progress=progress.advance
    )
    if others is not None:
        return others

    def attempt(where: str, copies: list[str]) -> _native.Checkpoint:
        return _native.Checkpoint(
            where,
            settings,
            copies=copies,
            foreign=True,
            damaged=damaged,
            verify=verify,
            progress=progress.advance,
        )

    return _resolve.opened(
        found, lambda where, copies: _shared_fs_lag.opened(where, lambda: attempt(where, copies))
    )


def check_framework(framework: str, device: object) -> None:
    """Refuse an unknown framework, and a device for numpy.

    Raises:
        ValueError: the framework is unknown, or a device is given for numpy.
    """
    if framework not in ("torch", "numpy"):
        raise ValueError(f'framework is "torch" or "numpy", not {framework!r}')
    if framework == "numpy" and device is not None:
        raise ValueError('device goes with framework="torch": numpy arrays are on the host')


@collector_paused()
def _load(
    where: str,
    checkpoint: _native.Checkpoint | _foreign.Foreign,
    prefix: str | None,
    names: list[str] | None,
    gpu: torch.device | None,
    *,
    rename: Rename | None,
    mapped: Verify | None,
    skips: bool,
    allow_pickle: bool,
    as_numpy: bool,
    as_parts: bool,
    planned: Planned | None,
) -> tuple[dict[Any, Any], LoadReport]:
    """Load the selected leaves of a checkpoint; the report lists damage.

    ``mapped`` says when to verify mapped tensors; None reads them.
    """
    if prefix or names is not None:
        skeleton = part_of(checkpoint, where, prefix, names)
        if rename is not None and rename.joins:
            check_cut(rename, skeleton, checkpoint, where)
    else:
        skeleton = skeleton_of(checkpoint, where)
    if isinstance(checkpoint, _foreign.Foreign) and checkpoint.has_text_keys:
        _tell_numbers(where, skeleton)
    damaged = _salvage.find(checkpoint, skeleton) if skips else {}
    source: Opened = checkpoint
    gone = damaged
    if rename is not None:
        source = Mapped(checkpoint)
        skeleton = renamed_tree(skeleton, rename, source.tensors_for(where), where)
        tell_idle(rename, where)
        gone = source.with_views(damaged)
    skeleton = _salvage.without(skeleton, gone)
    contents = _build.Contents(where, source.tensor, allow_pickle=allow_pickle, as_parts=as_parts)
    survey = _build.Survey(contents, apart=gpu is not None)
    wanted = None
    files = None if mapped is None else MappedFiles(checkpoint, mapped)
    if gpu is None and files is None and not isinstance(source, _foreign.Foreign | Mapped):
        wanted = survey.add_all(skeleton, source)
    else:
        survey.add(skeleton)
    # Objects first: an object that is refused fails the load before any tensor is read.
    reports: list[str] = []
    objects = _build.read(source, list(survey.objects), reports)
    builder = _build.Builder(contents, objects, as_numpy=as_numpy)
    builder.make_objects(survey)
    if planned is not None and not isinstance(checkpoint, _foreign.Foreign):
        names = [*survey.tensors, *survey.rest, *([] if wanted is None else wanted.names())]
        planned(checkpoint, [in_stored(source, names)])
    if wanted is not None:
        value = builder.fill(skeleton, survey, wanted, reports)
    else:
        flat = {} if gpu is None else _load_to(gpu, source, survey.tensors, reports)
        loads = source if files is None else files
        builder.add(_build.read(loads, survey.rest, reports), flat)
        try:
            value = builder.value(skeleton)
        except (FormatError, UnsupportedError):
            if mapped:  # nothing has been compared yet
                _check_mapped(checkpoint, survey.rest)
            raise
    report = _summed(source, reports, tuple(damaged.values()))
    return (value, report) if files is None else files.verified(value, report)


def _check_mapped(checkpoint: _native.Checkpoint | _foreign.Foreign, names: list[str]) -> None:
    """Compare the checksums of mapped tensors that make no state.

    Raises:
        CorruptCheckpointError: bytes are damaged.
    """
    if isinstance(checkpoint, _native.Checkpoint) and checkpoint.kind == "ringstow":
        damaged = [one["name"] for one in json.loads(checkpoint.damaged(names))]
        if damaged:
            checkpoint.load(damaged)  # says what is damaged, as any load does


def _tell_numbers(where: str, skeleton: dict[Any, Any]) -> None:
    """Warn of keys that DCP may have turned into text: only `load_into` can restore their types."""
    names = list(_dcp_containers.numbers_as_text(skeleton))
    if names:
        _log.warning(
            "%s: %s; DCP stores the keys of dicts as text, so they stay text. load_into gives them "
            "the types that they have in your state",
            where,
            _select.listed("dicts with numbers as keys", names),
        )


def _summed(
    checkpoint: Opened,
    reports: list[str],
    damaged: tuple[DamagedTensor, ...],
) -> LoadReport:
    """Return one report of several reads."""
    from ringstow._reports._io_reports import LoadReport

    if not reports:  # no tensor was selected
        reports = [checkpoint.load([])[1]]
    report = functools.reduce(LoadReport.followed_by, map(LoadReport.from_json, reports))
    return dataclasses.replace(report, damaged=damaged)


def _load_to(
    device: torch.device,
    checkpoint: Opened,
    tensors: dict[str, Stored],
    reports: list[str],
) -> dict[str, torch.Tensor]:
    """Load tensors to a GPU, and return each as a new 1-d tensor."""
    flat = {name: _torch.empty_on(device, stored, name) for name, stored in tensors.items()}
    targets = [
        (name, _cuda.address_of(flat[name]), stored.nbytes)
        for name, stored in tensors.items()
        if stored.nbytes
    ]
    if targets:
        reports.append(checkpoint.load_into(targets))
    return flat


@_arguments.explained(_arguments.LOAD_INTO_ARGUMENTS)
def load_into(
    state_dict: dict[Any, Any],
    path: StrPath | Sequence[StrPath],
    *,
    prefix: str | None = None,
    rename: Given | None = None,
    strict: bool = True,
    cast: bool = False,
    verify: bool = True,
    on_corrupt: Literal["raise", "skip"] = "raise",
    allow_pickle: bool = False,
    config: Config | None = None,
) -> LoadReport:
    """Load a checkpoint into the tensors of a state dict of the same structure.

    Fills tensors and arrays in place; autograd does not record it. Replaces all other values in the
    dicts and lists that hold them. Changes nothing unless everything fits. After damage or a read
    error, the elements of the tensors are undefined. If a save replaces the checkpoint meanwhile,
    the result is entirely the old or entirely the new one.

    ``optimizer.state_dict()`` returns new dicts that hold the optimizer's own tensors. The load
    fills these tensors. Pass the dicts to ``optimizer.load_state_dict`` afterwards: it sets the
    learning rate and all other values.

    Args:
        state_dict: the state dict to fill. Its tensors may be strided, require grad, and share
            memory. Tensors on CUDA devices and arrays with ``__cuda_array_interface__`` are filled
            through the staging memory. Strided CPU tensors, and tensors on other devices, need a
            temporary copy. A list or tuple without tensors is one value, replaced as a whole.
        path: the checkpoint's directory or URL, or a list of the tiers of a run; see `load`.
        prefix: load the part of the checkpoint below this name as if it were all of it:
            ``load_into(model.state_dict(), path, prefix="model")``.
        rename: maps parts of the checkpoint's names, such as ``{"encoder": "backbone"}``. Dots
            separate the parts of a name; a key is one or more whole parts, such as
            ``"model.encoder"``, anywhere in a name; ``*`` stands for one part. Parts mapped to
            ``""`` are dropped from the names on both sides: ``{"module": ""}`` loads a model saved
            in DistributedDataParallel into a plain model, and vice versa. A `Stack`, `Unstack`,
            `Concat`, `Split` or `Transpose` in place of the new name joins, splits or turns
            tensors: each byte is read once, straight to its place. A list applies one mapping after
            the other; it may hold the transforms of transformers' tables, such as
            ``get_model_conversion_mapping(model)`` returns.
        strict: require the same keys in both. False loads the keys that both have, and the report
            lists the others as ``missing`` and ``unexpected``; a tensor of another dtype or shape
            is still an error, and so is a load that would fill nothing. A load that fills less than
            half of the tensors logs a warning.
        cast: convert floating-point and complex elements to the target's dtype, with a temporary
            copy. Other dtypes, such as integers, must be equal.
        verify: verify every checksum chunk that is read before using any of it.
        on_corrupt: how to treat damage. ``"raise"`` raises. ``"skip"`` fills all targets whose
            bytes are intact, and leaves the others unchanged: the report lists them as ``damaged``,
            and CorruptCheckpointWarning names them. A value with a damaged part is also unchanged.
            Reads everything twice: to check it, and to load it.
        allow_pickle: unpickle what was saved with ``allow_pickle``; this can run any code.
        config: the settings; None means the defaults.

    Returns:
        The report: bytes read and seconds taken.

    Raises:
        KeyMismatchError: lists every key that is missing, unexpected or different, and says why
            and what to do; or nothing in the checkpoint is below ``prefix``.
        TypeError, ValueError: an unknown ``on_corrupt``, or ``"skip"`` without ``verify``; or an
            invalid ``prefix`` or ``rename``, also one that can join or split no tensors so.
        InvalidStateError: the state dict is not a dict.
        UnsupportedError: a pickled value without ``allow_pickle``, or a value of a type that the
            program has not imported. IncompleteCheckpointError: the directory holds no committed
            checkpoint; or the path is None, which `latest` returns if there is none.
        ReplacedCheckpointError: saves kept replacing it before the load could finish.
        CorruptCheckpointError: bytes on disk are damaged.
        FormatError: the manifest is not ringstow's, or a newer version's.
        OSError: the system refused: no such directory, no permission, a failing disk.
    """
    return fill(
        state_dict,
        path,
        _mismatch.LOAD_INTO,
        Names(prefix, rename),
        strict=strict,
        cast=cast,
        verify=verify,
        on_corrupt=on_corrupt,
        allow_pickle=allow_pickle,
        config=config,
    )


@real_tensors()
def fill(
    state_dict: dict[Any, Any],
    path: StrPath | Sequence[StrPath],
    call: _mismatch.Call,
    names: Names | None = None,
    *,
    strict: bool = True,
    cast: bool = False,
    verify: bool = True,
    on_corrupt: Literal["raise", "skip"] = "raise",
    allow_pickle: bool = False,
    config: Config | None = None,
) -> LoadReport:
    """Load as `load_into` does; ``call`` has the caller's arguments."""
    skips = _salvage.check_choice(on_corrupt, verify=verify)
    names = names or Names()
    names.check()
    source = _Source(path, config)
    found = source.found
    where = found.path
    progress = Progress(f"loading {os.path.basename(where)}")
    with _done_callbacks.failing("load", where), _resolve.telling(found), progress:
        report = source.read(
            lambda found: _load_into.load_into(
                state_dict,
                found.path,
                _opened(
                    found,
                    config,
                    progress,
                    damaged=skips,
                    verify=verify,
                    allow_pickle=allow_pickle,
                ),
                strict=strict,
                cast=cast,
                skips=skips,
                allow_pickle=allow_pickle,
                names=names,
                call=call,
            )
        )
    tell(report)
    _salvage.warn(where, report.damaged, "the targets of these tensors are unchanged")
    return report
