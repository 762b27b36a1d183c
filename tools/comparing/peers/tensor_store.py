"""tensorstore as Orbax uses it: a zarr array a tensor, all in one OCDBT database, uncompressed
(a state of random bits gains nothing from compression)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from comparing.peer import Finish, Peer, State, nothing_left

NAMES = "names.json"  # listing an OCDBT database is not what is compared


def as_array(tensor: Any) -> Any:
    """The tensor's memory as NumPy sees it; bfloat16 by ml_dtypes, as JAX has it."""
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


def spec(path: Path, name: str) -> dict[str, Any]:
    store = {"driver": "ocdbt", "base": f"file://{path.absolute()}/", "path": name}
    return {"driver": "zarr", "kvstore": store}


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
        # A reference is enough: nothing changes the arrays before the commit.
        done = [
            opened.result().write(array, can_reference_source_data_indefinitely=True)
            for opened, array in writes
        ]
        for write in done:
            write.copy.result()
    (path / NAMES).write_text(json.dumps(list(state)))
    return nothing_left


def load(path: Path, like: State) -> State:
    import tensorstore

    context = tensorstore.Context()
    names = json.loads((path / NAMES).read_text())
    opened = {
        name: tensorstore.open(spec(path, name), read=True, context=context) for name in names
    }
    reads = {name: store.result().read() for name, store in opened.items()}
    return {name: as_tensor(read.result()) for name, read in reads.items()}


PEERS = {
    "tensorstore": Peer(
        "tensorstore", "tensorstore", save, load, fsync="own files",
        requirements=("tensorstore==0.1.86",),
    ),
}  # fmt: skip
