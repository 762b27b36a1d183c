"""Save a state dict: `save` returns once it is durable, `save_async` at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringstow import _calls, _handle, _native, _state
from ringstow._collector import collector_paused
from ringstow._config import Config, native_json
from ringstow._handle import SaveHandle
from ringstow._paths import StrPath, absolute

if TYPE_CHECKING:
    from ringstow._report import SaveReport


@_calls.explained(_calls.SAVE_ARGUMENTS)
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
        state_dict: a dict of any nesting of tensors of any shape and stride on the CPU or on CUDA
            devices, numpy arrays and scalars, arrays with ``__cuda_array_interface__`` (CuPy's,
            Numba's; they come back as numpy's), and Python's values and containers, from int and
            dict to dataclass, Enum, set and BytesIO: docs/values.md lists them.
            ``model.state_dict()`` and ``optimizer.state_dict()`` go in as they are. Tensors that
            are the same memory are stored once.
        path: the checkpoint's directory; made if it is not there, its parents too.
        config: the knobs; None means the defaults.
        allow_pickle: pickle what is none of the above. Loading it also needs
            ``allow_pickle=True``, and runs whatever code the file says. Tensors are never pickled,
            nor are arrays of more than 64 KiB or objects that hold either.

    Returns:
        What was done and how long it took.

    Raises:
        InvalidStateError: values that can't be saved, each named by its key, with what to save
            instead; or a bad ``config``.
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


@_calls.explained(_calls.SAVE_ARGUMENTS)
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
    where = absolute(path)
    _handle.raise_untold()
    with collector_paused():
        encoded = _state.encode(state_dict, allow_pickle=allow_pickle)
    tensors, tree, knobs = encoded.tensors, encoded.tree, native_json(config)
    return _handle.start(
        lambda: _native.start_save(tensors, tree, where, knobs),
        where,
        [tensors],
        is_awaited=is_awaited,
    )
