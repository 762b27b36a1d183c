"""Save a state dict: `save` returns once it is durable, `save_async` at once."""

from __future__ import annotations

import dataclasses
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ringstow import _native
from ringstow._core import _arguments, _formatting
from ringstow._core._arguments import StrPath, absolute, names_of_parts, step_number
from ringstow._core._config import Config, given
from ringstow._core._dispatch_modes import real_tensors
from ringstow._core._errors import InvalidStateError, NotDurableError
from ringstow._core._metrics import metrics_of
from ringstow._ranks import _concurrent_saves
from ringstow._reports import _done_callbacks
from ringstow._reports._progress import Progress
from ringstow._saving import _guard, _jobs, _tier_copies
from ringstow._saving._base import Base, native
from ringstow._saving._guard import Staging
from ringstow._state.objects._state_dicts import Parts
from ringstow._state.tree import _encode

if TYPE_CHECKING:
    from ringstow._reports._io_reports import SaveReport
    from ringstow._saving._handle import ProcessHandle
    from ringstow._saving._save_future import SaveHandle
    from ringstow._saving._tier_copies import Promoter


@_arguments.explained(_arguments.SAVE_ARGUMENTS)
def save(
    state_dict: dict[Any, Any],
    path: StrPath,
    *,
    step: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    droppable: Iterable[str] = (),
    base: StrPath | Base | None = None,
    config: Config | None = None,
    allow_pickle: bool = False,
) -> SaveReport:
    """Save a state dict as a checkpoint, and return once it is durable.

    The checkpoint appears entirely or not at all. An earlier one at the path is replaced at the
    commit; a failure, kill or Ctrl-C before that leaves it unchanged.

    Args:
        state_dict: a dict, nested in any way, such as ``{"model": model, "optimizer": optimizer}``
            or ``model.state_dict()``. docs/values.md lists what it may hold:

            - tensors of any shape and stride on the CPU or on CUDA devices; tensors that share all
              their memory are stored once,
            - objects with ``state_dict`` and ``load_state_dict``, such as a module, an optimizer
              or a scheduler: their state dicts are saved, an optimizer's by the names of its
              parameters,
            - numpy arrays and scalars,
            - arrays with ``__cuda_array_interface__`` (CuPy's, Numba's), which load as numpy's,
            - Python values and containers, from int and dict to dataclass, Enum, set and BytesIO.

        path: the checkpoint's directory; created with its parents if missing. Files of other
            programs stay, but the save refuses a ``*.safetensors`` file that ringstow did not
            write.
        step: the training step. `latest`, `steps` and `retain` use it instead of the directory's
            name. Give a step only to the run's checkpoints: `retain` removes an old one even if its
            name is ``best``. None means that the name decides: ``step-1000``.
        metrics: numbers by name to store with the step, such as ``{"loss": 0.25}``: `steps` reports
            them, and ``Retention.best`` compares them. A number is an int, a float (NaN and
            infinities included), a NumPy scalar, or a 0-dimensional tensor or array. At most 256
            metrics, with names of at most 256 bytes.
        droppable: names of parts whose tensors get files of their own, so that `slim` can drop them
            later: ``["optimizer"]``. A name includes all names below it.
        base: an earlier checkpoint, such as the previous step. Its files whose tensors have not
            changed are linked, not written again; the new checkpoint stays complete by itself. Also
            stores a hash of each tensor for the next save to compare. docs/background.md is the
            guide; `Base` has more options.
        config: the settings; None means the defaults.
        allow_pickle: pickle all other values. Loading them also needs ``allow_pickle=True``, and
            can run any code. Tensors, arrays of more than 64 KiB and objects that hold either are
            never pickled.

    Returns:
        The report: bytes written and seconds taken. Copies to ``Config.tiers`` continue in the
        background; `wait_promoted` waits for them.

    Raises:
        InvalidStateError: values that can't be saved, each with its key and what to save instead;
            a metric that is not a number; a name in ``droppable`` that the state does not have; or
            an invalid ``config``.
        UnsupportedError: a tensor that can't be saved (sparse, quantized, ...), or something that
            ``config`` requires and this machine lacks.
        NoCheckpointError, CorruptCheckpointError, MissingFilesError: ``base`` can't be opened.
        BusyError: another save into the same directory is in progress.
        TornSaveError: another thread changed a tensor before it had been copied.
        NotDurableError: the save is committed, but may not survive a crash.
        OSError: the system refused: no space, no permission, a path that is a file.
    """
    hold = _guard.Hold()
    with hold.waited.here(), real_tensors():
        where, config, noted, promoter = _prepared(path, step, metrics, config)
        knobs = config.to_json()
        hold.path = where
        earlier = native(base)
        progress = Progress(f"saving {os.path.basename(where)}")
        with _done_callbacks.failing("save", where, noted[0]), progress, hold:
            hold.begin(may_wait=False)
            encoded, parts = _encoded(state_dict, droppable, allow_pickle=allow_pickle)
            _guard.stage(encoded.tensors, "wait", where, hold)
            try:
                report = _jobs.run(
                    lambda: _native.start_save(
                        encoded.tensors,
                        encoded.tree,
                        where,
                        knobs,
                        noted,
                        apart=parts,
                        base=earlier,
                    ),
                    where,
                    hold=hold,
                    advance=progress.advance,
                )
            except NotDurableError:
                if promoter is not None:
                    promoter.rescue(where)
                raise
        blocked_seconds = hold.waited.seconds()
        report = dataclasses.replace(report, step=noted[0], blocked_seconds=blocked_seconds)
    if promoter is not None:
        promoter.add(where, is_new=True)
    _done_callbacks.tell(
        _done_callbacks.Outcome(
            kind="save", path=where, step=noted[0], metrics=noted[1], report=report
        )
    )
    _done_callbacks.log(_formatting.of_save(report))
    return report


