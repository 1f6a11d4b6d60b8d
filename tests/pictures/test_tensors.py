import pytest
import torch

from helpers.pictures import tensors as pictures


def texts(ax):
    return [text.get_text() for text in ax.texts]


@pytest.mark.parametrize(
    ("view", "facts"),
    [
        (lambda x: x.T, ["(4, 3)", "(1, 4)", "0", "False", "True"]),
        (lambda x: x[1:, ::2], ["(2, 2)", "(4, 2)", "4", "False", "True"]),
        (lambda x: x.diagonal(), ["(3,)", "(5,)", "0", "False", "True"]),
        (lambda x: x[:, :1].expand(3, 4), ["(3, 4)", "(4, 0)", "0", "False", "True"]),
        (lambda x: x.T.contiguous(), ["(4, 3)", "(3, 1)", "0", "True", "False"]),
    ],
)
def test_the_strip_states_the_facts(ax, view, facts):
    x = torch.arange(12).view(3, 4)
    y = view(x)
    pictures.draw_strip(ax, x, "name", y)
    found = texts(ax)
    names = ["shape", "stride()", "storage_offset()", "is_contiguous()", "shares_storage(x)"]
    stated = {name: found[found.index(name) + 1] for name in names}
    assert list(stated.values()) == facts
    # 12 places of memory, then the elements as the view reads them
    numbers = [int(text) for text in found if text.isdigit()]
    assert numbers[:12] == y.new_empty(0).set_(y.untyped_storage()).tolist()
    assert numbers[12 : 12 + y.numel()] == y.flatten().tolist()


@pytest.mark.parametrize("b", [(), (4,), (3,), (3, 1), (2, 1, 1), (0,)])
@pytest.mark.parametrize("a", [(), (4,), (3, 1), (3, 4), (2, 3, 4)])
def test_the_broadcast_figure_says_what_the_rule_says(ax, a, b):
    pictures.draw_broadcast(ax, a, b)
    found = texts(ax)
    try:
        expected = f"(a + b).shape = {tuple(torch.broadcast_shapes(a, b))}"
    except RuntimeError:
        assert "✗" in found and any("\nmust match" in text for text in found)
    else:
        assert "✗" not in found and expected in found


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("at", [(0, 0), (1, 1)])
def test_the_gather_figure_shows_the_way(ax, dim, at):
    x, index = torch.arange(10, 22).view(3, 4), torch.tensor([[2, 1], [0, 1]])
    pictures.draw_gather(ax, x, index, dim, at)
    value = x.gather(dim, index)[at].item()
    i, j = (index[at].item(), at[1]) if dim == 0 else (at[0], index[at].item())
    inner = f"index[{at[0]}, {at[1]}], {at[1]}" if dim == 0 else f"{at[0]}, index[{at[0]}, {at[1]}]"
    assert f"out[{at[0]}, {at[1]}] = x[{inner}] = x[{i}, {j}] = {value}" in texts(ax)
    assert x[i, j] == value
