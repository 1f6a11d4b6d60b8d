"""One way to judge a kernel: its error against float64 may be twice that of PyTorch's own op."""

import torch

from helpers.kernels import INTERPRETED

WIDTHS = [1, 7, 123, 1000, 4097]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def randn(*shape, device, dtype=torch.float32, grad=True):
    return torch.randn(shape, dtype=torch.float64).to(dtype).to(device).requires_grad_(grad)


def run(function, inputs):
    """The output and the gradient of each floating input, for one fixed upstream gradient."""
    inputs = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
    y = function(*inputs)
    floats = [t for t in inputs if t.requires_grad]
    upstream = (torch.arange(y.numel()) * 7 % 33 - 16).view(y.shape) / 16  # exact in any dtype
    grads = torch.autograd.grad(y, floats, upstream.to(y))
    return [y.detach(), *grads]


def allowance(oracle, dtype, gradient):
    """What rounding may cost besides, in units in the last place of the largest value.

    Half precision is computed in float32 and rounded once; float32 is rounded at each step. The
    interpreter truncates to bfloat16 where a GPU and PyTorch round: a whole unit more, and some
    in a gradient, where truncated numbers, all of them too small, are summed.
    """
    units = 2.0 if dtype is torch.float32 else 1.0 if gradient else 0.5
    if INTERPRETED and dtype is torch.bfloat16:
        units = 4.0 if gradient else 1.5
    return units * torch.finfo(dtype).eps * oracle.abs().max().item()


def assert_within_budget(ours, eager, inputs, factor=2.0):
    """Outputs and all gradients: |ours - float64| <= factor |eager - float64| + rounding once."""
    before = [t.clone() for t in inputs]
    dtype = next(t.dtype for t in inputs if t.is_floating_point())
    exact = run(eager, [t.double() if t.is_floating_point() else t for t in inputs])
    for i, (got, theirs, oracle) in enumerate(
        zip(run(ours, inputs), run(eager, inputs), exact, strict=True)
    ):
        assert got.shape == oracle.shape and got.dtype == theirs.dtype
        if not oracle.numel():
            continue
        error = (got.double() - oracle).abs().max().item()
        budget = factor * (theirs.double() - oracle).abs().max().item() + allowance(
            oracle, dtype, i > 0
        )
        assert error <= budget, f"{'output' if i == 0 else f'gradient {i}'}: {error} > {budget}"
    for was, now in zip(before, inputs, strict=True):
        assert torch.equal(was, now), "an input was changed"


def gradcheck(function, *inputs, double=False):
    """Against finite differences in float64."""
    inputs = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in inputs]
    assert torch.autograd.gradcheck(function, inputs)
    if double:
        assert torch.autograd.gradgradcheck(function, inputs)


def composes(operator, function, args, compiled_args):
    """Registered correctly, and `torch.compile` takes it into one graph with what surrounds it."""
    torch.library.opcheck(operator, args)
    torch.compiler.reset()
    graph = torch.compile(lambda *a: function(*(t * 2 for t in a)) + 1, fullgraph=True)
    for got, want in zip(
        run(graph, compiled_args),
        run(lambda *a: function(*(t * 2 for t in a)) + 1, compiled_args),
        strict=True,
    ):
        torch.testing.assert_close(got, want)