@_arguments.explained(_arguments.SAVE_ARGUMENTS)
def save_async(
    state_dict: dict[Any, Any],
    path: StrPath,
    *,
    step: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    droppable: Iterable[str] = (),
    base: StrPath | Base | None = None,
    config: Config | None = None,
    allow_pickle: bool = False,
    staging: Staging = "guard",
) -> SaveHandle:
    """Start to save a state dict in the background, and return.

    Saves the values at the time of the call. The training loop needs no change: forward and
    backward passes run while the save copies, and the next ``step()`` of any torch optimizer waits
    for the copies. Call ``handle.wait_staged()`` before any other code changes the tensors. If the
    save detects an earlier change, it fails with `TornSaveError`. docs/background.md lists what it
    cannot detect.

    Do not free the memory either: sharding libraries free parameters with
    ``untyped_storage().resize_(0)``, which fails or crashes the save. The interpreter's exit waits
    for the save.

    For CUDA tensors, the save waits for the work that is queued on the current stream, and saves
    its results. The call does not wait.

    Args:
        state_dict: the state to save: a dict of tensors, objects and Python values; see `save`.
        path: the checkpoint's directory; created if missing.
        step: the training step; None takes it from the directory's name.
        metrics: numbers by name to store with the step; see `save`.
        droppable: names of parts that `slim` can drop later; see `save`.
        base: an earlier checkpoint whose unchanged files are linked; see `save`. A tensor that the
            save finds unchanged counts as copied.
        config: the settings; None means the defaults. If ``pool_bytes`` is a number, staging beyond
            so many bytes waits for the disk; by default it waits only if memory is short.
        allow_pickle: pickle values of other types; loading them can run any code. See `save`.
        staging: how to keep the values of the call:

            - ``"guard"`` copies small tensors (up to 64 KiB) and tensors it cannot watch (arrays,
              tensors without a version) during the call, into at most half of ``pool_bytes`` (128
              MiB by default). If these copies need more, the call waits until everything is copied.
            - ``"snapshot"`` copies everything during the call, into as much memory as the tensors
              use.
            - ``"wait"`` streams everything, and returns once it is copied.
            - ``"unguarded"`` streams everything without checks: a tensor that changes before
              ``handle.wait_staged()`` returns may be saved half old and half new.

    Returns:
        The handle to wait on. Its ``wait_promoted()`` waits for the copies to ``Config.tiers``.

    Raises:
        InvalidStateError: a value that can't be saved, or an invalid argument.
        TornSaveError: another thread changed a tensor while the call copied it, or its optimizer
            step did not end in time.
        BusyError: this process is already saving to the path. If another process is, the handle
            raises it.
    """
    from ringstow._saving import _handle  # imports futures, which only a background save needs

    _guard.check_staging(staging)
    hold = _guard.Hold()
    handle: ProcessHandle | None = None
    try:
        with hold.waited.here(), real_tensors():
            where, config, noted, promoter = _prepared(path, step, metrics, config)
            hold.path = where
            earlier = native(base)
            with _done_callbacks.failing("save", where, noted[0]):
                _jobs.refuse_own(where)
                may_return = True
                if staging != "unguarded":
                    may_return = hold.begin()
                    hold.let_steps_end()
                encoded, parts = _encoded(state_dict, droppable, allow_pickle=allow_pickle)
                tensors, tree = encoded.tensors, encoded.tree
                is_copied = _guard.stage(tensors, staging, where, hold, config.staging_bytes)
                # Nothing waits for these writes, and they need no further memory.
                is_whole = is_copied and staging == "snapshot"
                knobs = config.to_json(background=not is_whole)
                handle = _handle.start(
                    lambda: _native.start_save(
                        tensors, tree, where, knobs, noted, apart=parts, base=earlier
                    ),
                    where,
                    [tensors],
                    hold,
                    noted,
                    promoter,
                    is_whole=is_whole,
                )
            if not is_whole and not (may_return and is_copied):
                handle._wait_copied()
    except BaseException:  # including Ctrl-C
        try:
            if handle is not None:
                handle._abandon()
        finally:
            hold.end()  # first: Ctrl-C may end the next wait, and steps would wait forever
            hold.wait_copied()
        raise
    return handle


