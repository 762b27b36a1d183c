"""Single files as streams, for programs that need one: `torch.save`, `pickle.dump`, NumPy.

`open_write` publishes the complete file when it is closed, or nothing; `open_read` reads ahead and
verifies checksums if the file has them. See docs/export.md.
"""

from __future__ import annotations

import io
import os
import warnings
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from ringstow import _native
from ringstow._core._arguments import StrPath, absolute
from ringstow._core._config import Config, native_json

if TYPE_CHECKING:
    from typing import BinaryIO

    from ringstow._reports._io_reports import WriteReport

    class _File(io.BufferedIOBase, BinaryIO):  # as io.BytesIO is declared
        """The file type that torch.save accepts."""

else:
    _File = io.BufferedIOBase


def open_write(
    path: StrPath,
    *,
    overwrite: bool = True,
    checksums: bool = False,
    config: Config | None = None,
) -> FileWriter:
    """Open a file for writing as a stream, by io_uring and O_DIRECT where they work.

    The file appears at the path, durable and complete, when the stream is closed. Until then an
    earlier file is unchanged, also if the ``with`` block raises, the process is killed or the
    stream is never closed::

        with ringstow.open_write("model.pt") as f:
            torch.save(state, f)

    Args:
        path: the file. Its directory must exist. If it is a link, its target is replaced; owner,
            group and permissions are kept.
        overwrite: whether to replace an existing file.
        checksums: whether to store checksums beside the file, in ``NAME.ringstow``; `open_read`
            compares them.
        config: the settings; None means the defaults.

    Raises:
        FileExistsError: the file exists, and ``overwrite`` is false.
        InvalidStateError: the path is a URL, a device or FIFO, or a link without a target.
        OSError: no such directory, no permission, or the path is a directory.
    """
    file = _native.FileWriter(absolute(path), native_json(config), overwrite, checksums)
    return FileWriter(os.fspath(path), file)


def open_read(path: StrPath, *, config: Config | None = None) -> FileReader:
    """Open a file for reading as a stream, several blocks ahead.

    If ``NAME.ringstow`` beside it holds the checksums of this content, each chunk is verified
    before its bytes are returned. Otherwise `FileReader.unchecked` says why not.

    Args:
        path: the file. Any program may have written it.
        config: the settings; None means the defaults.

    Raises:
        InvalidStateError: the path is a URL.
        OSError: no such file, no permission, or the path is a directory.
    """
    return FileReader(os.fspath(path), _native.FileReader(absolute(path), native_json(config)))


class _Stream(_File):
    """The common base of writer and reader."""

    name: str
    mode: str

    _closed = False

    @property
    def closed(self) -> bool:
        """Whether the stream is closed or aborted."""
        return self._closed

    def fileno(self) -> int:
        """Raise ``io.UnsupportedOperation``: writes to a descriptor would bypass the stream."""
        self._unsupported("fileno")

    def isatty(self) -> bool:
        """Return False."""
        self._check_open()
        return False

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("I/O operation on closed file")

    def _unsupported(self, what: str) -> NoReturn:
        raise io.UnsupportedOperation(f"{what}: {self.name} is a stream of ringstow")

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__name__} name={self.name!r}>"


