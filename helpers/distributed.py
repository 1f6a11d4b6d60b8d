"""Chapter 14: start ranks from a notebook, and join them in a process group."""

import importlib
import inspect
import itertools
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from helpers.ranks import (
    GRACE,
    Failure,
    Lines,
    Output,
    RankError,
    end_tree,
    last_traceback,
    reported_failures,
    unfinished,
)

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# The process group

_groups = itertools.count()  # how many this process has opened
_meetings: dict[tuple[str, ...], tuple[Any, int, int]] = {}  # the store of each, rank, world size


@dataclass(frozen=True)
class Place:
    """Where this process stands: its number among all, among those of this machine, its device."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device


@contextmanager
def process_group(backend: str | None = None, timeout: float = 60.0) -> Iterator[Place]:
    """Join the group that the launcher's environment variables describe, and leave it at the end.

    After an error it is left with gloo only: with nccl, leaving may wait for the other ranks.
    backend: None takes nccl where there is CUDA, each rank on the GPU of its *local* rank, and
    gloo elsewhere. timeout: seconds that a collective waits for the other ranks (with nccl: for
    the GPU to finish it). Raises RuntimeError without a launcher, ValueError for too few GPUs.
    """
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"{', '.join(missing)} not set: no launcher has started this process. Run the file "
            "with `torchrun --standalone --nproc-per-node=2 FILE`; in a notebook, with "
            "helpers.distributed.torchrun(FILE), or spawn(function) for an imported function"
        )
    local_rank = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available() if backend is None else "nccl" in backend
    device = torch.device("cpu")
    if cuda:
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"local rank {local_rank} needs a GPU of its own, this machine has "
                f"{torch.cuda.device_count()}: start fewer ranks, or pass backend='gloo'"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)

    wait = timedelta(seconds=timeout)
    # one store for all groups: rank 0 could not open a second one while the others leave the first
    where = tuple(os.environ[name] for name in VARIABLES)
    if where not in _meetings:
        _meetings[where] = next(dist.rendezvous("env://", timeout=wait))
    store, rank, world_size = _meetings[where]
    store.set_timeout(wait)
    dist.init_process_group(
        backend or dist.get_default_backend_for_device(device),
        # names of its own, or a second group could read the addresses of the first
        store=dist.PrefixStore(f"group {next(_groups)}", store),
        rank=rank,
        world_size=world_size,
        timeout=wait,
        device_id=device if cuda else None,
    )
    try:
        yield Place(rank, world_size, local_rank, device)
    except BaseException:
        _leave_after_error()
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


def _leave_after_error() -> None:
    """Leave the group unless that may wait for the other ranks, as it may with nccl."""
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


# torchrun, from a notebook


def torchrun(
    program: str | Path,
    *arguments: object,
    ranks: int = 2,
    timeout: float = 300.0,
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    echo: bool = True,
) -> Output:
    """Run `torchrun --standalone --nproc-per-node=RANKS PROGRAM ARGUMENTS…`; print as it goes.

    program: a file ending in .py, or a module's name. env: variables beside the present ones.
    options: more of torchrun's, such as ``--max-restarts=3`` (restarts need ``--standalone`` and
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 together, which are set here). Each line is printed with
    its rank in front (`echo`), and returned. When a rank fails: RankError with the traceback of the
    one that failed first, instead of torchrun's report about all. After `timeout` seconds:
    TimeoutError with the last line of each rank. Whatever ends it, no process is left behind.
    """
    if ranks < 1:
        raise ValueError(f"expected at least 1 rank, got {ranks}")
    target = [str(program)]
    if str(program).endswith(".py"):
        if not Path(program).is_file():
            raise FileNotFoundError(f"no program {program} in {Path.cwd()}")
    else:
        target = ["-m", *target]

    with tempfile.TemporaryDirectory(prefix="torchrun-") as logs:
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
        command += ["--tee=3", f"--log-dir={logs}", *options, *target, *map(str, arguments)]
        process = subprocess.Popen(
            command,
            env=_environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the notebook is ours to handle
        )
        lines = Lines(echo)
        start = time.monotonic()
        try:
            lines.follow(process.stdout, None)
            ended = lines.wait(start + timeout)
            code = process.wait(GRACE) if ended else None
        finally:
            end_tree(process)
            lines.wait(time.monotonic() + GRACE)

    output = lines.output(ranks, time.monotonic() - start)
    if code is None:
        raise TimeoutError(unfinished(str(program), timeout, output))
    if code:
        failures = reported_failures(output)
        if not failures:  # torchrun itself did not start
            raise RuntimeError(f"torchrun ended with exit code {code}:\n{output.launcher.strip()}")
        raise RankError(failures, ranks, output)
    lines.print_held()
    return output


def torchrun_nodes(
    program: str | Path, *, nodes: int = 2, per_node: int = 2, timeout: float = 300.0
) -> list[str]:
    """Run one `torchrun --nnodes=NODES --node-rank=… --nproc-per-node=PER_NODE` for each node.

    All of them on this machine, which plays the nodes; they meet at a port that was free a moment
    ago. No restarts: this rendezvous is static (see `_environment`). Returns for each node what its
    processes have printed, one after the other. Raises RuntimeError as soon as a node fails,
    TimeoutError after `timeout` seconds; no process is left behind.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}"]
    command += [f"--nproc-per-node={per_node}"]
    command += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    deadline = time.monotonic() + timeout
    processes = []
    with tempfile.TemporaryDirectory(prefix="torchrun-") as folder:
        try:
            for node in range(nodes):
                # a file for each process: torchrun runs `python -u`, which writes a line in pieces
                logs = [f"--log-dir={Path(folder, str(node))}", "--redirects=1"]
                with Path(folder, f"{node}.txt").open("wb") as report:
                    process = subprocess.Popen(
                        [*command, *logs, f"--node-rank={node}", str(program)],
                        env=_environment(None),
                        stdin=subprocess.DEVNULL,
                        stdout=report,
                        stderr=report,
                        start_new_session=True,
                    )
                processes.append(process)
            # a node that is done waits for the others: the first failure has to end them all
            while True:
                codes = [process.poll() for process in processes]
                if None not in codes or any(codes):
                    break
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{nodes} nodes had not ended after {timeout:g} s")
                time.sleep(0.05)
        finally:
            for process in processes:
                end_tree(process)
        for node, code in enumerate(codes):
            if code:
                report = Path(folder, f"{node}.txt").read_text("utf-8", "replace")
                raise RuntimeError(f"node {node} ended with exit code {code}:\n{report}")
        return [_printed(Path(folder, str(node)), per_node) for node in range(nodes)]


