"""Code that the integrations share. Imports no framework."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ringstow._ranks._team import Team


def ranks_or_alone(*options: Any) -> Team:
    """Return the `Ranks` (a collective call), or this process if there are no ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return Team()
    from ringstow.integrations._kit._ranks import Ranks  # needs a newer torch than one process

    return Ranks(*options)
