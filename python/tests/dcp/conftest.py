"""The pools of ranks, and the path of the helpers in the folder above."""

from __future__ import annotations

import pathlib
import sys

import pytest
from ranks import Ranks

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))


def pytest_collection_modifyitems(items):
    here = pathlib.Path(__file__).parent
    for item in items:
        if here in pathlib.Path(item.path).parents:
            item.add_marker(
                pytest.mark.filterwarnings(
                    "ignore:torch.distributed is",
                    "ignore:The function definition for SavePlanner",
                    "ignore:ShardedTensor",
                    "ignore:Please use DTensor instead",
                )
            )


@pytest.fixture(scope="session")
def ranks():
    """Return the pool of a world size, which all tests share."""
    pools = {}

    def pool(world_size):
        return pools.setdefault(world_size, Ranks(world_size))

    yield pool
    for started in pools.values():
        started.stop()