def _printed(logs: Path, per_node: int) -> str:
    """Return what the processes of a node have printed: LOGS/ID/attempt_0/LOCAL_RANK/stdout.log."""
    files = [next(logs.glob(f"*/attempt_0/{local}/stdout.log")) for local in range(per_node)]
    return "".join(file.read_text("utf-8") for file in files)


def _environment(env: Mapping[str, str] | None) -> dict[str, str]:
    """Return the variables of a rank: unbuffered output, one thread, the loopback interface."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    defaults = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}
    paths = [str(Path.cwd()), *filter(None, sys.path)]
    fixed = {
        "PYTHONUNBUFFERED": "1",
        # torchrun 2.15 keeps one store for all its restarts: a rank that starts again quickly finds
        # there the address of one that has died. Each start gets its own with this, but only from a
        # rendezvous of c10d, as by --standalone: the static one of plain torchrun ignores it
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # a rank that leaves at once would break the connections that others are still opening
        "TORCH_DIST_INIT_BARRIER": "1",
        "PYTHONUTF8": "1",  # also for torchrun, which passes on what ranks print
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] ",
    }
    return {**defaults, **os.environ, **fixed, **(env or {})}


# An imported function, on several ranks


def spawn(
    function: Callable[..., Any],
    *arguments: Any,
    ranks: int = 2,
    timeout: float = 300.0,
    env: Mapping[str, str] | None = None,
    echo: bool = True,
    **keywords: Any,
) -> list[Any]:
    """Call `function(*arguments, **keywords)` in `ranks` processes; return the results by rank.

    Each process gets the variables that torchrun would set, so the function opens
    `process_group()` as a program would. It must be importable (a notebook's function is not), and
    its result must pickle; tensors come back on the CPU. The processes are forked from one that
    has imported torch: the first call takes seconds, the next ones do not. They find a store in
    this process, at a port that the system chose; each computes with one thread, or with
    env["OMP_NUM_THREADS"]. Prints, RankError and TimeoutError are as those of `torchrun`. For
    Linux and macOS. Raises TypeError for a function with a parameter called ranks, timeout, env or
    echo: nobody could tell whose is meant.
    """
    if ranks < 1:
        raise ValueError(f"expected at least 1 rank, got {ranks}")
    _importable(function)
    _without_options_of_spawn(function)
    job = pickle.dumps((function, arguments, keywords))
    context = _context()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {**_environment(env), **_launcher_variables(store.port, ranks)}
    lines = Lines(echo)
    start = time.monotonic()
    processes, results, whole = [], [], False
    try:
        for rank in range(ranks):
            variables = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            result, theirs = context.Pipe(duplex=False)
            printed, prints = context.Pipe(duplex=False)
            process = context.Process(target=_be_rank, args=(job, variables, theirs, prints))
            process.start()
            theirs.close()
            prints.close()
            processes.append(process)
            results.append(result)
            lines.follow(os.fdopen(os.dup(printed.fileno()), "rb"), rank)
            printed.close()
        found = _collect(processes, results, lines, start + timeout)
        whole = len(found) == ranks
    finally:
        _end_ranks(processes, GRACE if whole else 0.0)
        lines.wait(time.monotonic() + GRACE)

    output = lines.output(ranks, time.monotonic() - start)
    failures = [
        # without an exception: what it said last, as a library does before it aborts
        replace(f, traceback=f.traceback or last_traceback(output.by_rank[f.rank]))
        for f in found.values()
        if isinstance(f, Failure)
    ]
    if failures:
        raise RankError(failures, ranks, output)
    if len(found) < ranks:
        raise TimeoutError(unfinished(getattr(function, "__name__", "it"), timeout, output))
    lines.print_held()
    return [pickle.loads(found[rank]) for rank in range(ranks)]


def _importable(function: Callable[..., Any]) -> None:
    main = sys.modules["__main__"]
    if getattr(function, "__module__", "") == "__main__" and not hasattr(main, "__file__"):
        raise ValueError(
            f"{function.__qualname__} is defined in a notebook, which no other process can import: "
            "write it to a file with %%writefile, then import it from there, or torchrun the file"
        )


def _without_options_of_spawn(function: Callable[..., Any]) -> None:
    for name in ("ranks", "timeout", "env", "echo"):
        if name in inspect.signature(function).parameters:
            raise TypeError(
                f"{function.__qualname__} has a parameter {name!r}, and so has spawn: "
                "give the function's another name"
            )


def _context() -> multiprocessing.context.BaseContext:
    context = multiprocessing.get_context("forkserver")
    # DDP's constructor imports torch._dynamo, which takes longer than torch itself
    context.set_forkserver_preload(["torch", "torch._dynamo", "helpers.distributed"])
    return context


def _launcher_variables(port: int, ranks: int) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 need not open one
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _be_rank(job: bytes, variables: dict[str, str], result: Connection, prints: Connection) -> None:
    """Run in a new process: take a rank's place, call the function, send back what it returned."""
    os.setsid()  # what this rank starts is killed with it
    for stream in (1, 2):
        os.dup2(prints.fileno(), stream)
    prints.close()
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # line by line
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))  # libgomp has read the variable before
    dist.set_debug_level_from_env()  # read when torch.distributed was imported, too
    importlib.invalidate_caches()
    try:
        function, arguments, keywords = pickle.loads(job)
        value = tree_map_only(Tensor, _to_cpu, function(*arguments, **keywords))
        result.send_bytes(b"+" + pickle.dumps(value))
    except BaseException as error:  # also SystemExit: it is reported, and raised in the parent
        text = "".join(traceback.format_exception(error.with_traceback(_inside(error))))
        result.send_bytes(b"-" + pickle.dumps((text, time.time_ns())))
        _leave_after_error()
        sys.exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()


