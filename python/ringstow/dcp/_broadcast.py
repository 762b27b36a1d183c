"""Whether the ranks of a load read together: the notes in their plans, and their process group.

Only the coordinator knows whether every rank is willing. It says so in each plan.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlan

Broadcast = bool | dist.ProcessGroup | None


class Note(NamedTuple):
    """A plan's ``storage_data``, sent to the coordinator."""

    willing: bool
    """Whether this rank's reader broadcasts."""
    fingerprint: str | None
    """The fingerprint of the checkpoint that it has opened."""


class Together(NamedTuple):
    """The ``storage_data`` that the coordinator returns if all ranks are willing."""


def group_of(broadcast: Broadcast) -> dist.ProcessGroup | None:
    """Return the group that a reader broadcasts in; None if this process is not in it."""
    if not broadcast or not dist.is_available() or not dist.is_initialized():
        return None
    group = dist.group.WORLD if broadcast is True else broadcast
    return group if dist.get_rank(group) >= 0 else None


def together(plans: list[LoadPlan]) -> list[LoadPlan]:
    """Return plans that say that all ranks are willing."""
    note = Together()
    return [dataclasses.replace(plan, storage_data=note) for plan in plans]
