"""What ranks do in the tests of chapter 15; importable, for `helpers.distributed.spawn`."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from helpers import distributed, sharding
from helpers.models import GPT, GPTConfig

TINY = GPTConfig(vocabulary=12, context=4, layers=2, heads=4, width=8)
SMALL = GPTConfig(vocabulary=512, context=16, layers=4, heads=4, width=64)
STEPS, RATE = 6, 0.1  # of the loss curves
PARTS = 4  # sequences in a batch; divisible by every number of ranks


def gpt(config=TINY):
    """Weights large enough that every gradient matters."""
    torch.manual_seed(0)
    model = GPT(config)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.5 * torch.randn(p.shape))
    return model


def batch(config=TINY):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocabulary, (PARTS, config.context + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def part(rank, ranks, config=TINY):
    return tuple(t.chunk(ranks)[rank] for t in batch(config))


# ---- the same in one process, as functions of the parameters


def gradients_of(parameters, model):
    parameters = {name: p.requires_grad_() for name, p in parameters.items()}
    loss = loss_of(lambda x: functional_call(model, parameters, (x,)), *batch(model.config))
    return torch.autograd.grad(loss, list(parameters.values()))


def curve_of(parameters, model):
    """The losses of gradient descent, all in one graph."""
    losses = []
    for _ in range(STEPS):
        parameters = {name: p.requires_grad_() for name, p in parameters.items()}
        x, y = batch(model.config)
        loss = loss_of(lambda x, now=parameters: functional_call(model, now, (x,)), x, y)
        losses.append(loss)
        slopes = torch.autograd.grad(loss, list(parameters.values()))
        pairs = zip(parameters.items(), slopes, strict=True)
        parameters = {name: (p - RATE * slope).detach() for (name, p), slope in pairs}
    return torch.stack(losses)


def parameters_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# ---- FSDP2

POLICIES = {
    "freed": {"reshard_after_forward": True},
    "kept": {"reshard_after_forward": False},
    "mixed": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


def fsdp():
    """Gradients, losses and bytes under each policy, beside those of the parts by themselves."""
    found = {"gradients": {}, "bytes": {}}
    with distributed.process_group(timeout=60) as place:
        ranks = place.world_size
        mine = part(place.rank, ranks)
        for name, options in POLICIES.items():
            model = sharding.shard(gpt(), **options)
            loss_of(model, *mine).backward()
            gradients = [p.grad for p in model.parameters()]
            found["gradients"][name] = sharding.full_tensors(gradients)

        found["parts"] = [part_gradients(rank, ranks, torch.float32) for rank in range(ranks)]
        found["16 bits"] = [part_gradients(rank, ranks, torch.bfloat16) for rank in range(ranks)]

        model = sharding.shard(gpt())
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        found["curve"] = train(model, optimizer, mine)
        for name in ("ddp", "zero1", *POLICIES):
            found["bytes"][name] = held_bytes(name, place)
    return found


def part_gradients(rank, ranks, dtype):
    model = gpt().to(dtype)
    loss_of(model, *part(rank, ranks)).backward()
    return [p.grad.float() for p in model.parameters()]


def train(model, optimizer, mine):
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model, *mine)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean)
    return torch.stack(losses)


def held_bytes(name, place):
    """The bytes of this rank in the second step of a small GPT."""
    model = blocks_of = gpt(SMALL)
    if name in POLICIES:
        model = sharding.shard(model, **POLICIES[name])
    else:
        model = DistributedDataParallel(model)
    if name == "zero1":
        adamw = torch.optim.AdamW
        optimizer = ZeroRedundancyOptimizer(model.parameters(), adamw, lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = part(place.rank, place.world_size, SMALL)
    for _ in range(2):
        with sharding.BytesByMoment(model, optimizer, blocks_of.blocks) as moments:
            loss = loss_of(model, x, y)
            moments.mark("end of forward")
            loss.backward()
            optimizer.step()
            moments.mark("after step")
        optimizer.zero_grad()
    return dict(moments.found)
