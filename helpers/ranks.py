"""Chapter 14: what ranks print, which of them failed first, and ending all of them together."""

import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GRACE = 3.0  # seconds in which processes may say what became of them, before they are killed

TRACEBACK = "Traceback (most recent call last):"
CHAINED = ("direct cause of the following exception:", "another exception occurred:")

# Who failed first


@dataclass(frozen=True)
class Output:
    """What a program printed: a text for each rank, torchrun's own lines, and the seconds taken."""

    by_rank: dict[int, str]
    launcher: str
    seconds: float

    def _ipython_display_(self) -> None:
        """Show nothing at the end of a notebook's cell: the lines have been printed already."""


class RankError(RuntimeError):
    """A rank failed. `rank`, `exitcode` (-9: killed by signal 9), `traceback`, `output`.

    `tracebacks`: for each rank that failed the lines of the program itself, see `own_lines`.
    `report`: torchrun's report about all ranks, see `short_report`; empty after `spawn`.
    """

    def __init__(self, failures: Sequence["Failure"], ranks: int, output: Output | None):
        first, *others = sorted(failures, key=Failure.order)
        self.rank, self.exitcode, self.traceback = first.rank, first.exitcode, first.traceback
        self.output = output
        ordered = sorted(failures, key=lambda failure: failure.rank)
        self.tracebacks = {f.rank: own_lines(f.traceback) for f in ordered}
        self.report = short_report(output.launcher) if output else ""
        lines = [f"rank {first.rank} of {ranks} {first.how()}", first.traceback.strip()]
        lines += [f"then rank {f.rank} {f.how()}: {f.last_line()}".rstrip(": ") for f in others]
        super().__init__("\n".join(line for line in lines if line))


# What a rank reports when another one has gone: a consequence, hardly ever the cause.
LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|remote process exited|socket closed|"
    r"failed to recv|nccl communicator was aborted",
    re.IGNORECASE,
)
WAITED = re.compile(r"timed out|timeout", re.IGNORECASE)


@dataclass(frozen=True)
class Failure:
    """How one rank ended: `time` in ns where it is known, `exitcode` below 0 for a signal."""

    rank: int
    exitcode: int
    traceback: str
    time: int = 0
    named_first: bool = False  # by torchrun, which knows seconds only

    def order(self) -> tuple[Any, ...]:
        """Sort causes before consequences: a peer that is gone breaks everybody's connections."""
        killed = self.exitcode < 0 and self.exitcode != -signal.SIGTERM
        # by the launcher, when another rank had failed; this one may have been about to exit itself
        ended = self.exitcode == -signal.SIGTERM and not self.raised()
        last = self.last_line()
        lost, waited = bool(LOST_PEER.search(last)), bool(WAITED.search(last))
        return (ended, lost, waited, not killed, self.time, not self.named_first, self.rank)

    def how(self) -> str:
        """Return the end in words."""
        if self.exitcode == 0:
            return "ended before it had returned"
        if self.exitcode == -signal.SIGTERM and self.raised():
            return "failed with an exception"
        if self.exitcode > 0:
            return f"failed with exit code {self.exitcode}"
        return f"was killed by signal {-self.exitcode} ({signal.Signals(-self.exitcode).name})"

    def raised(self) -> bool:
        """Whether an exception ended it: SIGTERM alone leaves no traceback."""
        return self.traceback.startswith(TRACEBACK)

    def last_line(self) -> str:
        """Return the line of the exception itself, the traceback's last that is not indented."""
        lines = [line for line in self.traceback.splitlines() if re.match(r"\w[\w.]*(:|$)", line)]
        return lines[-1] if lines else ""


def reported_failures(output: Output) -> list[Failure]:
    """Read torchrun's report: of each rank that failed its number and exit code."""
    named = re.search(r"Root Cause.*?rank\s*: (\d+)", output.launcher, re.DOTALL)
    first = int(named[1]) if named else -1
    found = {}
    for rank, code in re.findall(
        r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: (-?\d+)", output.launcher
    ):
        text = output.by_rank.get(int(rank), "")
        failure = Failure(int(rank), int(code), last_traceback(text), 0, int(rank) == first)
        found[int(rank)] = failure
    return list(found.values())


def last_traceback(text: str) -> str:
    """Return the last traceback in `text`, with those that it names as its causes."""
    parts = text.split(TRACEBACK + "\n")
    if len(parts) == 1:  # no exception: what was said last
        return "\n".join(text.splitlines()[-5:])
    first = len(parts) - 1
    while first > 1 and parts[first - 1].strip().endswith(CHAINED):
        first -= 1
    lines = "".join(f"{TRACEBACK}\n{part}" for part in parts[first:]).splitlines()
    # C++ logs of what follows: [W1122 10:00:00.123 …
    return "\n".join(line for line in lines if not re.match(r"\[[WEI]\d{4} ", line))


FRAME = re.compile(r'  File "(?P<path>.*)", line (?P<rest>\d+, in .*)')


def own_lines(traceback: str) -> str:
    """Return `traceback` without what happened inside installed packages, with bare file names."""
    kept, inside = [], False
    for line in traceback.splitlines():
        frame = FRAME.match(line)
        if frame:
            path = Path(frame["path"])
            inside = not {"site-packages", "dist-packages", "torch"}.isdisjoint(path.parts)
            line = f'  File "{path.name}", line {frame["rest"]}'
        elif not line.startswith(" "):
            inside = False
            line = re.sub(r"\[\S*/([\w.]+:\d+)\]", r"[\1]", line)  # the place in the C++ code
        if not inside and line.strip(" ~^"):
            kept.append(line)
    return "\n".join(kept)


