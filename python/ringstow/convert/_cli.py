"""``ringstow convert``."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import time
import warnings
from typing import Any, Self

from ringstow._core._errors import CorruptCheckpointError, Error
from ringstow._native import size
from ringstow._publish._checkpoint_kinds import KINDS, TARGETS
from ringstow._publish._replace import complete
from ringstow._reports import _progress as _progress_bars
from ringstow.convert import ConvertReport, Progress, convert

_EXAMPLES = """\
examples:
  ringstow convert model.pt ckpt                          torch.save file to ringstow
  ringstow convert dcp-dir ckpt                           stock DCP directory to ringstow
  ringstow convert hf-dir ckpt                            Hugging Face safetensors to ringstow
  ringstow convert ckpt model.pt                          ringstow to torch.save file
  ringstow convert ckpt dcp-dir --to dcp                  ringstow to stock DCP
  ringstow convert ckpt hf --to hf --prefix model. --dtype bfloat16
  ringstow convert ckpt hf --to hf --dequantize           quantized weights, dense
  ringstow convert ckpt hf --to hf --rename model.encoder=backbone
  ringstow convert s3://bucket/run/step-1000 model.pt     from an object store

If it fails or is interrupted while it writes, it removes what it wrote, and a checkpoint that it
was to replace is unchanged. While it verifies, DST is complete, and stays; the message says so. A
second Ctrl-C ends it at once, as a kill does. If it is killed, it leaves *.part, *.distcp without
.metadata, or numbered *.safetensors without an index. None of these is a checkpoint, and the next
conversion to DST removes them.

exit codes:
  0    converted, and verified unless --no-verify
  1    the source or the target is damaged
  2    it failed for another reason
  130  interrupted"""

INTERRUPTED = 130
"""The exit code after Ctrl-C."""

_SLICE_S = 5.0  # between lines without a progress bar


def main(argv: list[str]) -> int:
    """Run ``ringstow convert`` with these arguments, and return its exit code."""
    args = _parser().parse_args(argv)
    logging.basicConfig(format="ringstow: %(message)s", level=logging.WARNING)
    # Hide warnings for library developers, such as torch's about a deprecated package.
    warnings.simplefilter("ignore", FutureWarning)
    warnings.showwarning = lambda message, *_, **__: print(f"ringstow: {message}", file=sys.stderr)
    with _Interrupts() as interrupts:
        report = None
        try:
            with contextlib.nullcontext() if args.quiet else _progress() as progress:
                report = convert(
                    args.src,
                    args.dst,
                    source=args.source,
                    target=args.target,
                    progress=interrupts.passed_on_by(progress),
                    verify=not args.no_verify,
                    overwrite=args.overwrite,
                    allow_pickle=args.allow_pickle,
                    dequantize=args.dequantize,
                    rename=dict(args.rename) or None,
                    prefix=args.prefix,
                    dtype=args.dtype,
                    max_shard_size=args.max_shard_size,
                )
            interrupts.settle()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) or interrupts.came:
                left = _left(error, "unfinished files are removed")
                if report is not None:
                    left = complete(report.target, verified=report.verified)
                print(f"ringstow: interrupted; {left}", file=sys.stderr)
                return INTERRUPTED
            if isinstance(error, ImportError):
                print(f"ringstow: {error}: convert needs PyTorch; install torch", file=sys.stderr)
                return 2
            if isinstance(error, Exception):
                print(f"ringstow: {_said(error)}", file=sys.stderr)
                return 1 if isinstance(error, CorruptCheckpointError) else 2
            raise
        if not args.quiet:
            _tell(report)
        return 0


class _Interrupts:
    """Notes Ctrl-C, which torch or the import of a module may turn into another error, or drop.

    A second Ctrl-C ends the process at once, as a kill does.
    """

    came = False
    _is_settled = False

    def __enter__(self) -> Self:
        self._before = signal.getsignal(signal.SIGINT)
        self._handle_by(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        # The program's exit takes a while, and its result no longer changes.
        if not (self._is_settled and self._before is signal.SIG_DFL):
            self._handle_by(self._before)

    def settle(self) -> None:
        """Ignore Ctrl-C from now on, or raise a dropped one, before the result is printed.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        self._handle_by(signal.SIG_IGN)
        self._is_settled = not self.came
        if self.came:
            raise KeyboardInterrupt

    def _handle_by(self, handler: Any) -> None:
        if self._before not in (None, signal.SIG_IGN):
            signal.signal(signal.SIGINT, handler)

    def _note(self, *_: object) -> None:
        self.came = True
        self._handle_by(signal.SIG_DFL)
        raise KeyboardInterrupt

    def passed_on_by(self, progress: Progress | None) -> Progress:
        """Return a function that reports progress, and raises a dropped Ctrl-C."""

        def advance(phase: str, done: int, total: int) -> None:
            if self.came:
                raise KeyboardInterrupt
            if progress is not None:
                progress(phase, done, total)

        return advance


