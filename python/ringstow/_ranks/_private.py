"""The undocumented parts of torch that the ranks use. A new torch may rename any of them."""

from __future__ import annotations

import logging
import uuid
from typing import Any, cast

import torch.distributed as dist

from ringstow._state._torch_private import rebound

_log = logging.getLogger("ringstow")


def beside(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Make a gloo group of the ranks of a group. Only these ranks call this.

    torch derives a group's name from the groups that a process knows, which differ between ranks:
    members could wait for each other under different names, and then all ranks in their next
    ``new_group``. So the first rank chooses a name, and torch's count of groups is unchanged. If a
    newer torch names groups in another way, this returns the group itself, with a warning.
    """
    name = [uuid.uuid4().hex]
    try:
        new_group = rebound(
            dist.distributed_c10d._new_group_with_tag, _process_group_name=lambda *_, **__: name[0]
        )
    except AttributeError:
        _log.warning(
            "this torch gives ringstow no group of its own: do not communicate in the group of a "
            "save while it runs in the background"
        )
        return group
    dist.broadcast_object_list(name, src=dist.get_global_rank(group, 0), group=group)
    ranks = dist.get_process_group_ranks(group)
    made: Any = new_group(ranks, backend="gloo", use_local_synchronization=True)
    return cast("dist.ProcessGroup", made)
