"""What ranks do in the tests of chapter 15; importable, for `helpers.distributed.spawn`."""

import functools
import itertools
import os
import shutil
import signal
import warnings
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.debug import CommDebugMode
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from helpers import distributed, pipeline, resharding, sharding, tensor_parallel
from helpers.memory import PeakMemory
from helpers.models import GPT, MLP, GPTConfig
from helpers.training import TrainConfig, Trainer
from tests.rounding import bounds

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


@functools.cache
def single_process():
    """Gradients and losses of one process with the whole batch, and how far rounding goes."""
    model = gpt()
    found = {}
    for name, function in (("gradients", gradients_of), ("curve", curve_of)):
        value = function(parameters_of(model), model)
        bound = bounds(functools.partial(function, model=model), parameters_of(model))
        found[name] = (value, bound) if name == "gradients" else (value, bound[0])
    return found


# ---- FSDP2

POLICIES = {
    "default": {},
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
        optimizer = ZeroRedundancyOptimizer(model.parameters(), adamw, lr=1e-3, foreach=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    x, y = (t.clone() for t in part(place.rank, place.world_size, SMALL))  # not views of all
    for _ in range(2):
        with sharding.BytesByMoment(model, optimizer, blocks_of.blocks) as moments:
            loss = loss_of(model, x, y)
            moments.mark("end of forward")
            loss.backward()
            optimizer.step()
            moments.mark("after step")
        optimizer.zero_grad()

    owner = optimizer.optim if name == "zero1" else optimizer
    with PeakMemory(model, owner, x, y) as memory:
        loss = loss_of(model, x, y)
        alive = memory.by_category(at=len(memory.timeline) - 1)
    loss.backward()
    optimizer.zero_grad()

    held = sum(dict(moments.found)["after step"].values())
    held -= dict(moments.found)["after step"]["gradients"]
    peak = held + x.nbytes + y.nbytes + profiled_peak(model, optimizer, x, y)
    return dict(moments.found) | {"activations": alive["activations"], "peak": peak}


def profiled_peak(model, optimizer, x, y):
    """The most bytes that a step takes from the CPU's allocator at once, beyond those before it.

    Under FSDP it varies: gloo's threads give buffers back when they come to it.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def buckets():
    """What DDP holds before and after backward, with separate buckets and with shared ones."""
    found = []
    with distributed.process_group("gloo"):
        for view in (False, True):
            model = DistributedDataParallel(gpt(), gradient_as_bucket_view=view)
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            before = sharding.bytes_held(model, optimizer)
            loss_of(model, *batch()).backward()
            found.append((before, sharding.bytes_held(model, optimizer)))
    return found


# ---- tensor parallel

WIDE = (8, 16, 4)  # of a plain MLP


def mlp():
    torch.manual_seed(2)
    return MLP(*WIDE)


@functools.cache  # numbers are not drawn while a function is traced
def mlp_batch():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(6, WIDE[0], generator=generator), torch.randn(
        6, WIDE[-1], generator=generator
    )


def mlp_gradients_of(parameters, model):
    """Of the parameters and of the input."""
    parameters = {name: p.requires_grad_() for name, p in parameters.items()}
    x, y = (t.to(parameters["0.weight"].dtype) for t in mlp_batch())
    x.requires_grad_()
    loss = F.mse_loss(functional_call(model, parameters, (x,)), y)
    return torch.autograd.grad(loss, [x, *parameters.values()])


def named_gradients(model):
    """Whole gradients by name, with q, k and v joined again."""
    state = {name: p.grad for name, p in model.named_parameters()}
    whole = sharding.full_tensors(state.values())
    return tensor_parallel.joined(dict(zip(state, whole, strict=True)))


def tensor_parallel_job():
    found = {"counts": {}}
    with distributed.process_group(timeout=60) as place:
        mesh = init_device_mesh("cpu", (place.world_size,), mesh_dim_names=("tensor",))

        plain, (x, y) = mlp(), mlp_batch()
        by_hand = nn.Sequential(
            tensor_parallel.ColumnLinear(plain[0]), nn.ReLU(), tensor_parallel.RowLinear(plain[2])
        )
        for name, model in (
            ("by hand", by_hand),
            ("DTensor", tensor_parallel.parallelize_mlp(mlp(), mesh)),
        ):
            inputs = x.clone().requires_grad_()
            with CommDebugMode() as calls:
                F.mse_loss(model(inputs), y).backward()
            found["counts"][name] = calls_of(calls)
            gradients = [p.grad for p in model.parameters()]
            found[name] = [inputs.grad, *sharding.full_tensors(gradients)]

        found["gradcheck"], found["twice"] = checked_by_hand()
        for sequence in (False, True):
            model = tensor_parallel.parallelize_gpt(gpt(), mesh, sequence=sequence)
            with tensor_parallel.Collectives() as calls:
                loss_of(model, *batch()).backward()
            found["counts"][sequence] = dict(calls.counts)
            found[sequence] = named_gradients(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            found[sequence, "curve"] = train(model, optimizer, batch())
            model = tensor_parallel.parallelize_gpt(gpt(), mesh, sequence=sequence)
            found[sequence, "trainer"] = trained_norms(model, batch())
            found[sequence, "local"] = {n: local_shape(p) for n, p in model.named_parameters()}

        if place.world_size == 4:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
            model = tensor_parallel.parallelize_gpt(gpt(), mesh["tensor"])
            model = sharding.shard(model, mesh=mesh["data"])
            mine = part(mesh["data"].get_local_rank(), 2)
            loss_of(model, *mine).backward()
            found["2-D"] = named_gradients(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            found["2-D", "curve"] = train(model, optimizer, mine)
            found["2-D", "local"] = {n: local_shape(p) for n, p in model.named_parameters()}
            found["2-D", "trainer"] = trained_norms(
                sharding.shard(
                    tensor_parallel.parallelize_gpt(gpt(), mesh["tensor"], sequence=True),
                    mesh=mesh["data"],
                ),
                mine,
            )
    return found


def checked_by_hand():
    """gradcheck of both Functions, in step on all ranks; what a second derivative says."""
    plain = mlp().double()
    column, row = tensor_parallel.ColumnLinear(plain[0]), tensor_parallel.RowLinear(plain[2])

    def both(x):
        return row(torch.tanh(column(x)))

    x = mlp_batch()[0][:2].double().requires_grad_()
    first = torch.autograd.gradcheck(both, (x,))
    (gradient,) = torch.autograd.grad(both(x).sum(), x, create_graph=True)
    return first, message(gradient.sum().backward)


def trained_norms(model, mine):
    """The Trainer with clipping: the norms that it measures in two steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    trainer = Trainer(model, optimizer, trainer_loss, TrainConfig(steps=2, clip_norm=0.5))
    return [trainer.train_step(iter([mine]))["grad_norm"] for _ in range(2)]


def local_shape(parameter):
    return tuple(getattr(parameter, "_local_tensor", parameter).shape)


def calls_of(calls):
    return {str(operation).split(".")[-1]: n for operation, n in calls.get_comm_counts().items()}


# ---- clipping

LIMIT = 0.1


def clipping_model():
    """Five layers: `parallelize_mlp` splits four, and the last one stays an ordinary tensor."""
    torch.manual_seed(0)
    sizes = (4, 8, 4, 8, 4, 2)
    layers = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs, dtype=torch.float64), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def clipping_gradients(model):
    x = torch.arange(12, dtype=torch.float64).view(3, 4)
    model(x).square().mean().backward()
    return model


def clipping():
    """The norm and the clipped gradients of a model that is divided in one way or another."""
    found = {}
    with distributed.process_group(timeout=60) as place:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        for name in ("plain", "tensor", "data", "both", "twice"):
            model = clipping_model()
            if name in ("tensor", "both", "twice"):
                model = tensor_parallel.parallelize_mlp(model, mesh["tensor"])
            if name in ("data", "both"):
                model = sharding.fully_shard(model, mesh=mesh["data"])
            parameters = list(clipping_gradients(model).parameters())
            norm = sharding.clip_grad_norm(parameters, LIMIT)
            if name == "twice":
                norm = sharding.clip_grad_norm(parameters, LIMIT)
            found[name] = (norm, sharding.full_tensors(p.grad for p in parameters))

        model = clipping_gradients(clipping_model())
        layers = [layer for layer in model if isinstance(layer, nn.Linear)]
        own = layers[place.rank :: place.world_size]  # rank 0 has the first and the last
        parameters = [p for layer in own for p in layer.parameters()]
        parameters.append(nn.Parameter(torch.ones(3)))  # without a gradient
        norm = sharding.clip_grad_norm(parameters, LIMIT, dist.group.WORLD)
        found["stages"] = (norm, [p.grad for p in parameters[:-1]])
    return found


# ---- pipeline

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def pipeline_job():
    """Gradients and losses of the GPT in stages, and the order in which the stages worked."""
    found = {}
    with distributed.process_group(timeout=60) as place:
        rank, ranks = place.rank, place.world_size
        for name, make in SCHEDULES.items():
            stage = pipeline.split(gpt(), ranks)[rank]
            runner = PipelineStage(stage, rank, ranks, place.device)
            order = record_order(runner)
            schedule = make(runner, n_microbatches=PARTS, loss_fn=token_loss)
            optimizer = torch.optim.SGD(stage.parameters(), lr=RATE)
            losses = []
            for step in range(STEPS):
                optimizer.zero_grad()
                losses.append(pipeline.forward_backward(schedule, rank, ranks, *batch()))
                if step == 0:
                    found[name, "own"] = gradients_by_name(stage)
                pipeline.sum_tied_gradients(stage, rank, ranks)
                if step == 0:
                    found[name] = gradients_by_name(stage)
                    found[name, "order"] = list(order)
                optimizer.step()
            found[name, "curve"] = losses
            found[name, "weights"] = {n: p.detach().clone() for n, p in stage.named_parameters()}
    return found


def token_loss(logits, y):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def gradients_by_name(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def record_order(stage):
    order = []
    forward, backward = stage.forward_one_chunk, stage.backward_one_chunk

    def noted_forward(number, *arguments, **options):
        order.append(pipeline.Action(number, False))
        return forward(number, *arguments, **options)

    def noted_backward(number, *arguments, **options):
        order.append(pipeline.Action(number, True))
        return backward(number, *arguments, **options)

    stage.forward_one_chunk, stage.backward_one_chunk = noted_forward, noted_backward
    return order


# ---- checkpoints

SAVED, MORE = 3, 2  # steps until the save, and after it
OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {}),
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
}


