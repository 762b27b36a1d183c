"""The ``ringstow`` program as the wheel installs it: the Rust program, run in this process.

``ringstow convert`` alone is Python's own: the formats that it reads and writes are torch's.
"""

from __future__ import annotations

import signal
import sys

from ringstow import _native


def main() -> None:
    """Run the program on ``sys.argv`` and exits with its code."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if sys.argv[1:2] == ["convert"]:
        from ringstow.convert import _cli

        sys.exit(_cli.main(sys.argv[2:]))
    # Die of Ctrl-C and of a closed pipe as any other program does, not with a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_native.cli(sys.argv))