RULE = re.compile(r"^={9,}$", re.MULTILINE)  # above and below torchrun's report


def short_report(launcher: str) -> str:
    """Return torchrun's report from all that it printed, with tracebacks as in `own_lines`."""
    rules = list(RULE.finditer(launcher))
    if len(rules) < 2:
        return ""
    text = launcher[rules[-2].start() : rules[-1].end()]
    text = re.sub(r"^  ", "", text, flags=re.MULTILINE)  # as own_lines expects a traceback
    text = re.sub(r"(error_file: )\S+?/(\d+/error\.json)", r"\1…/\2", text)
    return own_lines(text)


# What they print


class Lines:
    """Collects the lines of several pipes, each read by a thread of its own; prints them."""

    def __init__(self, echo: bool):
        self.echo = echo
        self.lines: list[tuple[int | None, str]] = []  # rank, None for torchrun itself
        self.arriving: queue.Queue[tuple[int | None, str | None]] = queue.Queue()
        self.open = 0
        self.inside: set[int | None] = set()  # ranks in the middle of a traceback
        self.after: set[int | None] = set()  # those at the end of one
        self.held: list[str] = []  # tracebacks: printed in the end if the program lived on

    def follow(self, pipe: Any, rank: int | None) -> None:
        """Read `pipe` to its end; without a rank the lines say theirs."""
        self.open += 1
        threading.Thread(target=self._read, args=(pipe, rank), daemon=True).start()

    def _read(self, pipe: Any, rank: int | None) -> None:
        with pipe:
            for line in pipe:
                self.arriving.put((rank, line.decode("utf-8", "replace").rstrip("\n")))
        self.arriving.put((rank, None))

    def wait(self, deadline: float) -> bool:
        """Take what arrives until all pipes have ended, or time is up; return which of the two."""
        while self.open:
            left = deadline - time.monotonic()
            if left <= 0:  # also for a rank that never stops printing
                self.take_all()
                break
            try:
                self._take(*self.arriving.get(timeout=left))
            except queue.Empty:
                continue
        return not self.open

    def take_all(self) -> None:
        """Take what has arrived, without waiting."""
        for _ in range(self.arriving.qsize()):
            self._take(*self.arriving.get_nowait())

    def _take(self, rank: int | None, line: str | None) -> None:
        if line is None:
            self.open -= 1
            return
        said = re.match(r"\[rank (\d+)\] ?(.*)", line) if rank is None else None
        if said:
            rank, line = int(said[1]), said[2]
        line = re.sub(r"^\[rank\d+\]: ?", "", line)  # PyTorch puts it before tracebacks
        self.lines.append((rank, line))
        if not self.echo or rank is None:
            return
        if line == TRACEBACK:
            self.inside.add(rank)
        chained = line.endswith(CHAINED) or (not line and rank in self.after)
        if rank in self.inside or chained:
            self.held.append(f"[rank {rank}] {line}")
        else:
            print(f"[rank {rank}] {line}", flush=True)
        self.after.discard(rank)
        if rank in self.inside and re.match(r"\w[\w.]*(:|$)", line):
            self.inside.remove(rank)  # the exception itself, after indented lines
            self.after.add(rank)

    def print_held(self) -> None:
        """Print tracebacks of errors that the program has survived; others are in the RankError."""
        for line in self.held:
            print(line, flush=True)

    def output(self, ranks: int, seconds: float) -> Output:
        def text(rank: int | None) -> str:
            return "".join(f"{line}\n" for said, line in self.lines if said == rank)

        return Output({rank: text(rank) for rank in range(ranks)}, text(None), seconds)


def unfinished(what: str, timeout: float, output: Output) -> str:
    """Return the message of a TimeoutError: what was cut off, and the last line of each rank."""
    said = {rank: text.splitlines()[-1:] for rank, text in output.by_rank.items()}
    last = "; ".join(f"rank {r}: {line[0] if line else '(nothing)'}" for r, line in said.items())
    return f"{what} had not ended after {timeout:g} s and was killed; last lines: {last}"


# The end of all of them


def end_tree(process: subprocess.Popen) -> None:
    """End a process and all that descend from it: torchrun gives each rank its own session."""
    if process.poll() is not None:
        return
    tree = descendants(process.pid)
    process.terminate()  # torchrun passes it on to the ranks
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        tree |= descendants(process.pid)
        process.kill()
        process.wait()
    for pid in tree:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # gone already, as it should be


def descendants(pid: int) -> set[int]:
    """Return the ids of the children of `pid`, their children, and so on."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found, todo = set(), [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            found.add(child)
            todo.append(child)
    return found


def _parents() -> Iterator[tuple[int, int]]:
    """Yield (id, id of the parent) of every process."""
    if not Path("/proc/self/stat").exists():  # macOS
        command = ["ps", "-A", "-o", "pid=,ppid="]
        table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for line in table.splitlines():
            child, parent = line.split()
            yield int(child), int(parent)
        return
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        yield int(path.parent.name), int(fields[1])