def sharded_trainer(ranks, wrap=True, **changes):
    """Dropout draws from each rank's generator, AdamW has state, the rate follows a schedule."""
    settings = {"config": replace(TINY, dropout=0.2), "lr": 0.01, "clip_norm": 1.0} | changes
    model = gpt(settings["config"])
    if wrap:
        sharding.shard(model)
    kind, options = OPTIMIZERS[settings.get("kind", "adamw")]
    optimizer = kind(model.parameters(), lr=settings["lr"], **options)
    config = TrainConfig(steps=SAVED + MORE, clip_norm=settings["clip_norm"])
    return Trainer(model, optimizer, trainer_loss, config)


def trainer_loss(model, pair):
    return loss_of(model, *pair)


def batches_of(rank, ranks):
    """Batch number n of this rank's part, from n = `start` on."""

    def batches_from(start):
        for number in itertools.count(start):
            generator = torch.Generator().manual_seed(number)
            tokens = torch.randint(12, (PARTS, TINY.context + 1), generator=generator)
            mine = tokens.chunk(ranks)[rank]
            yield mine[:, :-1], mine[:, 1:]

    return batches_from


def whole_state(trainer):
    """Weights and optimizer state of all ranks together, by name."""
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    found = dict(model)
    for name, entries in optimizer["state"].items():
        found |= {f"{name} {entry}": value for entry, value in entries.items()}
    whole = sharding.full_tensors(found.values())
    return {name: t.detach().clone() for name, t in zip(found, whole, strict=True)}


