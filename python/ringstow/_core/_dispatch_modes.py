"""Makes real tensors in real memory, ignoring torch's dispatch modes.

A program may call ringstow under ``FakeTensorMode`` or another dispatch mode. Tensors made there
may have no memory and the address 0: a save or load with them would crash the process. So every
call that handles tensors works as if no mode were active.

A default device (``torch.set_default_device("meta")``) stays, since objects in a state may rely on
it. ringstow itself passes ``device=`` whenever it makes a tensor; tests/test_modes.py checks that.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Suspend torch's dispatch modes in this thread. Also a decorator. Imports no torch."""
    torch = sys.modules.get("torch")
    # Both names are undocumented in torch. If they are missing, the modes stay active.
    count: Any = getattr(getattr(torch, "_C", None), "_len_torch_dispatch_stack", None)
    if count is None or not count():
        yield
        return
    dispatch = sys.modules.get("torch.utils._python_dispatch")
    suspended: Any = getattr(dispatch, "_disable_current_modes", contextlib.nullcontext)
    with suspended():
        yield