class FileWriter(_Stream):
    """A binary file that is written sequentially; see `open_write`.

    Attributes:
        name: the path, as it was given.
        mode: ``"wb"``.
        report: the bytes written, and how, once the stream is closed.
    """

    mode = "wb"
    report: WriteReport | None = None
    _failure: OSError | None = None

    def __init__(self, name: str, file: _native.FileWriter) -> None:
        self.name = name
        self._file = file

    def writable(self) -> bool:
        """Return True."""
        self._check_open()
        return True

    def write(self, data: Any, /) -> int:
        """Copy the bytes of any contiguous buffer; return how many.

        Waits for the disk if no staging buffer is free.

        Raises:
            OSError: the system refused, such as a full disk. The file can then not be published.
            RuntimeError: another thread is writing.
        """
        self._check_open()
        view = memoryview(data)
        if view.nbytes == 0:
            return 0
        try:
            return self._file.write(
                view if view.format == "B" and view.ndim == 1 else view.cast("B")
            )
        except OSError as error:
            self._failure = self._failure or error
            raise

    def tell(self) -> int:
        """Return how many bytes were written."""
        self._check_open()
        return self._file.tell()

    def seek(self, *_: int) -> NoReturn:
        """Raise ``io.UnsupportedOperation``: the bytes written may already be on disk."""
        self._unsupported("seek")

    def flush(self) -> None:
        """Do nothing: no byte is durable or visible before `close`."""
        self._check_open()

    def close(self) -> None:
        """Make the file durable and publish it; do nothing if already closed or aborted.

        Raises:
            OSError: the system refused. The earlier file is unchanged, unless the message says that
                the new one is published.
            InvalidStateError: a write has failed before.
        """
        if self._closed:
            return
        from ringstow._reports._io_reports import WriteReport

        self._closed = True
        self.report = WriteReport.from_json(self._file.finish())

    def abort(self) -> None:
        """Publish nothing, and remove the bytes written so far."""
        self._closed = True
        self._file.abort()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        self.abort()
        # torch.save replaces the system's error with its own, about positions in a zip file.
        if (
            self._failure is not None
            and isinstance(error, Exception)
            and error is not self._failure
        ):
            raise self._failure from error

    # The base class's method would close the stream, and so publish an incomplete file.
    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None and not self._closed:
            warnings.warn(
                f"{self!r} was never closed: nothing is published",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )
            self.abort()


class FileReader(_Stream):
    """A binary file that can be read from any position; see `open_read`.

    Attributes:
        name: the path, as it was given.
        mode: ``"rb"``.
        size: the file's length in bytes when it was opened.
        unchecked: why no checksums are compared; None if they are.
    """

    mode = "rb"

    def __init__(self, name: str, file: _native.FileReader) -> None:
        self.name = name
        self._file = file
        self.size = file.size
        self.unchecked = file.unchecked

    @property
    def engine(self) -> str:
        """``"uring"``, ``"portable"`` or ``"tokio-uring"``."""
        self._check_open()
        return self._file.moved()[0]

    @property
    def direct(self) -> bool:
        """Whether O_DIRECT is used."""
        self._check_open()
        return self._file.moved()[1]

    def readable(self) -> bool:
        """Return True."""
        self._check_open()
        return True

    def seekable(self) -> bool:
        """Return True."""
        self._check_open()
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next ``size`` bytes, fewer at the end; all remaining bytes for -1 or None.

        Raises:
            CorruptCheckpointError: a chunk differs from its checksum.
            OSError: the system refused, such as a failing disk.
        """
        self._check_open()
        left = max(self.size - self._file.tell(), 0)
        return self._file.read(left if size is None or size < 0 else min(size, left))

    def read1(self, size: int = -1, /) -> bytes:
        """Return at most ``size`` bytes that were read ahead."""
        self._check_open()
        found = self._file.peek(io.DEFAULT_BUFFER_SIZE if size < 0 else size)
        self._file.seek(self._file.tell() + len(found))
        return found

    def readinto(self, buffer: Any, /) -> int:
        """Fill a writable buffer; return how many bytes were read.

        Raises:
            CorruptCheckpointError: a chunk differs from its checksum.
            OSError: the system refused, such as a failing disk.
        """
        self._check_open()
        view = memoryview(buffer)
        return self._file.readinto(view.cast("B")) if view.nbytes else 0

    def peek(self, size: int = 0, /) -> bytes:
        """Return some of the next bytes, at least one before the end; keep the position."""
        self._check_open()
        return self._file.peek(max(size, io.DEFAULT_BUFFER_SIZE))

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Set where the next read begins; return it.

        Raises:
            ValueError: the position would be before the beginning.
        """
        self._check_open()
        bases = {os.SEEK_SET: 0, os.SEEK_CUR: self._file.tell(), os.SEEK_END: self.size}
        if whence not in bases:
            raise ValueError(f"whence must be 0, 1 or 2, not {whence!r}")
        position = bases[whence] + offset
        if position < 0:
            raise ValueError(f"the position {position} is before the beginning of {self.name}")
        self._file.seek(position)
        return position

    def tell(self) -> int:
        """Return where the next read begins."""
        self._check_open()
        return self._file.tell()

    def close(self) -> None:
        """Free the read-ahead buffers."""
        if not self._closed:
            self._closed = True
            self._file.close()

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.close()
