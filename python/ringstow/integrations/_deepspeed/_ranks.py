"""Communication of an engine's ranks, in a group that training does not use."""

from __future__ import annotations

from typing import Any, cast

import torch

from ringstow._core._errors import Error
from ringstow.integrations._kit import _ranks

_TEXT_BYTES = 4096


class Ranks(_ranks.Ranks):
    """All ranks; they create it together."""

    def settle(self, error: BaseException | None) -> None:
        """Raise on all ranks if one has failed, in the thread of a background save.

        Works after ``destroy_process_group``, too, since it calls the group's own method: training
        may end its groups while its last save is in progress.
        """
        said = "" if error is None else f"{type(error).__name__}: {error}"
        own = torch.zeros(_TEXT_BYTES, dtype=torch.uint8, device="cpu")
        if text := said.encode()[:_TEXT_BYTES]:
            own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        every, group = [torch.empty_like(own) for _ in range(self.size)], cast("Any", self.group)
        try:
            group.allgather([every], [own]).wait()
        except BaseException:
            if error is not None:
                raise error from None
            raise
        if error is not None:
            raise error
        for rank, one in enumerate(every):
            if text := bytes(one.tolist()).rstrip(b"\0"):
                raise Error(f"rank {rank} failed: {text.decode(errors='replace')}")