def _to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()  # a view would bring its whole storage along


def _inside(error: BaseException) -> Any:
    """Return the traceback without the frame of `_be_rank`, which nobody needs to see."""
    return error.__traceback__.tb_next


def _collect(
    processes: list[Any], results: list[Connection], lines: Lines, deadline: float
) -> dict[int, Any]:
    """Wait for every rank's result; after a failure only for a moment."""
    found: dict[int, Any] = {}
    while len(found) < len(processes) and time.monotonic() < deadline:
        waiting = {results[rank]: rank for rank in range(len(processes)) if rank not in found}
        for ready in multiprocessing.connection.wait(list(waiting), timeout=0.05):
            rank = waiting[ready]
            found[rank] = _result(rank, processes[rank], ready)
            if isinstance(found[rank], Failure):
                deadline = min(deadline, time.monotonic() + GRACE)
        lines.take_all()
    return found


def _result(rank: int, process: Any, connection: Connection) -> bytes | Failure:
    try:
        message = connection.recv_bytes()
    except EOFError:  # it ended without a word: killed, or os._exit
        process.join(GRACE)
        return Failure(rank, process.exitcode or 0, "", time.time_ns())
    if message[:1] == b"+":
        return message[1:]
    text, when = pickle.loads(message[1:])
    return Failure(rank, 1, text, when)


def _end_ranks(processes: list[Any], patience: float) -> None:
    """Let the ranks leave by themselves for `patience` seconds, then kill them."""
    deadline = time.monotonic() + patience
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # with all that it started
        except ProcessLookupError:  # none is left; or it has no session of its own yet
            process.kill()
    for process in processes:
        process.join()
