"""The ``ringstow`` program as the wheel installs it: the Rust program, run in this process.

``ringstow convert`` and ``report`` are Python's own, and ``show`` of other programs' checkpoints:
torch reads them.
"""

from __future__ import annotations

import io
import os
import signal
import sys

from ringstow import _native


def main() -> None:
    """Run the program on ``sys.argv`` and exit with its code."""
    _use_utf8()
    # Die of Ctrl-C and of a closed pipe as any other program does, not with a traceback.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.argv[1:2] == ["show"]:
        from ringstow._program import _show

        code = _show.main(sys.argv[2:])
        if code is not None:
            sys.exit(code)
    if sys.argv[1:2] == ["report"]:
        from ringstow._program._page import _cli as report

        sys.exit(report.main(sys.argv[2:]))
    if sys.argv[1:2] != ["convert"]:
        code = _native.cli(sys.argv)
        if sys.argv[1:2] == ["ls"] and code == 0:
            from ringstow._program import _show

            _show.tell_left(sys.argv[2:])
        sys.exit(code)
    from ringstow.convert import _cli

    code = _cli.main(sys.argv[2:])
    if code == _cli.INTERRUPTED:
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGINT)
    sys.exit(code)


def _use_utf8() -> None:
    """Start again in Python's UTF-8 mode if the locale has another encoding.

    The native side and torch know names of files as UTF-8, and print them so.
    """
    if sys.getfilesystemencoding() != "utf-8" and sys.executable:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    if isinstance(sys.stdout, io.TextIOWrapper):
        is_utf8 = sys.stdout.encoding.lower() == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")
