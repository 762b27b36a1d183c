"""Load a checkpoint: `load` makes new tensors, `load_into` fills those that are there."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ringstow import _arguments, _merge, _native
from ringstow._arguments import StrPath, of_checkpoint
from ringstow._collector import collector_paused
from ringstow._config import Config, native_json
from ringstow._errors import KeyMismatchError, ReplacedCheckpointError
from ringstow.tensors import _cuda, _torch
from ringstow.tensors._memory import Stored
from ringstow.tree import _build, _select, _skeleton

if TYPE_CHECKING:
    import torch

    from ringstow._report import LoadReport

_T = TypeVar("_T")
# Attempts at a checkpoint that is replaced meanwhile; each time a whole save has come in between.
_ATTEMPTS = 100

_log = logging.getLogger("ringstow")


@_arguments.explained(_arguments.LOAD_ARGUMENTS)
def load(
    path: StrPath,
    *,
    prefix: str | None = None,
    keys: Iterable[str] | None = None,
    verify: bool = True,
    allow_pickle: bool = False,
    config: Config | None = None,
    device: str | torch.device | None = None,
    framework: Literal["torch", "numpy"] = "torch",
) -> dict[Any, Any]:
    """Load a checkpoint, or a part of it, into fresh tensors.

    What comes back is equal to what was saved, types and order included, with two exceptions:
    Parameters and other sub-classes are plain tensors, and all tensors are dense. Tensors that were
    the same elements of the same memory, as tied weights are, are so again; other views of one
    memory come back apart. A tensor's storage can't be resized.

    With ``prefix`` or ``keys`` the same structure comes back with the selected leaves only, and
    only their bytes are read. A leaf's name is its path joined by dots, such as
    ``optimizer.state.0.exp_avg``. A list or tuple comes whole if any of its leaves is selected.

    If a save replaces the checkpoint meanwhile, what comes back is all of the one or all of the
    other.

    Args:
        path: the checkpoint's directory.
        prefix: select the leaf of this name and all below it: ``"model"`` selects ``model.*``, and
            not ``model_ema.*``.
        keys: select the leaves of exactly these names.
        verify: compare every block that is read with its checksum before any of it is used.
        allow_pickle: unpickle what was saved with ``allow_pickle``, and objects that torch.load
            refuses with ``weights_only``; it can run any code.
        config: the knobs; None means the defaults.
        device: where the tensors go: ``"cpu"``, as None means; ``"cuda"``, the current device; or
            ``"cuda:1"``. A GPU's are read through the staging memory straight into theirs. All else
            stays on the host, numpy arrays too, among them those that were saved from a GPU.
        framework: what torch tensors come back as: ``"torch"``, or ``"numpy"`` for arrays, which
            needs no torch. bfloat16 and 8-bit floats then need the package ``ml_dtypes``;
            torch.Size comes back as a tuple, torch.dtype as numpy's, torch.device as its name.

    Returns:
        The state dict.

    Raises:
        ValueError: both ``prefix`` and ``keys`` were given, or an unknown ``framework``, or a
            ``device`` for numpy.
        KeyMismatchError: no leaf has the prefix; or some of the keys, all of them named.
        UnsupportedError: a pickled value without ``allow_pickle``, or one of a type that the
            program has not imported; tensors without torch, or of a dtype that numpy lacks; a
            ``device`` that is not there.
        IncompleteCheckpointError: the directory holds no committed checkpoint; or the path is
            None, as `latest` returns it where there is none.
        ReplacedCheckpointError: saves replaced it, time and again, faster than it could be opened.
        CorruptCheckpointError: the bytes on disk are not those that were written.
        FormatError: the manifest is not one of ringstow's, or a newer version's.
        OSError: the system refused: no such directory, no permission, a failing disk.
    """
    if prefix is not None and keys is not None:
        raise ValueError("give prefix or keys, not both")
    if isinstance(keys, str):
        raise TypeError("keys is a collection of names; for one name give [name]")
    if not isinstance(prefix, str | None):
        raise TypeError(f"prefix is one name, not {prefix!r}; for several names give keys=")
    check_framework(framework, device)
    where = of_checkpoint(path)
    gpu = _cuda.device_named(device)
    names = None if keys is None else list(keys)
    return _while_replaced(
        lambda: _load(
            where,
            prefix,
            names,
            gpu,
            native_json(config),
            verify=verify,
            allow_pickle=allow_pickle,
            as_numpy=framework == "numpy",
        )
    )


def check_framework(framework: str, device: object) -> None:
    """Refuse a framework that ringstow does not know, and a device for numpy.

    Raises:
        ValueError: says what it may be.
    """
    if framework not in ("torch", "numpy"):
        raise ValueError(f'framework is "torch" or "numpy", not {framework!r}')
    if framework == "numpy" and device is not None:
        raise ValueError('device goes with framework="torch": numpy arrays are on the host')


@collector_paused()
def _load(
    where: str,
    prefix: str | None,
    names: list[str] | None,
    gpu: torch.device | None,
    config: str,
    *,
    verify: bool,
    allow_pickle: bool,
    as_numpy: bool,
) -> dict[Any, Any]:
    """Load what is selected of a checkpoint's skeleton."""
    checkpoint = _native.Checkpoint(where, config)
    if prefix or names is not None:
        skeleton = _selected(checkpoint, where, prefix, names)
        rows = checkpoint.tensors_named(_skeleton.stored_in(skeleton))
    else:
        skeleton, rows = _skeleton.parse(checkpoint.state, where), checkpoint.tensors
    contents = _build.Contents(where, rows)
    survey = _build.Survey(contents, allow_pickle=allow_pickle, apart=gpu is not None)
    survey.add(skeleton)
    # Objects first: one that is refused, or whose type is not here, costs no read of tensors.
    objects = dict(_blocks(checkpoint, list(survey.objects), verify, config))
    builder = _build.Builder(contents, objects, allow_pickle=allow_pickle, as_numpy=as_numpy)
    builder.make_objects(survey)
    flat = {} if gpu is None else _load_to(gpu, checkpoint, survey.tensors, verify, config)
    rest = [name for name in survey.names if name not in survey.objects]
    builder.add(dict(_blocks(checkpoint, rest, verify, config)), flat)
    return builder.value(skeleton)  # type: ignore[no-any-return]