def release_memory() -> int:
    """Return all staging memory that no save or load is using to the system.

    The pool keeps ``pool_bytes`` for the next save until the process ends. Memory that background
    saves took beyond that is kept for an hour at most, or until other programs need it. After
    ``result()`` a save uses no staging memory. `CheckpointManager.close` also calls this.

    Returns:
        How many bytes were released.
    """
    for let_go in _jobs.letting_go:
        let_go()
    return _native.release_memory()


def _prepared(
    path: StrPath, step: int | None, metrics: Mapping[str, Any] | None, config: Config | None
) -> tuple[str, Config, tuple[int | None, dict[str, float]], Promoter | None]:
    """Check a save's arguments.

    Returns:
        The absolute path; the settings; the step and the metrics for the manifest; and the copier
        to the tiers, or None.
    """
    config = given(config)
    where, noted = absolute(path), (step_number(step), metrics_of(metrics))
    _jobs.log_unreported()
    _concurrent_saves.refuse_other_ranks(where)
    return where, config, noted, _tier_copies.of_config(where, config)


def _encoded(
    state_dict: dict[Any, Any], droppable: Iterable[str], *, allow_pickle: bool
) -> tuple[_encode.Encoded, list[str]]:
    """Encode a state, and check the names of parts that get files of their own.

    Raises:
        InvalidStateError: values that can't be saved; or a name that the state does not have.
    """
    names = names_of_parts(droppable, "droppable")
    taken = Parts(state_dict)
    for name in names if isinstance(state_dict, dict) else ():
        if not _has(state_dict, name, taken):
            raise InvalidStateError(
                f"droppable: the state has nothing named {name!r}, and nothing below it, in dicts "
                "with keys of text or integers"
            )
    encoded = _encode.encode(state_dict, allow_pickle=allow_pickle, stand_in=taken.stand_in)
    return encoded, names


def _has(state_dict: dict[Any, Any], name: str, taken: Parts) -> bool:
    """Return whether `slim` could drop a name from a dict, whose keys may have dots."""
    for key, value in state_dict.items():
        if type(key) not in (str, int):
            continue
        step = str(key)
        if step == name or step.startswith(f"{name}."):
            return True
        inner = taken.stand_in(value, (key,))
        is_above = name.startswith(f"{step}.") and type(inner) in (dict, OrderedDict)
        if is_above and _has(inner, name[len(step) + 1 :], taken):
            return True
    return False
