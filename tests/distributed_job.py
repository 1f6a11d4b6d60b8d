"""What ranks do in the tests of chapter 14; importable, and programs for torchrun."""

import itertools
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from helpers import collectives, data_parallel, distributed

# ---- launching


def place_and_sum(shift):
    """Two groups, one after the other, as two cells of a notebook would open them."""
    with distributed.process_group(timeout=30) as place:
        total = torch.tensor(float(place.rank + shift))
        dist.all_reduce(total)
    with distributed.process_group("gloo", timeout=30) as again:
        dist.all_reduce(torch.ones(1))
        print(f"rank {place.rank} of {place.world_size}")
        view = torch.arange(1e6)[3:5].requires_grad_()
    return {"place": place, "same": place == again, "total": total, "view": view}


def many_groups():
    """One group after the other; rank 1 comes late, when rank 0's new address may be missing."""
    total = torch.ones(1)
    for _ in range(4):
        with distributed.process_group(timeout=30) as place:
            dist.all_reduce(total)
        if place.rank == 0:
            time.sleep(0.02)
    return total


def settings():
    return {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "COLOUR", "RANK")} | {
        "threads": torch.get_num_threads(),
        "debug": dist.get_debug_level().name,
        "session": os.getsid(0) == os.getpid(),
    }


def both(first, second):
    return first, second


def with_ranks(ranks):
    return ranks


def with_timeout(timeout):
    return timeout


def with_env(env):
    return env


def with_echo(echo):
    return echo


def leave_group_open():
    dist.init_process_group("gloo")


def fail_on(rank):
    with distributed.process_group(timeout=30) as place:
        if place.rank == rank:
            try:
                {}["key"]
            except KeyError as error:
                raise ValueError(f"no such key\non rank {rank}") from error
        dist.barrier()


def die_on(rank):
    with distributed.process_group(timeout=30) as place:
        if place.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()


def exit_on(rank):
    with distributed.process_group(timeout=30) as place:
        if place.rank == rank:
            sys.exit(7)
        dist.barrier()


def leave_early():
    print("bye", flush=True)
    os._exit(0)


def start_child_and_hang(folder):
    """Ignore SIGTERM, as a rank inside of a library does, and have a child of one's own."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "300"])
    rank = os.environ["RANK"]
    Path(folder, rank).write_text(f"{os.getpid()} {child.pid}", encoding="ascii")
    print("waiting for nobody")
    time.sleep(300)


def survive():
    """Prints a traceback of its own, and lives on."""
    import traceback

    try:
        {}["key"]
    except KeyError:
        traceback.print_exc()
    print("still here")


# ---- collectives

DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
)


def part(rank, size, dtype):
    """Small whole numbers, whose sums are exact in every dtype."""
    return ((torch.arange(size) * 7 + rank * 3) % 11).to(dtype)


def reduce_everything(sizes, piece):
    """Compare both all-reduces with PyTorch's; return what differs, and the bytes sent."""
    collectives.PIECE = piece
    wrong, sent = [], {}
    with distributed.process_group(timeout=60) as place:
        for dtype in DTYPES:
            for size in sizes:
                want = part(place.rank, size, dtype)
                dist.all_reduce(want)
                for reduce in (collectives.ring_all_reduce, collectives.tree_all_reduce):
                    got = part(place.rank, size, dtype)
                    sent[reduce.__name__, dtype, size] = reduce(got)
                    if not torch.equal(got, want):
                        wrong.append((reduce.__name__, dtype, size, got, want))
        # not contiguous, and a scalar
        for tensor in (torch.arange(12.0).view(3, 4).t(), torch.tensor(5.0)):
            for reduce in (collectives.ring_all_reduce, collectives.tree_all_reduce):
                got = tensor.clone(memory_format=torch.preserve_format)
                reduce(got)
                if not torch.equal(got, tensor * place.world_size) or got.is_contiguous() != (
                    tensor.is_contiguous()
                ):
                    wrong.append((reduce.__name__, tensor, got))
    return wrong, sent


def reduce_noise(size, seed):
    """Sums that round: return what each algorithm makes of this rank's numbers, and those."""
    with distributed.process_group(timeout=60) as place:
        own = torch.randn(size, generator=torch.Generator().manual_seed(seed + place.rank))
        results = {"own": own}
        for name, reduce in (
            ("gloo", dist.all_reduce),
            ("ring", collectives.ring_all_reduce),
            ("tree", collectives.tree_all_reduce),
            ("acknowledged tree", partial(collectives.tree_all_reduce, acknowledge=True)),
        ):
            results[name] = own.clone()
            reduce(results[name])
        return results


def record_ring(elements):
    """Run the real ring; return the transfers seen from this rank, in the order it made them."""
    seen = []
    whole = torch.zeros(elements)
    starts = torch.arange(elements).tensor_split(dist_size())
    chunk_at = {int(s[0]): number for number, s in enumerate(starts)}
    batch = dist.batch_isend_irecv

    def noted(operations):
        step = {}
        for operation in operations:
            place = operation.tensor.storage_offset()
            ours = operation.tensor.untyped_storage().data_ptr() == whole.data_ptr()
            kind = "send" if operation.op is dist.isend else "receive"
            step[kind] = (operation.group_peer, chunk_at[place] if ours else "buffer")
        seen.append(step)
        return batch(operations)

    with distributed.process_group(timeout=60):
        dist.batch_isend_irecv = noted
        try:
            collectives.ring_all_reduce(whole)
        finally:
            dist.batch_isend_irecv = batch
    return seen


