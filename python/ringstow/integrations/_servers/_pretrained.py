"""Makes a model of any checkpoint that a trainer has left: `from_pretrained`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ringstow._core._arguments import StrPath, directory_to_read, object_url
from ringstow._core._config import Config
from ringstow._core._errors import InvalidStateError, KeyMismatchError
from ringstow._reading._load import load
from ringstow._state.tree._rename import below
from ringstow.integrations._servers._weights import part_of, weights_in

if TYPE_CHECKING:
    from ringstow._state.tree._rename import Given

_CONFIG = "config.json"


def from_pretrained(
    model_class: Any,
    path: StrPath,
    *,
    prefix: str | None = None,
    rename: Given | None = None,
    verify: bool = True,
    ringstow_config: Config | None = None,
    **options: Any,
) -> Any:
    """Make a model of a checkpoint that a trainer has left, also of a sharded one.

    ::

        model = from_pretrained(AutoModelForCausalLM, "run/checkpoint-500", dtype="bfloat16")

    Reads ringstow's checkpoints and those of other programs, as `ringstow.load` does, and passes
    the weights to ``model_class.from_pretrained``, which converts, casts and places them. Takes
    host memory for the weights once.

    Args:
        model_class: a class of ``transformers``, such as ``AutoModelForCausalLM``.
        path: the checkpoint's directory or file, or its URL.
        prefix: the part of the checkpoint with the weights, such as ``"model"``; ``""`` means all
            of it. None finds it.
        rename: maps the checkpoint's names to the model's; see `ringstow.load_into`.
        verify: compare checksums, if the checkpoint has any.
        ringstow_config: ringstow's settings; None means the defaults.
        **options: arguments of ``from_pretrained`` other than ``state_dict=``. ``config=`` is
            needed, if the checkpoint has no ``config.json``: a configuration, or the name or
            directory of one.

    Returns:
        The model, in evaluation mode, as ``from_pretrained`` returns it.

    Raises:
        TypeError: there is a ``state_dict=``.
        InvalidStateError: the checkpoint has no ``config.json``, and there is no ``config=``.
        KeyMismatchError: the checkpoint has no weights of a model, or several; or none that the
            model has.
        Exception: any error of `ringstow.load`, and of ``from_pretrained``.
    """
    if "state_dict" in options:
        raise TypeError(
            "state_dict= has no place here: the weights are the checkpoint's. For others call "
            f"{getattr(model_class, '__name__', 'the class')}.from_pretrained(None, config=..., "
            "state_dict=...)"
        )
    where = directory_to_read(path)
    part = part_of(where, ringstow_config, prefix)  # first: it says what is wrong with the path
    settings = _settings(where, options.pop("config", None))
    state = load(where, prefix=part or None, rename=rename, verify=verify, config=ringstow_config)
    weights = weights_in(below(state, part) if part else state, where, part)
    wants_info = options.pop("output_loading_info", False)
    model, info = _class_of(model_class, settings).from_pretrained(
        None, config=settings, state_dict=weights, output_loading_info=True, **options
    )
    missing = sorted(info["missing_keys"])
    if len(missing) >= len(model.state_dict()):
        raise KeyMismatchError(
            f"{where} has no weight of {type(model).__name__}: it has {', '.join([*weights][:3])} "
            f"and others, and the model {', '.join(missing[:3])}. prefix= names the part with the "
            'weights, and rename= maps names, such as {"module": ""}',
            path=where,
            missing=missing,
            unexpected=sorted(weights),
        )
    return (model, info) if wants_info else model


def _class_of(model_class: Any, settings: Any) -> Any:
    """Return the class of the model: an ``Auto`` class finds it by the configuration."""
    import torch

    if not hasattr(model_class, "from_config"):
        return model_class
    with torch.device("meta"):  # only to see its class
        return type(model_class.from_config(settings))


def _settings(path: str, config: Any) -> Any:
    """Return the model's configuration: the given one, or the checkpoint's.

    Raises:
        InvalidStateError: there is none.
    """
    from transformers import AutoConfig, PretrainedConfig

    if isinstance(config, PretrainedConfig):
        return config
    if config is None:
        if object_url(path) is not None or not os.path.isfile(os.path.join(path, _CONFIG)):
            raise InvalidStateError(
                f"{path} has no {_CONFIG}: give config=, a configuration or the name of a model"
            )
        config = path
    return AutoConfig.from_pretrained(config)
