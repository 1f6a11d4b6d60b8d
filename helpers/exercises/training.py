"""Chapter 06, exercises: two losses, clipping, early stopping, AMSGrad."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers import callbacks
from helpers.exercises.harness import Exercise
from helpers.training import TrainConfig, Trainer

NAN = float("nan")


def bce(z: Tensor, t: Tensor) -> Tensor:
    """PyTorch's mean binary cross-entropy with logits."""
    return F.binary_cross_entropy_with_logits(z, t)


def bce_cases() -> list[tuple]:
    far = torch.tensor([1000.0, -1000, 100, -100])
    return [
        (torch.randn(5), torch.rand(5)),
        (torch.randn(2, 3).double().T, torch.ones(3, 2).double()),  # not contiguous
        (far, torch.zeros(4)),
        (far, torch.ones(4)),
        (far.double(), torch.tensor([1.0, 0.0, 0.5, 0.25]).double()),
        (torch.zeros(3), torch.tensor([0.0, 1.0, 0.3])),  # max(z, 0) has a kink here, the loss none
        (torch.tensor(0.7), torch.tensor(1.0)),
    ]


def mean_of(means: Tensor, sizes: Tensor) -> Tensor:
    """Rebuild the samples, as many as each batch had, and take one mean."""
    samples = [mean.expand(n) for mean, n in zip(means, sizes.tolist(), strict=True)]
    return torch.cat(samples).mean()


def mean_of_cases() -> list[tuple]:
    return [
        (torch.rand(4).double(), torch.tensor([300, 300, 300, 100])),
        (torch.rand(2), torch.tensor([1, 7])),
        (torch.rand(1), torch.tensor([4])),
        (torch.tensor([0.5, NAN, 2.0]), torch.tensor([5, 0, 2])),  # the mean of an empty batch
        (torch.tensor([0.5, NAN, 2.0]), torch.tensor([5, 3, 2])),  # a true nan
        (torch.tensor([NAN, 1.0, NAN]).double(), torch.tensor([2, 1, 0])),
        (torch.tensor([0.5, float("inf")]), torch.tensor([5, 3])),
        (torch.rand(6)[::2], torch.tensor([3, 5, 8])),  # not contiguous
    ]


def clip(a: Tensor, b: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """PyTorch's clipping by the norm of both gradients together."""
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in (a, b)]
    for p, g in zip(parameters, (a, b), strict=True):
        p.grad = g.clone()
    nn.utils.clip_grad_norm_(parameters, bound)
    return tuple(p.grad for p in parameters)


def clip_cases() -> list[tuple]:
    return [
        (torch.randn(3, 2), torch.randn(4), 0.5),
        (torch.ones(2, 3).T, -torch.ones(1), 100.0),  # within the bound
        (torch.tensor([3.0]), torch.tensor([4.0]), 5.0),  # just at the bound
        (torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0]), 4.5),  # only their norm exceeds it
        (torch.zeros(3), torch.zeros(2, 2), 1.0),
        (torch.full((5,), 1e4).double(), torch.ones(0).double(), 2.0),
        (torch.tensor([1e-7]), torch.tensor([2e-7]), 1e-7),  # 1e-6 is more than the norm
        (torch.tensor([1e-3]), torch.tensor([2e-3]), 1e-3),
    ]


def stop_at(losses: tuple[float, ...], patience: int) -> tuple[int, int]:
    """`callbacks.EarlyStopping` watching a real run that sees these losses."""
    looks, history = iter(losses), callbacks.History()
    stop = callbacks.EarlyStopping(lambda _: next(looks), every=1, patience=patience)

    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = Trainer(model, optimizer, _zero_loss, TrainConfig(steps=len(losses)))
    trainer.fit(_endless, [stop, history])
    return stop.best_step, history["step"][-1]


def _zero_loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    return model(batch[0]).mean()


def _endless(start: int):
    while True:
        yield (torch.zeros(1, 1),)


def stop_at_cases() -> list[tuple]:
    inf = float("inf")
    return [
        ((3.0, 2, 1, 2, 2, 2), 2),
        ((5.0, 4, 3), 1),
        ((1.0, 1, 1, 0), 2),  # equal is not better
        ((2.0, 3, 1), 1),
        ((2.0, 3, 1, 4, 0.5), 2),  # the count starts over at each best
        ((2.0, 3, 1, 4, 5, 0.5), 2),
        ((1.0,), 5),
        ((3.0, NAN, 2, NAN, NAN, 1), 2),
        ((NAN, 4.0, 3), 2),
        ((NAN, NAN, 1.0), 2),
        ((inf, 5.0, -1.0, -2.0, -2.0), 3),
        ((0.3, 0.2, 0.1, 0.2, 0.1, 0.1, 0.05), 3),
    ]


def amsgrad(p: Tensor, grads: Tensor, lr: float, decay: float) -> Tensor:
    """Take the steps of `torch.optim.Adam(amsgrad=True)`."""
    parameter = nn.Parameter(p.clone())
    optimizer = torch.optim.Adam([parameter], lr=lr, weight_decay=decay, amsgrad=True)
    for g in grads:
        parameter.grad = g.clone()
        optimizer.step()
    return parameter.detach()


def amsgrad_cases() -> list[tuple]:
    p, noise = torch.randn(4).double(), torch.randn(30, 4).double()
    falling = torch.logspace(2, -2, 30).double()[:, None]  # the largest second moment matters
    return [
        (p, noise[:1], 0.1, 0.0),
        (p, noise, 0.1, 0.5),
        (p, noise[:0], 0.1, 0.5),
        (p, 1e-8 * noise, 0.1, 0.0),  # as small as eps
        (p, noise * falling, 0.01, 0.0),
        (p, torch.zeros(3, 4).double(), 0.1, 0.5),  # the decay alone
        (noise[0], noise.T[:, ::2].T[:, :4], 0.1, 0.1),  # not contiguous
        (p.float()[:0], noise.float()[:3, :0], 1.0, 0.0),
    ]


EXERCISES = {
    "bce": Exercise(reference=bce, cases=bce_cases, gradient=True),
    "mean_of": Exercise(reference=mean_of, cases=mean_of_cases),
    # the smallest gradients are 1e-7, and a mistake there must show
    "clip": Exercise(reference=clip, cases=clip_cases, scale=1e-8),
    "stop_at": Exercise(reference=stop_at, cases=stop_at_cases),
    "amsgrad": Exercise(reference=amsgrad, cases=amsgrad_cases),
}
