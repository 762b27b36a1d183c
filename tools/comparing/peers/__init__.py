"""Every peer by its row's name. To add one, add a module here and a line below."""

from comparing.peer import Peer
from comparing.peers import (
    deepspeed_writer,
    fast_loaders,
    meta_checkpointing,
    meta_snapshot,
    orbax,
    ours,
    stock,
    tensor_store,
    tensorizing,
)

OURS, OURS_OVER, OURS_INTO = "ringstow", "ringstow-over", "ringstow-into"
PEERS: dict[str, Peer] = {
    **ours.PEERS,
    **stock.PEERS,
    **meta_snapshot.PEERS,
    **tensorizing.PEERS,
    **tensor_store.PEERS,
    **orbax.PEERS,
    **deepspeed_writer.PEERS,
    **meta_checkpointing.PEERS,
    **fast_loaders.PEERS,
}
