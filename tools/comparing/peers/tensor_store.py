"""tensorstore as Orbax uses it: one zarr array per tensor, all in one OCDBT database.

Without compression, because random bits do not compress.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comparing.peer import Finish, Peer, State, nothing_left

DESCRIPTION = "/.zarray"  # the key of an array's metadata, after its name


def as_array(tensor: Any) -> Any:
    """Return the tensor's memory as a NumPy array; bfloat16 through ml_dtypes, as in JAX."""
    import ml_dtypes
    import torch

    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def as_tensor(array: Any) -> Any:
    import numpy
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(numpy.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def database(path: Path) -> dict[str, str]:
    return {"driver": "ocdbt", "base": f"file://{path.absolute()}/"}


def spec(path: Path, name: str) -> dict[str, Any]:
    return {"driver": "zarr", "kvstore": database(path) | {"path": name}}


def save(state: State, path: Path) -> Finish:
    import tensorstore

    path.mkdir()
    context = tensorstore.Context()
    with tensorstore.Transaction() as transaction:
        writes = []
        for name, tensor in state.items():
            array = as_array(tensor)
            metadata = {"compressor": None, "chunks": [max(1, n) for n in array.shape]}
            opened = tensorstore.open(
                spec(path, name) | {"metadata": metadata},
                create=True, dtype=array.dtype, shape=array.shape, context=context,
                transaction=transaction,
            )  # fmt: skip
            writes.append((opened, array))
        # A reference is enough, because nothing changes the arrays before the commit.
        done = [
            opened.result().write(array, can_reference_source_data_indefinitely=True)
            for opened, array in writes
        ]
        for write in done:
            write.copy.result()
    return nothing_left


def load(path: Path, like: State, device: str) -> State:
    import tensorstore

    context = tensorstore.Context()
    keys = tensorstore.KvStore.open(database(path), context=context).result().list().result()
    described = [key.decode() for key in keys if key.endswith(DESCRIPTION.encode())]
    names = [key.removesuffix(DESCRIPTION) for key in described]
    opened = {
        name: tensorstore.open(spec(path, name), read=True, context=context) for name in names
    }
    reads = {name: store.result().read() for name, store in opened.items()}
    return {name: as_tensor(read.result()) for name, read in reads.items()}


PEERS = {
    "tensorstore": Peer(
        "tensorstore", "tensorstore", save, load, fsync="own",
        requirements=("tensorstore==0.1.86",),
    ),
}  # fmt: skip
