"""The ``ringstow`` program as the wheel installs it: the Rust program, run in this process.

``ringstow convert`` and ``report`` are written in Python, and so is ``show`` for other programs'
checkpoints, which torch reads.
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
    # Let Ctrl-C and a closed pipe end the process as in any other program, without a traceback.
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

    The native side and torch use UTF-8 for file names, also when they print them.
    """
    if sys.getfilesystemencoding() != "utf-8" and sys.executable:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    if isinstance(sys.stdout, io.TextIOWrapper):
        is_utf8 = sys.stdout.encoding.lower() == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")
