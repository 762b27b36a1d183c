"""Files of torch.save, with errors that say which file, why, and what to do."""

from __future__ import annotations

import io
from typing import IO, Any, cast


def save(value: Any, stream: IO[bytes]) -> None:
    """Write a value at the stream's position, as a zip archive with offsets from there.

    Raises:
        OSError: the stream's own error, which torch would replace with a message about offsets.
            BaseException: an error of a signal handler, such as KeyboardInterrupt.
    """
    import torch

    sink = _Sink(stream)
    try:
        torch.save(value, cast(IO[bytes], sink))
    except Exception as error:
        # torch ends the archive even after an error, and that then fails.
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
