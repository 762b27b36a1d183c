"""The functions that a trainer calls: save, load, verify, latest, retain, prune."""

from __future__ import annotations

import logging
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ringstow import _again, _build, _cuda, _handle, _merge, _native, _select, _state, _torch, _tree
from ringstow._collector import collector_paused
from ringstow._config import Config
from ringstow._handle import SaveHandle
from ringstow._memory import Stored

if TYPE_CHECKING:
    import torch

    from ringstow._report import LoadReport, Retained, SaveReport, Swept, VerifyReport

StrPath = str | os.PathLike[str]

_log = logging.getLogger("ringstow")


def save(
    state_dict: dict[Any, Any],
    path: StrPath,
    *,
    config: Config | None = None,
    allow_pickle: bool = False,
) -> SaveReport:
    """Save a state dict as a checkpoint, and return once it is durable.

    The checkpoint appears whole or not at all; one that was at the path is replaced at the last
    moment, and is untouched by a failure, a kill or a Ctrl-C.

    Args:
        state_dict: a dict of any nesting of dict, list, tuple, int, float, str, bytes, bool,
            None, tensors of any shape and stride on the CPU or on CUDA devices, numpy arrays and
            scalars, arrays with ``__cuda_array_interface__`` (CuPy's, Numba's; they come back as
            numpy's), torch.Size, torch.dtype and torch.device. ``model.state_dict()`` and
            ``optimizer.state_dict()`` go in as they are. Tensors that are the same memory are
            stored once.
        path: the checkpoint's directory; made if it is not there, its parents too.
        config: the knobs; None means the defaults.
        allow_pickle: pickle what is none of the above. Loading it needs the same word, and runs
            whatever code the file says. Tensors within such a value are pickled with it.

    Returns:
        What was done and how long it took.

    Raises:
        InvalidStateError: a value that can't be saved, named by its key; or a bad ``config``.
        UnsupportedError: a tensor that can't be saved (sparse, quantized, ...), or
            something that ``config`` asks for by name and that this machine can't do.
        BusyError: another save into the same directory is under way.
        OSError: the system refused: no space, no permission, a path that is a file.
        Exception: the failure of an earlier `save_async` that nobody has asked about.
    """
    handle = _start(state_dict, path, config, allow_pickle=allow_pickle, is_awaited=True)
    try:
        return handle.result()
    except BaseException:
        handle._abandon()  # Ctrl-C; a save that failed is done already
        raise


def save_async(
    state_dict: dict[Any, Any],
    path: StrPath,
    *,
    config: Config | None = None,
    allow_pickle: bool = False,
) -> SaveHandle:
    """Start to save a state dict in the background, and return at once.

    Leave the tensors and arrays alone until ``handle.wait_staged()`` returns; what they hold in
    between is what is saved. Their memory must stay, too: ``untyped_storage().resize_(0)``, by
    which sharding libraries free parameters, takes it from under the save, which then crashes. All
    other values are taken at the call. The interpreter's exit waits for the save.

    Of a CUDA tensor, what the work queued so far on the current stream makes of it is saved: the
    save waits for that work, the call does not. Work that changes the tensor is to be queued, on
    whatever stream, only after ``handle.wait_staged()``.

    Args:
        state_dict: as in `save`.
        path: as in `save`.
        config: as in `save`. With a ``pool_bytes`` as large as the checkpoint, staging takes as
            long as a copy; with less, about as long as the disk needs for the rest.
        allow_pickle: as in `save`.

    Returns:
        The handle to wait on.

    Raises:
        InvalidStateError: as in `save`.
        UnsupportedError: as in `save`, for what is seen at once; the rest is raised by the handle.
        Exception: the failure of an earlier `save_async` that nobody has asked about.
    """
    return _start(state_dict, path, config, allow_pickle=allow_pickle, is_awaited=False)


def _start(
    state_dict: dict[Any, Any],
    path: StrPath,
    config: Config | None,
    *,
    allow_pickle: bool,
    is_awaited: bool,
) -> SaveHandle:
    where = _absolute(path)
    _handle.raise_untold()
    with collector_paused():
        encoded = _state.encode(state_dict, allow_pickle=allow_pickle)
    tensors, tree, knobs = encoded.tensors, encoded.tree, _json(config)
    return _handle.start(
        lambda: _native.start_save(tensors, tree, where, knobs),
        where,
        [tensors],
        is_awaited=is_awaited,
    )


