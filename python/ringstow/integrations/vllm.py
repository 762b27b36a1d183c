"""vLLM loads every checkpoint that a trainer has left: ``--load-format ringstow``.

vLLM finds this module by the entry point of its plugins in each of its processes, as soon as
ringstow is installed beside it. Needs the package ``vllm``. See docs/servers.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from ringstow._core._config import Config
from ringstow._core._errors import InvalidStateError, KeyMismatchError
from ringstow._ranks._concurrent_saves import ranks
from ringstow.integrations._servers._weights import part_of, weights

__all__ = ["LOAD_FORMAT", "register", "weights"]

LOAD_FORMAT = "ringstow"
"""The name of the load format."""
_OPTIONS = frozenset({"prefix", "rename", "verify"})


def register() -> None:
    """Register the load format; vLLM calls it in each process.

    Further calls do nothing. ``model_loader_extra_config`` takes ``prefix``, ``rename`` and
    ``verify``, as `weights` does.
    """
    from vllm.model_executor import model_loader

    known = getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {})
    if LOAD_FORMAT not in known:
        model_loader.register_model_loader(LOAD_FORMAT)(_loader())


def _loader() -> type:
    from vllm.model_executor.model_loader import BaseModelLoader

    class RingstowModelLoader(BaseModelLoader):
        """Loads a model's weights out of a checkpoint, with every checksum compared."""

        def __init__(self, load_config: Any) -> None:
            super().__init__(load_config)
            self._options = _options(load_config.model_loader_extra_config)

        def download_model(self, model_config: Any) -> None:
            """Refuse a path without a model's weights; nothing is downloaded."""
            if self._options.get("prefix") is None:
                part_of(_path(model_config), None)

        def load_weights(self, model: Any, model_config: Any) -> None:
            """Load all weights into a model.

            Raises:
                KeyMismatchError: the checkpoint lacks weights of the model.
                Exception: any error of `weights`, and of the model's ``load_weights``.
            """
            path = _path(model_config)
            loaded = model.load_weights(_on_ranks(path, self._options))
            if loaded is None or getattr(model_config, "quantization", None) is not None:
                return
            missing = sorted({name for name, _ in model.named_parameters()} - set(loaded))
            if missing:
                raise KeyMismatchError(
                    f"{path} lacks weights of the model: {', '.join(missing[:20])}. In "
                    "model_loader_extra_config, prefix names the part with the weights, and rename "
                    'maps names, such as {"rename": {"module": ""}}',
                    path=path,
                    missing=missing,
                )

    return RingstowModelLoader


def _options(extra: Any) -> dict[str, Any]:
    """Return the options of the load format.

    Raises:
        InvalidStateError: an unknown option.
    """
    options = dict(extra or {})
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        raise InvalidStateError(
            f"model_loader_extra_config of the load format {LOAD_FORMAT} takes "
            f"{', '.join(sorted(_OPTIONS))}, not {', '.join(unknown)}"
        )
    return options


def _path(model_config: Any) -> str:
    # A model of another place than its configuration, as for object stores.
    return getattr(model_config, "model_weights", None) or model_config.model  # type: ignore[no-any-return]


def _on_ranks(path: str, options: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights; several ranks of a host read each byte of the disk once."""
    config = Config()
    if ranks() is not None and config.direct == "auto":
        config = dataclasses.replace(config, direct="off")  # by the page cache, which they share
    return weights(path, config=config, **options)
