"""Chooses the files of a model's weights in a directory, as `from_pretrained` does.

Pure. Directories also hold the same weights in other formats, in other precisions
(`variant="fp16"`), and files of earlier saves, which must not be mixed.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from ringstow._core._errors import InvalidStateError

INDEX = ".index.json"
MODEL_INDEX = f"model.safetensors{INDEX}"
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.")
NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.(safetensors|bin)")

# In the order in which each program searches for them.
_TRANSFORMERS = ("model.safetensors", MODEL_INDEX, "pytorch_model.bin", f"pytorch_model.bin{INDEX}")
_DIFFUSERS = tuple(
    f"diffusion_pytorch_model.{ending}{index}"
    for ending in ("safetensors", "bin")
    for index in (INDEX, "")
)
_PEFT = ("adapter_model.safetensors", "adapter_model.bin")
_PROGRAMS = (_TRANSFORMERS, _DIFFUSERS, _PEFT)
_ALL = [name for names in _PROGRAMS for name in names]


def chosen(path: str, names: Collection[str]) -> str | None:
    """Return the file of the weights in a directory, or the index of their files.

    None if no file has a known name. A variant is used only if there is nothing else.

    Raises:
        InvalidStateError: there are only variants, and several of them; names them.
    """
    for name in _ALL:
        if name in names:
            return name
    variants: dict[str, list[str]] = {}
    for name in names:
        if found := _variant_of(name):
            variants.setdefault(found[1], []).append(name)
    files = sorted(name for listed in variants.values() for name in listed)
    if len(variants) > 1:
        raise InvalidStateError(
            f"{path} holds weights in the variants {', '.join(sorted(variants))}, and none without "
            f"one: give one of the files, such as {path}/{files[0]}; there are {', '.join(files)}"
        )
    return min(files, key=_rank, default=None)


def _rank(name: str) -> int:
    plain, _ = _variant_of(name) or ("", "")
    return _ALL.index(plain)


def _variant_of(name: str) -> tuple[str, str] | None:
    """Return the name without the variant in it, and the variant; None for a shard."""
    if _SHARD.search(name):
        return None
    parts = name.split(".")
    for number in range(1, len(parts) - 1):
        plain = ".".join(parts[:number] + parts[number + 1 :])
        if plain in _ALL:
            return plain, parts[number]
    return None


def superseded(names: Collection[str]) -> set[str]:
    """Return the files of weights that no program uses, because it finds others first.

    Includes numbered files without an index.
    """
    found: set[str] = set()
    for program in _PROGRAMS:
        there = [name for name in program if name in names]
        if not there:
            continue
        found.update(there[1:])
        stems = {name.removesuffix(INDEX).rpartition(".")[0] for name in program}
        shards = filter(None, map(NUMBERED.fullmatch, names))
        found.update(shard[0] for shard in shards if shard[1] in stems)
    return found


def is_for_native(path: str, names: Collection[str]) -> bool:
    """Return whether the native reader reads the same files: all, or the files of `MODEL_INDEX`.

    It also raises a clear error for a directory with an unfinished export or download.

    Raises:
        InvalidStateError: an ambiguous directory; see `chosen`.
    """
    files = [n for n in names if n.endswith(".safetensors") and not n.startswith(".")]
    if not files or any(name.endswith(".part") for name in names):
        return bool(files)
    name = chosen(path, names)
    return name in (None, MODEL_INDEX) or (files == [name] and MODEL_INDEX not in names)
