"""Single files as streams, for programs that insist on one: `torch.save`, `pickle.dump`, NumPy.

`open_write` publishes a file whole when it is closed, or not at all; `open_read` reads ahead and
compares checksums if there are any. See docs/streams.md.
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
        """What torch.save takes for a file."""

else:
    _File = io.BufferedIOBase


def open_write(
    path: StrPath,
    *,
    overwrite: bool = True,
    checksums: bool = False,
    config: Config | None = None,
) -> FileWriter:
    """Open a file to be written as a stream, by io_uring and O_DIRECT where they work.

    The file appears at the path, durable and whole, when the stream is closed. Until then, and if
    the ``with`` block raises, the process is killed or the stream is never closed, an earlier file
    stays as it is::

        with ringstow.open_write("model.pt") as f:
            torch.save(state, f)

    Args:
        path: the file. Its directory must exist. A link stays, and the file that it leads to is
            replaced; owner, group and permissions stay, too.
        overwrite: whether an existing file is replaced.
        checksums: whether to store checksums beside the file, in ``NAME.ringstow``; `open_read`
            compares them.
        config: the settings; None means the defaults.

    Raises:
        FileExistsError: the file exists, and ``overwrite`` is false.
        InvalidStateError: the path is a URL, a device or FIFO, or a link that leads nowhere.
        OSError: no such directory, no permission, or the path is a directory.
    """
    file = _native.FileWriter(absolute(path), native_json(config), overwrite, checksums)
    return FileWriter(os.fspath(path), file)


def open_read(path: StrPath, *, config: Config | None = None) -> FileReader:
    """Open a file to be read as a stream, several blocks ahead.

    If ``NAME.ringstow`` beside it holds the checksums of this content, each chunk is compared
    before any of its bytes are returned. Otherwise `FileReader.unchecked` says why not.

    Args:
        path: the file. Any program may have written it.
        config: the settings; None means the defaults.

    Raises:
        InvalidStateError: the path is a URL.
        OSError: no such file, no permission, or the path is a directory.
    """
    return FileReader(os.fspath(path), _native.FileReader(absolute(path), native_json(config)))


class _Stream(_File):
    """What writer and reader share."""

    name: str
    mode: str

    _closed = False

    @property
    def closed(self) -> bool:
        """Whether the stream is closed or aborted."""
        return self._closed

    def fileno(self) -> int:
        """Raise ``io.UnsupportedOperation``: who writes to a descriptor bypasses the stream."""
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
    """A binary file that can be written from beginning to end; see `open_write`.

    Attributes:
        name: the path, as it was given.
        mode: ``"wb"``.
        report: what was written, and how, once the stream is closed.
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

        Waits for the disk while no staging buffer is free.

        Raises:
            OSError: the system refused, such as a full disk. Nothing can be published then.
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
        """Raise ``io.UnsupportedOperation``: what was written is on its way to the disk."""
        self._unsupported("seek")

    def flush(self) -> None:
        """Do nothing: no byte is durable or visible before `close`."""
        self._check_open()

    def close(self) -> None:
        """Make the file durable and publish it; do nothing if that was done, or after `abort`.

        Raises:
            OSError: the system refused. The earlier file is there then, unless the message says
                that this one is published.
            InvalidStateError: a write has failed before.
        """
        if self._closed:
            return
        from ringstow._reports._io_reports import WriteReport

        self._closed = True
        self.report = WriteReport.from_json(self._file.finish())

    def abort(self) -> None:
        """Publish nothing, and remove what was written."""
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
        # torch.save replaces the system's error by one of its own, about positions in a zip file.
        if (
            self._failure is not None
            and isinstance(error, Exception)
            and error is not self._failure
        ):
            raise self._failure from error

    # That of the base class would close the stream, and so publish half a file.
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
    """A binary file that can be read from anywhere; see `open_read`.

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
        """Return the next ``size`` bytes, fewer at the end; all that are left for -1 or None.

        Raises:
            CorruptCheckpointError: a chunk differs from its checksum.
            OSError: the system refused, such as a failing disk.
        """
        self._check_open()
        left = max(self.size - self._file.tell(), 0)
        return self._file.read(left if size is None or size < 0 else min(size, left))

    def read1(self, size: int = -1, /) -> bytes:
        """Return bytes that were read ahead, ``size`` at most."""
        self._check_open()
        found = self._file.peek(io.DEFAULT_BUFFER_SIZE if size < 0 else size)
        self._file.seek(self._file.tell() + len(found))
        return found

    def readinto(self, buffer: Any, /) -> int:
        """Fill a writable buffer; return how many bytes there were.

        Raises:
            CorruptCheckpointError: a chunk differs from its checksum.
            OSError: the system refused, such as a failing disk.
        """
        self._check_open()
        view = memoryview(buffer)
        return self._file.readinto(view.cast("B")) if view.nbytes else 0

    def peek(self, size: int = 0, /) -> bytes:
        """Return some of the next bytes, at least one before the end; the position stays."""
        self._check_open()
        return self._file.peek(max(size, io.DEFAULT_BUFFER_SIZE))

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Set where the next read begins; return it.

        Raises:
            ValueError: it would be before the beginning.
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
        """Free the memory of what was read ahead."""
        if not self._closed:
            self._closed = True
            self._file.close()

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.close()
