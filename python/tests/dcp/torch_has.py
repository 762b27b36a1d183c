"""Marks for tests that an older torch cannot run, based on its functions' parameters."""

from __future__ import annotations

import inspect

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner


def takes(function, name):
    """Return True if a function of torch has a parameter of this name."""
    return name in inspect.signature(function).parameters


def _needs(name, function):
    return pytest.mark.skipif(not takes(function, name), reason=f"torch without {name}")


needs_async_stager = _needs("async_stager", dcp.async_save)
needs_background_process = _needs("async_checkpointer_type", dcp.async_save)
needs_use_collectives = _needs("use_collectives", dcp.save)
needs_no_dist = _needs("no_dist", dcp.save)
needs_plan_caching = _needs("enable_plan_caching", DefaultSavePlanner)
needs_staging_options = pytest.mark.skipif(
    not hasattr(staging, "StagingOptions"), reason="torch without StagingOptions"
)


def stager_option(stager):
    """Return the options of an async_save with a stager; empty for None."""
    return {} if stager is None else {"async_stager": stager}