def dist_size():
    return int(os.environ["WORLD_SIZE"])


def count_written(elements):
    """Bytes that the kernel was given, in the own ring and in gloo's, beside what they say."""
    with distributed.process_group(timeout=60):
        tensor = torch.ones(elements)
        dist.all_reduce(tensor)  # connects
        dist.barrier()
        with collectives.bytes_written() as ring:
            says = collectives.ring_all_reduce(tensor)
        dist.barrier()
        with collectives.bytes_written() as gloo:
            dist.all_reduce(tensor)
        dist.barrier()
    return {"ring": ring.bytes, "gloo": gloo.bytes, "says": says}


# ---- DDP

SIZES = (8, 16, 4)  # of the network
SAMPLES = 32


def whole_numbers(seed=0):
    """A network and data of small whole numbers: no sum rounds, whatever its order."""
    generator = torch.Generator().manual_seed(seed)

    def integers(*shape):
        return torch.randint(-3, 4, shape, generator=generator).float()

    return network(integers), integers(SAMPLES, SIZES[0]), integers(SAMPLES, SIZES[-1])


def any_numbers(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    return network(normal), normal(SAMPLES, SIZES[0]), normal(SAMPLES, SIZES[-1])


def network(fill):
    layers = [nn.Linear(*sizes) for sizes in itertools.pairwise(SIZES)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1])
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(fill(*p.shape))
    return model


def loss_of(model, x, y):
    return (model(x) - y).square().mean()


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def ddp_gradients():
    """This rank's part of each batch through DDP: the gradients, plain and accumulated."""
    results = {}
    with distributed.process_group(timeout=60) as place:
        for name, make in (("whole", whole_numbers), ("any", any_numbers)):
            model, x, y = make()
            mine, labels = (t.chunk(place.world_size)[place.rank] for t in (x, y))
            model = DistributedDataParallel(model, bucket_cap_mb=1e-4)  # 105 bytes: several
            loss_of(model, mine, labels).backward()
            results[name] = gradients(model)

            model.zero_grad()
            halves = list(zip(mine.chunk(2), labels.chunk(2), strict=True))
            with model.no_sync():
                (loss_of(model, *halves[0]) / 2).backward()
            results[name, "alone"] = gradients(model)
            (loss_of(model, *halves[1]) / 2).backward()
            results[name, "accumulated"] = gradients(model)
    return results


def record_order(model):
    """Return a list that grows in each backward pass, by what happens, in order."""
    names = {p: name for name, p in model.module.named_parameters()}
    events = []

    def ready(parameter):
        events.append(f"gradient of {names[parameter]} is ready")

    def communicate(state, bucket):
        events.append(f"all-reduce of bucket {bucket.index()} starts")
        return default_hooks.allreduce_hook(state, bucket)

    for parameter in model.module.parameters():
        parameter.register_post_accumulate_grad_hook(ready)
    model.register_comm_hook(None, communicate)
    return events


def order_of_ddp():
    """The second backward pass of three layers, a bucket each."""
    with distributed.process_group(timeout=60):
        model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(3)])
        model = DistributedDataParallel(model, bucket_cap_mb=1e-4)
        events = record_order(model)
        for _ in range(2):
            model.zero_grad()
            events.clear()
            model(torch.ones(2, 16)).sum().backward()
    return events


def whole_and_resumed(rebuilds):
    """The weights after ten steps in one go, and with a new start after the fourth."""
    with distributed.process_group("gloo") as place:
        end, _ = train_some(place, range(10), None, rebuilds)
        _, kept = train_some(place, range(4), None, rebuilds)
        resumed, _ = train_some(place, range(4, 10), kept, rebuilds)
    return end, resumed


def train_some(place, steps, kept, rebuilds):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)]
    model = nn.Sequential(*layers).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kept:
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
    # DDP rebuilds its buckets after the first backward, unless it looks for unused parameters
    ddp = DistributedDataParallel(model, find_unused_parameters=not rebuilds)
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + place.rank)
        x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
        loss = (ddp(x) - x.sum(1, keepdim=True).sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights = [parameter.detach() for parameter in model.parameters()]
    return weights, (model.state_dict(), optimizer.state_dict())


def trace_ddp():
    """The wire and the clock of DDP steps of a model of three buckets."""
    from torch.distributed.tensor.debug import CommDebugMode  # slow to import

    with distributed.process_group(timeout=60):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(6)])
        model = DistributedDataParallel(model, bucket_cap_mb=1.5)
        x = torch.randn(64, 512)

        def step():
            model(x).sum().backward()

        for _ in range(3):
            step()
        rows = data_parallel.trace_step(step)
        dist.barrier()
        with collectives.bytes_written() as written:
            step()
        dist.barrier()
        with CommDebugMode() as calls:
            step()
        counts = {str(op): n for op, n in calls.get_comm_counts().items()}
    return {"rows": rows, "written": written.bytes, "calls": counts}


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    globals()[name](*(int(r) if r.isdigit() else r for r in rest))