def load(
    path: StrPath,
    *,
    prefix: str | None = None,
    keys: Iterable[str] | None = None,
    verify: bool = True,
    allow_pickle: bool = False,
    config: Config | None = None,
    device: str | torch.device | None = None,
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
        prefix: select the leaves whose name starts so; any string, ``"model."`` for one.
        keys: select the leaves of exactly these names.
        verify: compare every block that is read with its checksum before any of it is used.
        allow_pickle: unpickle what was saved with ``allow_pickle``, and objects that torch.load
            refuses with ``weights_only``; it can run any code.
        config: the knobs; None means the defaults.
        device: where the tensors go: ``"cpu"``, as None means; ``"cuda"``, the current device; or
            ``"cuda:1"``. A GPU's are read through the staging memory straight into theirs. All else
            stays on the host, numpy arrays too, among them those that were saved from a GPU.

    Returns:
        The state dict.

    Raises:
        ValueError: both ``prefix`` and ``keys`` were given.
        KeyMismatchError: no leaf has the prefix; or some of the keys, all of them named.
        UnsupportedError: a pickled value without ``allow_pickle``; tensors without torch; a
            ``device`` that is not there.
        IncompleteCheckpointError: the directory holds no committed checkpoint.
        ReplacedCheckpointError: saves replaced it, time and again, faster than it could be opened.
        CorruptCheckpointError: the bytes on disk are not those that were written.
        FormatError: the manifest is not one of ringstow's, or a newer version's.
        OSError: the system refused: no such directory, no permission, a failing disk.
    """
    if prefix is not None and keys is not None:
        raise ValueError("give prefix or keys, not both")
    if isinstance(keys, str):
        raise TypeError("keys is a collection of names; for one name give [name]")
    where = _absolute(path)
    gpu = _cuda.device_named(device)
    names = None if keys is None else list(keys)

    def select(skeleton: Any) -> Any:
        if prefix is not None:
            return _select.by_prefix(skeleton, prefix, where)
        return skeleton if names is None else _select.by_keys(skeleton, names, where)

    return _again.while_replaced(
        lambda: _load(where, select, gpu, _json(config), verify=verify, allow_pickle=allow_pickle)
    )


@collector_paused()
def _load(
    where: str,
    select: Callable[[Any], Any],
    gpu: torch.device | None,
    config: str,
    *,
    verify: bool,
    allow_pickle: bool,
) -> dict[Any, Any]:
    """Load what is selected of a checkpoint's skeleton."""
    checkpoint = _native.Checkpoint(where, config)
    skeleton = select(_tree.parse(checkpoint.state, where))
    contents = _build.Contents(where, checkpoint.tensors)
    survey = _build.Survey(contents, allow_pickle=allow_pickle, apart=gpu is not None)
    survey.add(skeleton)
    flat = {} if gpu is None else _load_to(gpu, checkpoint, survey.tensors, verify, config)
    blocks, report = checkpoint.load(survey.names, verify, config)
    _log.debug("loaded %s", report)
    named = dict(zip(survey.names, blocks, strict=True))
    builder = _build.Builder(contents, named, allow_pickle=allow_pickle, flat=flat)
    return builder.value(skeleton)  # type: ignore[no-any-return]


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


def load_into(
    state_dict: dict[Any, Any],
    path: StrPath,
    *,
    strict: bool = True,
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
        strict: the two must hold the same keys. False loads what is in both; a tensor of another
            dtype or shape is still an error.
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
        UnsupportedError: a pickled value without ``allow_pickle``.
        IncompleteCheckpointError: the directory holds no committed checkpoint.
        ReplacedCheckpointError: as in `load`.
        CorruptCheckpointError: the bytes on disk are not those that were written.
        FormatError: the manifest is not one of ringstow's, or a newer version's.
        OSError: the system refused: no such directory, no permission, a failing disk.
    """
    where = _absolute(path)
    return _again.while_replaced(
        lambda: _merge.load_into(
            state_dict,
            where,
            _native.Checkpoint(where, _json(config)),
            strict=strict,
            verify=verify,
            allow_pickle=allow_pickle,
            config=_json(config),
        )
    )


def verify(path: StrPath, *, config: Config | None = None) -> VerifyReport:
    """Read a whole checkpoint and compare every block with its checksum.

    Args:
        path: the checkpoint's directory.
        config: the knobs; None means the defaults.

    Returns:
        The report: ``ok``, and in ``damage`` each place that is damaged.

    Raises:
        IncompleteCheckpointError: the directory holds no committed checkpoint.
        CorruptCheckpointError: the manifest is damaged, or a file is shorter or longer than it was.
        FormatError: the manifest is not one of ringstow's, or a newer version's.
        OSError: the system refused: no such directory, no permission, a failing disk.
    """
    from ringstow._report import VerifyReport

    return VerifyReport.from_json(_native.verify(_absolute(path), _json(config)))


def latest(directory: StrPath, *, config: Config | None = None) -> str | None:
    """Return the path of the newest committed checkpoint in a directory; None if there is none.

    One that was committed and can't be loaded now is passed over, with a warning to the logger
    ``ringstow`` that says why. One whose ranks saved each by itself (DCP's
    ``use_collectives=False``) is committed if the part of every rank is, and all are of one save.

    Args:
        directory: where the checkpoints are.
        config: the knobs, of which ``stripe`` counts: a checkpoint whose files on other disks are
            not found is none that can be loaded. None means the defaults.

    Raises:
        OSError: the directory can't be read.
    """
    found = _native.latest(_absolute(directory), _json(config))
    return None if found is None else os.fspath(found)


def retain(
    directory: StrPath, keep: int, *, recycle: bool = True, config: Config | None = None
) -> Retained:
    """Remove all checkpoints directly in a directory but the newest ``keep``.

    The newest are those of the highest number at the end of their names. What has no number there
    (``best``, ``last``) is left alone. Each is removed whole or not at all, however this ends, and
    a load that has begun ends well. With several ranks, one of them calls this, after the save has
    ended on all. What ranks saved each by itself counts once. What another call has removed in the
    meantime counts as gone. What killed saves left in directories of steps before the newest goes
    too, but for what is being saved at this moment.

    Args:
        directory: where the checkpoints are.
        keep: how many stay, of those with a number that can be loaded; others are not counted and
            not removed.
        recycle: keep the files of the last one removed, in ``.ringstow-spares``, for the next save
            into a directory there to write over. That is faster than new files, and takes no more
            room than the next save would. False removes these, too. Those of ranks that saved each
            by itself are removed either way.
        config: the knobs, of which ``stripe`` counts; None means the defaults.

    Returns:
        What stays, what is gone or was cleared away, and what was left alone.

    Raises:
        InvalidStateError: ``keep`` is 0.
        OSError: a directory can't be read, or a file not be removed.
    """
    from ringstow._report import Retained

    if keep < 0:
        raise ValueError(f"keep is a number of checkpoints, not {keep}")
    return Retained.from_json(_native.retain(_absolute(directory), keep, recycle, _json(config)))


def prune(directory: StrPath, *, config: Config | None = None) -> Swept:
    """Remove what killed saves and removals left in a directory, and in those directly in it.

    Committed checkpoints and files of others stay, and so does what is being saved at this moment.
    A save does the same for the directory that it saves into, `retain` for steps before the newest.

    Args:
        directory: where the checkpoints are, or one checkpoint.
        config: as in `retain`.

    Returns:
        What is gone, what was finished, and what was left alone.

    Raises:
        OSError: a directory can't be read, or a file not be removed.
    """
    from ringstow._report import Swept

    return Swept.from_json(_native.prune(_absolute(directory), _json(config)))


def retire(path: StrPath, *, recycle: bool = True, config: Config | None = None) -> None:
    """Remove a checkpoint: after a crash it is there as it was, or not at all.

    Args:
        path: the checkpoint's directory. It stays if others' files are in it. A link is refused:
            name the directory that it leads to.
        recycle: keep its files for the next save to write over, as in `retain`.
        config: as in `retain`.

    Raises:
        IncompleteCheckpointError: there is no checkpoint, or files of a striped one aren't found,
            for want of ``Config.stripe``; they would stay on their disks.
        InvalidStateError: the path is a link; nothing is removed.
        BusyError: a save into the directory is under way.
        CorruptCheckpointError: the manifest is damaged, so that nobody can tell what belongs to it;
            remove the directory yourself.
        OSError: the system refused.
    """
    _native.retire(_absolute(path), recycle, _json(config))


def _absolute(path: StrPath) -> str:
    """Return the path from the root: a later chdir must not move a save in the background."""
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"a path must be str or os.PathLike[str], not {type(path).__name__}")
    if not text:
        raise ValueError("the path is empty")
    return str(pathlib.Path(text).absolute())


def _json(config: Config | None) -> str:
    if config is None:
        config = Config()
    if not isinstance(config, Config):
        raise TypeError(f"config is a ringstow.Config, not a {type(config).__name__}")
    return config.to_json()