def _said(error: Exception) -> str:
    """Return an error's message: an OSError's starts with the file, any other with the type."""
    said = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        path, why = str(error.filename), str(error.strerror)
        said = why if path in why else f"{path}: {why}"
    elif not isinstance(error, (Error, OSError)):
        said = " ".join(f"{type(error).__name__}: {said}".split())
    return "; ".join(filter(None, (said, _left(error, ""))))


def _left(error: BaseException, otherwise: str) -> str:
    """Return the notes of `convert` about the target."""
    return "; ".join(getattr(error, "__notes__", ())) or otherwise


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {kind:9} {what}" for kind, what in KINDS.items())
    parser = argparse.ArgumentParser(
        prog="ringstow convert",
        description=f"Convert a checkpoint, a few tensors in memory at a time. Kinds:\n{listed}",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "src", metavar="SRC", help="the checkpoint to read; a ringstow checkpoint also by its URL"
    )
    parser.add_argument(
        "dst", metavar="DST", help="where to write; must be missing or empty without --overwrite"
    )
    parser.add_argument(
        "--from", dest="source", choices=list(KINDS), help="kind of SRC (default: detect)"
    )
    parser.add_argument(
        "--to",
        dest="target",
        choices=TARGETS,
        help="kind of DST (default: ringstow, or torch for *.pt)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace a checkpoint of the same kind at DST, once the new one is complete",
    )
    parser.add_argument(
        "--rename",
        metavar="OLD=NEW",
        type=_renamed,
        action="append",
        default=[],
        help="give names of SRC with the parts OLD the parts NEW instead: model.encoder=backbone; "
        "* is any one part, and module= leaves a part out. May be given more often. Joining and "
        "splitting tensors takes ringstow.convert.convert(rename=)",
    )
    parser.add_argument(
        "--prefix",
        default="",
        help="hf: only tensors whose names start with this, which is stripped (default: the "
        "weights of a trainer's directory, and of any other source all but an optimizer's)",
    )
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="hf: cast floating tensors"
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", help="hf: size of the largest file (default: 5GB)"
    )
    parser.add_argument(
        "--dequantize",
        action="store_true",
        help="write quantized tensors as dense ones, of the dtype that they stand for",
    )
    parser.add_argument(
        "--allow-pickle", action="store_true", help="unpickle any value, which can run any code"
    )
    parser.add_argument(
        "--no-verify", action="store_true", help="do not read back and compare what was written"
    )
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    return parser


def _renamed(text: str) -> tuple[str, str]:
    """Return the two names of ``--rename``."""
    old, equals, new = text.partition("=")
    if not (old and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not OLD=NEW, such as model.encoder=backbone")
    return old, new


def _tell(report: ConvertReport) -> None:
    verified = "verified bit by bit" if report.verified else "not verified"
    print(
        f"{report.source} ({report.source_kind}) -> {report.target} ({report.target_kind}): "
        f"{report.tensors} tensors, {size(report.tensor_bytes)} in {report.seconds:.1f} s, "
        f"{verified}"
    )
    for name, kept in report.tied:
        print(f"tied, written once: {name} is {kept}")
    for fallback in report.save.fallbacks if report.save else ():
        print(f"{fallback.wanted} -> {fallback.got}: {fallback.reason}; {fallback.remedy}")


def _progress() -> contextlib.AbstractContextManager[Progress | None]:
    if not _progress_bars.is_allowed():
        return contextlib.nullcontext()
    if _progress_bars.is_wanted():
        tqdm = _progress_bars.tqdm()
        if tqdm is not None:
            return _Bar(tqdm)
    return contextlib.nullcontext(_lines())


def _lines() -> Progress:
    """Return a function that prints a line to stderr every few seconds, if there is no bar."""
    due = time.monotonic() + _SLICE_S

    def show(phase: str, done: int, total: int) -> None:
        nonlocal due
        now = time.monotonic()
        if now >= due:
            due = now + _SLICE_S
            print(f"{phase}: {size(done)} of {size(total)}", file=sys.stderr)

    return show


class _Bar(contextlib.AbstractContextManager[Progress]):
    """Shows a tqdm bar per phase."""

    def __init__(self, tqdm: Any) -> None:
        self._tqdm = tqdm
        self._bar: Any = None
        self._phase = ""

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase != self._phase:
            self.__exit__()
            self._phase = phase
            self._bar = self._tqdm(
                desc=phase, total=total, unit="B", unit_scale=True, file=sys.stderr
            )
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
