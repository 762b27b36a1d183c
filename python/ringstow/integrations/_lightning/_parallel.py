"""The states that a ModelParallelStrategy saves."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from ringstow.integrations._lightning._sharded import Sharded


class Live(Sharded):
    """Returns the shards without copying them.

    Lightning's own strategy copies them to host memory first. ringstow reads them from the GPUs
    while training continues.
    """

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's shards."""
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's shards."""
        inner = getattr(optimizer, "optimizer", optimizer)  # of a LightningOptimizer
        return get_optimizer_state_dict(self.model, inner)
