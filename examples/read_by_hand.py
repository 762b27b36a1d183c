"""Reads a checkpoint without ringstow: by docs/format.md alone, with Python's standard library.

    python examples/read_by_hand.py run/step-1000

prints each tensor and the tree of values. It checks every byte that it reads.
"""

import json
import sys
import zlib
from pathlib import Path
from typing import Any, NamedTuple

# Bytes of an element; docs/format.md has the rare dtypes, too.
ITEM = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2,
        "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
        "C128": 16}  # fmt: skip


class Tensor(NamedTuple):
    """A tensor: safetensors' name of its dtype, its shape, and its bytes in row-major order."""

    dtype: str
    shape: list[int]
    data: bytes


def read_manifest(directory: Path) -> dict[str, Any]:
    text = (directory / "manifest.json").read_bytes()
    body, _, trailer = text.rpartition(b',"crc32":"')
    if int(trailer[:8], 16) != zlib.crc32(body):
        raise ValueError("the manifest is damaged")
    manifest: dict[str, Any] = json.loads(text)
    if manifest["format"] != "ringstow" or manifest["version"] != 1:
        raise ValueError("not a checkpoint of this version")
    return manifest


def read_shard(directory: Path, file: dict[str, Any], block: int) -> bytes:
    path: Path = directory / file["name"]
    if not path.exists():  # a save that was killed after its commit has not renamed it
        path = directory / f"{file['name']}.part"
    content = path.read_bytes()
    sums = [zlib.crc32(content[at : at + block]) for at in range(0, len(content), block)]
    if len(content) != file["bytes"] or "".join(f"{one:08x}" for one in sums) != file["crc32"]:
        raise ValueError(f"{path} is damaged")
    return content


def assemble(entry: dict[str, Any], shards: list[bytes]) -> Tensor:
    """Put the chunks of a tensor, each a box of it, where they belong."""
    shape, item = entry["shape"], ITEM[entry["dtype"]]
    strides = [item] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    whole = bytearray(strides[0] * shape[0] if shape else item)
    for chunk in entry["chunks"]:
        sizes, offsets = chunk.get("sizes", shape), chunk.get("offsets", [0] * len(shape))
        row = (sizes[-1] if sizes else 1) * item
        starts = [0]  # of each row of the box in the whole tensor
        for size, offset, stride in zip(sizes[:-1], offsets, strides, strict=False):
            starts = [at + (offset + n) * stride for at in starts for n in range(size)]
        last = offsets[-1] * item if offsets else 0
        for number, start in enumerate(starts if 0 not in sizes else []):
            at = chunk["begin"] + number * row
            whole[start + last : start + last + row] = shards[chunk["file"]][at : at + row]
    return Tensor(entry["dtype"], shape, bytes(whole))


def read(directory: Path) -> tuple[dict[str, Tensor], Any]:
    """Return all tensors by name, and the tree: ``{"$tensor": name}`` stands for a tensor."""
    manifest = read_manifest(directory)
    block = manifest["block_bytes"]
    shards = [read_shard(directory, file, block) for file in manifest["files"]]
    tensors = {entry["name"]: assemble(entry, shards) for entry in manifest["tensors"]}
    return tensors, manifest["state"]


if __name__ == "__main__":
    tensors, tree = read(Path(sys.argv[1]))
    for name, tensor in tensors.items():
        print(name, tensor.dtype, tensor.shape, f"{len(tensor.data)} bytes")
    print(json.dumps(tree, indent=1))
