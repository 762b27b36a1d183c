"""torch.save to an open file, whose failures say what the system refused and where."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import IO, Any, cast


def save(value: Any, stream: IO[bytes]) -> None:
    """Write a value from where the stream is, as a zip archive that counts from there.

    Raises:
        OSError: the stream's own. torch, on its way out, would say only that its count is off.
    """
    import torch

    sink = _Sink(stream)
    try:
        torch.save(value, cast(IO[bytes], sink))
    except Exception:
        if sink.refused is not None:
            raise sink.refused from None
        raise


class _Sink(io.BufferedIOBase):
    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__()
        self._stream = stream
        self.refused: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            return self._stream.write(data)
        except OSError as error:
            self.refused = error
            raise


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Name the file in an OSError that names none, as a write's does."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise type(error)(error.errno, error.strerror, path) from None
        raise
