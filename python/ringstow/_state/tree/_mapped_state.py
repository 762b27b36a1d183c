"""The result of ``load(mmap=True)``: a dict whose tensors are views of files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringstow._state.tree._damaged_tensors import LoadedDict


class MappedState(LoadedDict):
    """The result of ``load(mmap=True)``: a dict, whose tensors are views of mapped files.

    A write to a tensor changes this process's copy of the page, and never the file. It saves and
    loads again as a dict. Its pickle and its copies are dicts, too.
    """

    _wait: Callable[[float | None], bool] | None = None

    def wait_verified(self, timeout: float | None = None) -> bool:
        """Wait until every checksum of the mapped tensors has been compared.

        Args:
            timeout: seconds to wait at most; None means as long as it takes.

        Returns:
            True, at once if the files have no checksums, which the load logs; False after the
            timeout.

        Raises:
            CorruptCheckpointError: bytes are damaged; names the tensors.
            ValueError: the load was called with ``verify=False``.
            OSError: the system refused: a failing disk.
        """
        if self._wait is None:
            raise ValueError("nothing compares checksums here: the load had verify=False")
        return self._wait(timeout)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle, and copy, as the dict that a save stores: a copy of the tensors is not mapped."""
        saved = self.as_saved()
        return type(saved), (), getattr(saved, "__dict__", None), None, iter(saved.items())