def mesh_trainer(ranks):
    """With 4 ranks a mesh of 2 × 2, FSDP and tensor parallel; with 2, tensor parallel alone."""
    shape = (ranks // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    model = tensor_parallel.parallelize_gpt(gpt(), mesh["tensor"])
    if ranks > 2:
        sharding.shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = Trainer(model, optimizer, trainer_loss, TrainConfig(steps=9))
    mine = part(mesh["data"].get_local_rank(), ranks // 2)
    return trainer, mine


def save_mesh(folder):
    with distributed.process_group(timeout=60) as place:
        trainer, mine = mesh_trainer(place.world_size)
        trainer.train_step(iter([mine]))
        resharding.save_sharded(trainer, folder)
        return whole_state(trainer)


def load_mesh(folder):
    with distributed.process_group(timeout=60) as place:
        trainer, mine = mesh_trainer(place.world_size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the random numbers, tested elsewhere
            resharding.load_sharded(trainer, folder)
        loaded = whole_state(trainer)
        trainer.train_step(iter([mine]))
        return loaded


def state_of(trainer):
    """The optimizer's state as it is: `whole_state` gives a state to one that has none."""
    return {k: v for entries in trainer.optimizer.state.values() for k, v in entries.items()}


def save_before_training(folder):
    """Does a save before the first step change training? And can it be loaded?"""
    found = {}
    with distributed.process_group(timeout=60) as place:
        for name in ("without", "with", "loaded"):
            for kind in ("adamw", "sgd", "momentum"):
                trainer = sharded_trainer(place.world_size, kind=kind)
                torch.manual_seed(place.rank)
                path = Path(folder, kind)
                if name == "with":
                    resharding.save_sharded(trainer, path)
                if name == "loaded":
                    trainer.train_step(batches_of(place.rank, place.world_size)(7))
                    resharding.load_sharded(trainer, path)
                trainer.fit(batches_of(place.rank, place.world_size))
                if name == "loaded" and kind != "adamw":  # also one with an own state
                    resharding.save_sharded(trainer, path)
                    resharding.load_sharded(trainer, path)
                found[name, kind] = whole_state(trainer)
    return found


def die_in_save(folder, victim):
    """Save step 1; at step 2 rank `victim` is killed while it writes."""
    with distributed.process_group(timeout=20) as place:
        trainer = sharded_trainer(place.world_size)
        batches = batches_of(place.rank, place.world_size)(0)
        trainer.train_step(batches)
        resharding.save_sharded(trainer, folder)
        trainer.train_step(batches)
        if place.rank == victim:
            dcp.save = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        resharding.save_sharded(trainer, folder)


def save_again(folder):
    with distributed.process_group(timeout=60) as place:
        trainer = sharded_trainer(place.world_size)
        resharding.load_sharded(trainer, folder)
        step = trainer.step
        trainer.train_step(batches_of(place.rank, place.world_size)(step))
        resharding.save_sharded(trainer, folder)
        return step


def save_on(folder):
    """Train with two saves on the way, the second one asynchronous; return states."""
    found = {}
    with distributed.process_group(timeout=60) as place:
        group = dist.new_group(backend="gloo")
        pending = []

        def watch(trainer, metrics):
            if trainer.step == SAVED:
                found["path"] = resharding.save_sharded(trainer, folder, keep=2)
                found["saved"] = whole_state(trainer)
            if trainer.step == SAVED + 1:
                pending.append(resharding.save_sharded_async(trainer, folder, group, keep=2))
                found["saved later"] = whole_state(trainer)
                found["before publishing"] = sorted(p.name for p in Path(folder).iterdir())

        trainer = sharded_trainer(place.world_size)
        torch.manual_seed(10 + place.rank)  # dropout differs between ranks
        trainer.fit(batches_of(place.rank, place.world_size), [watch])
        found["async path"] = pending[0].finish()
        if place.rank == 0:  # kept: what follows may remove it
            shutil.copytree(folder, f"{folder} kept")
        found["end"] = whole_state(trainer)
        found["plain"] = message(trainer.save, Path(folder, "c.pt"))
        found["keep"] = message(resharding.save_sharded, trainer, folder, keep=0)
        trainer.step += 1
        step = resharding._Step.begin(trainer, folder, 2)
        failed = Future()
        if place.rank == 2:
            failed.set_exception(OSError("No space left on device"))
        else:
            failed.set_result(None)
        found["failed"] = message(resharding.PendingSave(step, failed, group).finish)
        trainer.step -= 1
        resharding.save_sharded(trainer, folder)  # step 3 has to go
        found["twice"] = resharding.save_sharded(trainer, folder).name
        found["steps"] = sorted(p.name for p in Path(folder).iterdir())
        dist.barrier()
        blocked = Path(folder, "file")
        if place.rank == 0:
            blocked.write_text("no folder", encoding="ascii")
        dist.barrier()
        found["blocked"] = message(resharding.save_sharded, trainer, blocked)
    return found


def load_on(folder, more):
    """Load the newest step, and on wish train to the end."""
    found = {"warnings": []}
    with distributed.process_group(timeout=60) as place:
        ranks = place.world_size
        for name, changes in (
            ("lr", {"lr": 0.02}),
            ("clip", {"clip_norm": 2.0}),
            ("width", {"config": replace(TINY, width=16)}),
        ):
            other = sharded_trainer(ranks, **changes)
            before = sharding.full_tensors(get_model_state_dict(other.model).values())
            found[name] = message(resharding.load_sharded, other, folder)
            after = sharding.full_tensors(get_model_state_dict(other.model).values())
            same = all(map(torch.equal, before, after))
            found[name, "unchanged"] = same and not state_of(other)

        trainer = sharded_trainer(ranks, wrap=ranks > 1)
        torch.manual_seed(99)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found["path"] = resharding.load_sharded(trainer, folder)
        found["warnings"] = [str(w.message) for w in caught if "ranks" in str(w.message)]
        found["loaded"], found["step"] = whole_state(trainer), trainer.step
        if more:
            trainer.fit(batches_of(place.rank, ranks))
            found["end"] = whole_state(trainer)
    return found


def load_damaged(folder):
    with distributed.process_group(timeout=20) as place:
        return message(resharding.load_sharded, sharded_trainer(place.world_size), folder)


def message(call, *arguments, **options):
    """The text of the exception that `call` raises; "" if it raises none."""
    try:
        call(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
