"""The exceptions: the same tree as the Rust side's error enum, which constructs these classes.

Errors of the operating system are raised as OSError's own subclasses.
"""

from __future__ import annotations

from collections.abc import Sequence
from errno import ENOENT


class Error(Exception):
    """Base of all errors that ringstow raises, except OSError's own subclasses.

    Attributes have defaults in every class, so that ``Cls(*args)`` works: copy and pickle rebuild
    an exception that way and then restore its attributes.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(message)


class _PathError(Error):
    """An error that concerns the file or directory at ``path``."""

    def __init__(self, message: str = "", *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class IncompleteCheckpointError(_PathError):
    """The path holds no checkpoint that can be loaded, or only part of one.

    The subclasses say which. ``path`` is the checkpoint's directory.
    """


class NoCheckpointError(IncompleteCheckpointError, FileNotFoundError):
    """The path holds no checkpoint: nothing was saved there, or the checkpoint was removed.

    The message says what the path holds instead, such as another program's files, and what reads
    it. Also a `FileNotFoundError`, as for a path that does not exist.
    """

    errno = ENOENT


class NotCommittedError(IncompleteCheckpointError):
    """The directory holds files of a save that is in progress or was killed before its commit.

    They may also be the remains of a killed removal. Resume from an earlier checkpoint.
    """


class MissingShareError(IncompleteCheckpointError):
    """A rank's part is missing of a checkpoint that each rank saved by itself.

    Or the checkpoint is one rank's part, and has only some elements of a requested tensor. Load on
    as many ranks as saved it.
    """


class MissingFilesError(IncompleteCheckpointError):
    """The checkpoint was committed, but files that it lists are missing.

    Restore the files, or go back to an earlier checkpoint.
    """


class CorruptCheckpointError(Error):
    """Bytes on disk are not the bytes that were written.

    ``file`` and ``offset`` (bytes) locate the damage; ``expected`` and ``got`` are the recorded and
    the actual value, as text. ``tensors`` are the names of the damaged tensors; empty if unknown.
    """

    def __init__(
        self,
        message: str = "",
        *,
        file: str = "",
        offset: int = 0,
        expected: str = "",
        got: str = "",
        tensors: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.file = file
        self.offset = offset
        self.expected = expected
        self.got = got
        self.tensors = list(tensors)


class CorruptCheckpointWarning(UserWarning):
    """``load(on_corrupt="skip")`` left damaged tensors out; names each."""


class FormatError(_PathError):
    """A manifest or header that ringstow did not write. ``path`` is the file."""


class UnsupportedError(Error):
    """This version, build, kernel or file system does not support something. Says what to do."""


class InvalidStateError(Error, ValueError):
    """A value or argument cannot be saved or loaded as it is. Names its key if it has one."""


class PanickedError(Error):
    """A thread that saved or loaded panicked: a bug. An earlier checkpoint is untouched."""


class KeyMismatchError(_PathError, KeyError):
    """The keys or values of the checkpoint and the request differ.

    ``path`` is the checkpoint's directory. ``missing``: requested keys that the checkpoint lacks,
    in the order of the request; ``unexpected``: keys of the checkpoint that were not requested, in
    saved order; ``mismatched``: values of another dtype, shape or kind, each as a sentence, in
    saved order.
    """

    __str__ = Exception.__str__  # KeyError's own method puts the message in quotes

    def __init__(
        self,
        message: str = "",
        *,
        path: str = "",
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Sequence[str] = (),
    ) -> None:
        super().__init__(message, path=path)
        self.missing = list(missing)
        self.unexpected = list(unexpected)
        self.mismatched = list(mismatched)


class BusyError(_PathError):
    """Another save into the same directory is in progress. ``path`` is that directory."""


class NotDurableError(_PathError):
    """A save is committed, but may not survive a crash or power cut: the last sync failed.

    Readers see the new checkpoint; the earlier one's files are kept as well. Save again, preferably
    to another disk. An export raises it if the disk also refuses to remove the exported model
    again: the model is complete.

    ``path`` is the checkpoint's directory, ``errno`` the system's error number (None if there is
    none).
    """

    def __init__(self, message: str = "", *, path: str = "", errno: int | None = None) -> None:
        super().__init__(message, path=path)
        self.errno = errno


class ReplacedCheckpointError(_PathError):
    """Another save replaced the checkpoint after it was opened: open the newer one.

    The two were not mixed. ``path`` is the checkpoint's directory.
    """


class SaveCancelledError(_PathError):
    """The save was cancelled; an earlier checkpoint at ``path`` is untouched.

    Not a subclass of ``asyncio.CancelledError`` or of ``concurrent.futures.CancelledError``, which
    mean that a task or a future was cancelled. A task that ends with this error has failed; it was
    not cancelled.
    """


class TornSaveError(_PathError):
    """Tensors were changed while a save still read them: it failed, and nothing was committed.

    ``path`` is the checkpoint's directory; an earlier checkpoint there is unchanged. ``tensors``
    are the names of the changed tensors.
    """

    def __init__(self, message: str = "", *, path: str = "", tensors: Sequence[str] = ()) -> None:
        super().__init__(message, path=path)
        self.tensors = list(tensors)


_SHOWN_MAX = 8


def torn(path: object, tensors: Sequence[str]) -> TornSaveError:
    """Return the error of a save during which these tensors were changed or freed."""
    names = ", ".join(map(repr, tensors[:_SHOWN_MAX]))
    if len(tensors) > _SHOWN_MAX:
        names += f" and {len(tensors) - _SHOWN_MAX} more"
    return TornSaveError(
        f"the save to {path} was given up: {names} changed, or lost their memory, before the save "
        "had copied all tensors. Nothing was committed; an earlier checkpoint there stands. Change "
        'and free tensors only after handle.wait_staged(); or save with staging="snapshot", which '
        'copies everything at the call, or with staging="wait", which returns once everything is '
        "copied. (With torch.distributed.checkpoint: after staging_completion.result(), or without "
        "async_stager=.)",
        path=str(path),
        tensors=tensors,
    )


class GpuError(Error):
    """A GPU, or its driver, refused or failed. ``device`` is the GPU's number."""

    def __init__(self, message: str = "", *, device: int = 0) -> None:
        super().__init__(message)
        self.device = device
