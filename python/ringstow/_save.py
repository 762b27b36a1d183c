"""Save a state dict: `save` returns once it is durable, `save_async` at once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ringstow import _arguments, _guard, _jobs, _native, _others
from ringstow._arguments import StrPath, absolute, step_number
from ringstow._config import Config, native_json
from ringstow._guard import Staging
from ringstow.tree import _encode

if TYPE_CHECKING:
    from ringstow._handle import SaveHandle
    from ringstow._report import SaveReport


@_arguments.explained(_arguments.SAVE_ARGUMENTS)
def save(
    state_dict: dict[Any, Any],
    path: StrPath,
    *,
    step: int | None = None,
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
        path: the checkpoint's directory; made if it is not there, its parents too. Files of others
            in it stay; a ``*.safetensors`` file that ringstow did not write is refused.
        step: the step of training that this is. `latest`, `steps` and `retain` go by it, whatever
            the directory's name is. Give it to the checkpoints of the run alone: `retain` removes
            an old one, also if its name is ``best``. None leaves it to the name: ``step-1000``.
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
        TornSaveError: another thread changed a tensor before it had been copied.
        NotDurableError: the save is committed, but may not survive a crash.
        OSError: the system refused: no space, no permission, a path that is a file.
    """
    where, number, knobs = _prepared(path, step, config)
    with _guard.Hold() as hold:
        hold.begin(may_wait=False)
        encoded = _encode.encode(state_dict, allow_pickle=allow_pickle)
        _guard.stage(encoded.tensors, "wait", where)
        return _jobs.run(
            lambda: _native.start_save(encoded.tensors, encoded.tree, where, knobs, number),
            where,
            hold=hold,
        )


@_arguments.explained(_arguments.SAVE_ARGUMENTS)
def save_async(
    state_dict: dict[Any, Any],
    path: StrPath,
    *,
    step: int | None = None,
    config: Config | None = None,
    allow_pickle: bool = False,
    staging: Staging = "guard",
) -> SaveHandle:
    """Start to save a state dict in the background, and return.

    What is saved are the values of the call. The loop that trains needs no change: forward and
    backward passes run on while the save copies, and the next ``step()`` of any torch optimizer
    waits until it has. What may be changed by something else is to be changed only after
    ``handle.wait_staged()``: the save fails with `TornSaveError` if it sees that a tensor was
    changed before. docs/background.md says what it cannot see.

    Memory must stay, too: ``untyped_storage().resize_(0)``, by which sharding libraries free
    parameters, takes it from under the save, which then crashes. The interpreter's exit waits for
    the save.

    Of a CUDA tensor, what the work queued so far on the current stream makes of it is saved: the
    save waits for that work, the call does not.

    Args:
        state_dict: as in `save`.
        path: as in `save`.
        step: as in `save`.
        config: as in `save`. With a ``pool_bytes`` as large as the checkpoint, staging takes as
            long as a copy; with less, about as long as the disk needs for the rest.
        allow_pickle: as in `save`.
        staging: how the values of the call are kept. ``"guard"`` copies at the call what is small
            (64 KiB) or cannot be watched (arrays, tensors without a version), in at most half of
            ``pool_bytes``, and streams all else as described; if that is too little, the call waits
            until everything is copied. ``"snapshot"`` copies everything at the call, in as much
            memory as the tensors have. ``"wait"`` streams everything and returns once it has been
            copied. ``"unguarded"`` streams everything and looks at nothing: what is changed before
            ``handle.wait_staged()`` returns may be saved half old and half new.

    Returns:
        The handle to wait on.

    Raises:
        InvalidStateError: as in `save`; or there is no such ``staging``.
        UnsupportedError: as in `save`, for what is seen at once; the rest is raised by the handle.
        TornSaveError: another thread changed a tensor while the call copied it, or is in the
            middle of an optimizer's step that does not end.
    """
    from ringstow import _handle  # only a background save needs it, and futures

    _guard.check_staging(staging)
    where, number, knobs = _prepared(path, step, config)
    hold = _guard.Hold()
    handle: SaveHandle | None = None
    try:
        may_return = True
        if staging != "unguarded":
            may_return = hold.begin()
            hold.let_steps_end()
        encoded = _encode.encode(state_dict, allow_pickle=allow_pickle)
        tensors, tree = encoded.tensors, encoded.tree
        is_copied = _guard.stage(tensors, staging, where, json.loads(knobs)["pool_bytes"])
        handle = _handle.start(
            lambda: _native.start_save(tensors, tree, where, knobs, number), where, [tensors], hold
        )
        if not (may_return and is_copied):
            handle._wait_copied()
    except BaseException:  # Ctrl-C besides
        try:
            if handle is not None:
                handle._abandon()
        finally:
            hold.end()
        raise
    return handle


def _prepared(
    path: StrPath, step: int | None, config: Config | None
) -> tuple[str, int | None, str]:
    """Return the absolute path, the step and the configuration's JSON of a save that may begin."""
    where, number, knobs = absolute(path), step_number(step), native_json(config)
    _jobs.log_unreported()
    _others.refuse_other_ranks(where)
    return where, number, knobs
