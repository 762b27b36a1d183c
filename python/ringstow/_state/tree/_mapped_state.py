"""The result of ``load(mmap=True)``: a dict whose tensors are views of files."""

from __future__ import annotations

from collections.abc import Callable

from ringstow._state.tree._damaged_tensors import LoadedDict


class MappedState(LoadedDict):
    """The result of ``load(mmap=True)``: a dict, whose tensors are views of mapped files.

    A write to a tensor changes this process's copy of the page, and never the file. It saves and
    loads again as a dict.
    """

    _wait: Callable[[float | None], bool] | None = None

    def wait_verified(self, timeout: float | None = None) -> bool:
        """Wait until every checksum of the mapped tensors has been compared.

        Args:
            timeout: seconds to wait at most; None means as long as it takes.

        Returns:
            True; False after the timeout.

        Raises:
            CorruptCheckpointError: bytes are damaged; names the tensors.
            ValueError: the load was called with ``verify=False``, or the files have no checksums.
            OSError: the system refused: a failing disk.
        """
        if self._wait is None:
            raise ValueError(
                "nothing compares checksums here: the load had verify=False, or another program "
                "wrote the files, without checksums"
            )
        return self._wait(timeout)