def _blocks(
    checkpoint: _native.Checkpoint, names: list[str], verify: bool, config: str
) -> Iterator[tuple[str, Any]]:
    """Return the bytes of each tensor by name."""
    if not names:
        return iter(())
    blocks, report = checkpoint.load(names, verify, config)
    _log.debug("loaded %s", report)
    return zip(names, blocks, strict=True)


def _selected(
    checkpoint: _native.Checkpoint, where: str, prefix: str | None, names: list[str] | None
) -> dict[Any, Any]:
    """Return the skeleton of what a load asked for.

    Of many names it parses only those near the wanted ones, unless one is missing: then the error
    suggests names out of all.
    """

    def select(skeleton: dict[Any, Any]) -> dict[Any, Any]:
        if names is None:
            return _select.by_prefix(skeleton, prefix or "", where)
        return _select.by_keys(skeleton, names, where)

    part = _skeleton.parse(checkpoint.part_of_state(prefix, names), where)
    if part:
        with contextlib.suppress(KeyMismatchError):
            return select(part)
    return select(_skeleton.parse(checkpoint.state, where))


def _load_to(
    device: torch.device,
    checkpoint: _native.Checkpoint,
    tensors: dict[str, Stored],
    verify: bool,
    config: str,
) -> dict[str, torch.Tensor]:
    """Load tensors to a GPU; returns each as a new 1-d tensor."""
    flat = {name: _torch.empty_on(device, stored, name) for name, stored in tensors.items()}
    targets = [
        (name, _cuda.address_of(flat[name]), stored.nbytes)
        for name, stored in tensors.items()
        if stored.nbytes
    ]
    if targets:
        _log.debug("loaded %s", checkpoint.load_into(targets, verify, config))
    return flat


@_arguments.explained(_arguments.LOAD_INTO_ARGUMENTS)
def load_into(
    state_dict: dict[Any, Any],
    path: StrPath,
    *,
    strict: bool = True,
    cast: bool = False,
    verify: bool = True,
    allow_pickle: bool = False,
    config: Config | None = None,
) -> LoadReport:
    """Load a checkpoint into the tensors of a state dict of the same structure.

    Tensors and arrays are filled in place, without autograd noticing; all other values are
    replaced in the dicts and lists that hold them. Nothing is changed unless everything fits. If
    damage or a failing disk is met while reading, the elements of the tensors are undefined. If a
    save replaces the checkpoint meanwhile, they are all of the one or all of the other.

    Args:
        state_dict: what to fill. Its tensors may be strided, require grad, and share memory. Those
            on CUDA devices are filled through the staging memory, as are arrays with
            ``__cuda_array_interface__``; on the CPU ones that aren't dense take a copy on the way,
            as all do on other devices. A list or tuple that holds
            no tensor is one value, replaced as a whole.
        path: the checkpoint's directory.
        strict: the two must hold the same keys. False loads what is in both, and the report says
            what is ``missing`` and ``unexpected``; a tensor of another dtype or shape is still an
            error.
        cast: convert floating-point elements to the dtype of the tensor that is there, and complex
            ones likewise; such tensors take a copy in memory on the way. Other dtypes, such as
            integers, must be equal.
        verify: compare every block that is read with its checksum before any of it is used.
        allow_pickle: unpickle what was saved with ``allow_pickle``; it can run any code.
        config: the knobs; None means the defaults.

    An optimizer's ``state_dict()`` is its own tensors in new dicts: the tensors are filled, and the
    learning rate and all else is in those dicts, for ``optimizer.load_state_dict``.

    Returns:
        What was done and how long it took.

    Raises:
        KeyMismatchError: names every key that is missing, unexpected or different.
        InvalidStateError: the state dict is no dict.
        UnsupportedError: a pickled value without ``allow_pickle``, or one of a type that the
            program has not imported.
        IncompleteCheckpointError: the directory holds no committed checkpoint; or the path is
            None, as `latest` returns it where there is none.
        ReplacedCheckpointError: as in `load`.
        CorruptCheckpointError: the bytes on disk are not those that were written.
        FormatError: the manifest is not one of ringstow's, or a newer version's.
        OSError: the system refused: no such directory, no permission, a failing disk.
    """
    where = of_checkpoint(path)
    return _while_replaced(
        lambda: _merge.load_into(
            state_dict,
            where,
            _native.Checkpoint(where, native_json(config)),
            strict=strict,
            cast=cast,
            verify=verify,
            allow_pickle=allow_pickle,
            config=native_json(config),
        )
    )


def _while_replaced(attempt: Callable[[], _T]) -> _T:
    """Open and load a checkpoint; start again if a save replaced it meanwhile.

    Raises:
        ReplacedCheckpointError: a save replaced it every time.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return attempt()
        except ReplacedCheckpointError as error:
            _log.debug("beginning again: %s", error)
    return attempt()
