"""Files of torch.save: written and read with errors that say which file, why, and what to do."""

from __future__ import annotations

import contextlib
import errno
import io
import pickle
from collections.abc import Iterator
from typing import IO, Any, cast

from ringstow._errors import CorruptCheckpointError, Error, UnsupportedError

REMEDY = "take another copy of it, or an earlier checkpoint"


def save(value: Any, stream: IO[bytes]) -> None:
    """Write a value at the stream's position, as a zip archive with offsets from there.

    Raises:
        OSError: the stream's own, which torch would replace by a message about its offsets.
        BaseException: likewise what a signal handler raised, such as KeyboardInterrupt.
    """
    import torch

    sink = _Sink(stream)
    try:
        torch.save(value, cast(IO[bytes], sink))
    except Exception as error:
        # torch ends the archive in any case, which fails then.
        first = error.__context__
        is_error = first is None or isinstance(first, Exception)
        cause = sink.refused if is_error else first
        if cause is not None:
            raise cause from None
        raise


class _Sink(io.BufferedIOBase):
    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__()
        self._stream = stream
        self.refused: BaseException | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            return self._stream.write(data)
        except BaseException as error:
            self.refused = error
            raise


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Add the path to an OSError without one, such as a write's."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise type(error)(error.errno, error.strerror, path) from None
        raise


@contextlib.contextmanager
def plain_numpy() -> Any:
    """Let torch.load with ``weights_only`` also read numpy's arrays and scalars of plain dtypes."""
    import torch

    try:
        import numpy
    except ImportError:
        yield
        return
    core = numpy._core if hasattr(numpy, "_core") else numpy.core
    kinds = [getattr(numpy.dtypes, name) for name in dir(numpy.dtypes) if name.endswith("DType")]
    makers = [core.multiarray._reconstruct, core.multiarray.scalar]
    with torch.serialization.safe_globals([*makers, numpy.ndarray, numpy.dtype, *kinds]):
        yield


def refused(what: str, error: Exception) -> UnsupportedError:
    """Return the error for a pickle that could run any code."""
    from ringstow.dcp import _private  # imports torch

    return UnsupportedError(
        f"{what} holds more than tensors and plain values, or is damaged, so it is not unpickled: "
        "if you trust who wrote it, pass allow_pickle=True (--allow-pickle). torch said: "
        f"{_private.refusal_of(error)}"
    )


def unreadable(path: str, what: str, error: Exception) -> CorruptCheckpointError:
    """Return the error for a damaged file."""
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return CorruptCheckpointError(
        f"{path}: {what} cannot be read, and is damaged or cut short ({said}); {REMEDY}", file=path
    )


@contextlib.contextmanager
def reading(path: str, what: str) -> Iterator[None]:
    """Report any failure of torch or pickle as damage: a damaged pickle can raise anything.

    Raises:
        UnsupportedError: a pickle could run any code, or needs classes that are not installed.
        CorruptCheckpointError: any other failure but the system's.
        OSError: the system refused; names the file.
    """
    try:
        with naming(path):
            yield
    except (Error, MemoryError):
        raise
    except pickle.UnpicklingError as error:
        raise refused(path if what == "it" else f"{path}: {what}", error) from error
    except OSError as error:
        # An offset from a damaged file, such as one before its beginning.
        if error.errno == errno.EINVAL:
            raise unreadable(path, what, error) from error
        raise
    except Exception as error:
        if isinstance(error, ImportError) or str(error).startswith("Can't get attribute"):
            raise UnsupportedError(
                f"{path}: {what} has values of classes that cannot be imported ({error}); install "
                "the packages it was saved with, or put them on PYTHONPATH"
            ) from error
        raise unreadable(path, what, error) from error
