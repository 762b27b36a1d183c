"""DeepSpeed's FastFileWriter: torch.save's older format through libaio and O_DIRECT.

torch.load reads its files.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from comparing.peer import Finish, Peer, State, nothing_left

FILE = "state.pt"
BUFFER_BYTES = 256 << 20  # ringstow's pool; DeepSpeed's own default is 1 GB
BLOCK_BYTES = 4 << 20
DEPTH = 8


def prepare() -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise RuntimeError(
            "libaio's headers are missing (Debian, Ubuntu: apt-get install libaio-dev)"
        )
    AsyncIOBuilder().load(verbose=False)


class NoUtils:
    """Replaces an operation that DeepSpeed cannot build without a GPU.

    The writer's constructor looks it up. The writer calls it only for lists of storages, which
    torch.save never passes.
    """

    cast_to_byte_tensor = None

    def load(self) -> NoUtils:
        return self


def writer_class() -> Any:
    from deepspeed.io import FastFileWriter, fast_file_writer

    try:
        fast_file_writer.UtilsBuilder().load()
    except ValueError:  # "This op had not been implemented on CPU backend."
        fast_file_writer.UtilsBuilder = NoUtils
    return FastFileWriter


@cache
def handle_and_buffer() -> tuple[Any, Any]:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    handle = AsyncIOBuilder().load(verbose=False).aio_handle(
        block_size=BLOCK_BYTES, queue_depth=DEPTH, single_submit=False, overlap_events=True,
        intra_op_parallelism=1,
    )  # fmt: skip
    import torch

    return handle, handle.new_cpu_locked_tensor(BUFFER_BYTES, torch.empty(0, dtype=torch.uint8))


def save(state: State, path: Path) -> Finish:
    import torch
    from deepspeed.io import FastFileWriterConfig

    path.mkdir()
    handle, buffer = handle_and_buffer()
    config = FastFileWriterConfig(dnvme_handle=handle, pinned_tensor=buffer)
    writer = writer_class()(file_path=str(path / FILE), config=config)
    torch.save(state, writer, _use_new_zipfile_serialization=False)
    writer.close()
    return nothing_left


def load(path: Path, like: State, device: str) -> State:
    import torch

    loaded: State = torch.load(path / FILE, weights_only=True)
    return loaded


NOTE = f"{BUFFER_BYTES >> 20} MiB of buffer, blocks of {BLOCK_BYTES >> 20} MiB, depth {DEPTH}"
PEERS = {
    "deepspeed": Peer(
        "deepspeed.io", "deepspeed", save, load, fsync="own files", prepare=prepare,
        note=NOTE,
        requirements=("deepspeed==0.19.8",),
    ),
}  # fmt: skip
