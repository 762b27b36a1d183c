"""Watch the calls to the system that Python code makes, as ``sys::seam`` watches those of Rust.

``arm("kill:7", root)`` ends this process before its 7th call that concerns a path below ``root``;
``fail:7:5`` fails that call with error number 5. Counted are the functions of `os`, `fcntl` and
`mmap` named below, and each opening, read and write of files opened by `open`, by whatever package.
Not counted is what torch does in C++: it reads a file of torch.save that it has mapped.
"""

import builtins
import errno
import fcntl
import functools
import io
import mmap
import os
import signal

WATCHED = {
    os: (
        *("open", "stat", "lstat", "fstat", "listdir", "scandir", "readlink", "fsync", "fdatasync"),
        *("mkdir", "rmdir", "rename", "replace", "unlink", "remove", "link", "symlink"),
        *("chmod", "chown", "truncate", "ftruncate", "posix_fallocate", "utime"),
    ),
    fcntl: ("flock", "lockf", "fcntl"),
    mmap: ("mmap",),
}

_readlink = os.readlink


class _Armed:
    """Counts calls, and decides about one."""

    def __init__(self, order, root):
        what, n, *errnos = order.split(":")
        assert what in ("kill", "fail"), order
        self._root = os.path.realpath(root)
        self._n = int(n)
        self._errno = int(errnos[0]) if what == "fail" else None
        self._count = 0

    def call(self, *args):
        """Pass a call with these arguments; the paths and descriptors among them decide."""
        paths = [path for path in map(_path_of, args) if path is not None]
        if not any(self._is_below(path) for path in paths):
            return
        self._count += 1
        if self._count != self._n:
            return
        if self._errno is None:
            os.kill(os.getpid(), signal.SIGKILL)
        # As the system's: with a name only if the call was given one.
        names = [os.fspath(arg) for arg in args if not isinstance(arg, int)]
        raise OSError(self._errno, os.strerror(self._errno), *names[:1])

    def _is_below(self, path):
        return os.path.abspath(path).startswith(self._root + os.sep) or path == self._root


def _path_of(arg):
    if isinstance(arg, int) and not isinstance(arg, bool):
        try:
            return _readlink(f"/proc/self/fd/{arg}")
        except OSError:
            return None
    return os.fsdecode(arg) if isinstance(arg, (str, bytes, os.PathLike)) else None


def arm(order, root):
    """Watch this process from now on."""
    armed = _Armed(order, root)
    for module, names in WATCHED.items():
        for name in names:
            setattr(module, name, _watched(armed, getattr(module, name)))
    builtins.open = io.open = functools.partial(_open, armed, io.open)


def _watched(armed, function):
    @functools.wraps(function)
    def call(*args, **options):
        armed.call(*args[:1], *(arg for arg in args[1:2] if not isinstance(arg, int)))
        return function(*args, **options)

    return call


def _open(armed, function, file, mode="r", *args, **options):
    """Open a file; if it is one of bytes, its reads and writes are counted, too."""
    if options.get("opener") is None:
        armed.call(file)
    if "b" not in mode or args or set(options) - {"opener", "closefd", "buffering"}:
        return function(file, mode, *args, **options)
    raw = _Raw(file, mode.replace("b", ""), options.get("closefd", True), options.get("opener"))
    raw.armed = armed
    if "+" in mode:
        return io.BufferedRandom(raw)
    return io.BufferedReader(raw) if raw.readable() else io.BufferedWriter(raw)


class _Raw(io.FileIO):
    armed: _Armed

    def write(self, data):
        self.armed.call(self.fileno())
        return super().write(data)

    def readinto(self, into):
        self.armed.call(self.fileno())
        return super().readinto(into)

    def readall(self):
        self.armed.call(self.fileno())
        return super().readall()

    def truncate(self, size=None):
        self.armed.call(self.fileno())
        return super().truncate(size)


ERRORS = [errno.EIO, errno.ENOSPC, errno.EINTR, errno.ESTALE]
