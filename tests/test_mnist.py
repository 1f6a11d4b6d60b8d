import math
import re
from dataclasses import replace
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from helpers import augmentation, data, mnist, models

TINY = mnist.Recipe(epochs=2, batch_size=100, width=4)


@pytest.fixture(scope="module")
def digits():
    return data.digits()


@pytest.fixture(scope="module")
def few(digits):
    """600 digits to train on: the classes are interleaved, so they stay balanced."""
    return replace(
        digits, train_images=digits.train_images[:600], train_labels=digits.train_labels[:600]
    )


def weights(model):
    return list(model.state_dict().values())


def equal(a, b):
    return all(map(torch.equal, weights(a), weights(b)))


# ---- training


def test_the_recipe_reaches_model_and_schedule(few):
    trainer = mnist.make_trainer(few, replace(TINY, dropout=0.7, peak_lr=0.03), seed=0)
    assert trainer.config.steps == 2 * 6
    assert models.count_parameters(trainer.model) == models.count_parameters(
        models.ConvNet(width=4)
    )
    assert [m.p for m in trainer.model.modules() if isinstance(m, nn.Dropout)] == [0.7]
    rates = [trainer.lr_at(step) for step in range(12)]
    assert max(rates) <= 0.03 and max(rates) > 0.028 and min(rates) < 0.001
    conv = next(m for m in trainer.model.modules() if isinstance(m, nn.Conv2d))
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_the_recipe_reaches_the_optimizer_and_the_loss(few):
    recipe = replace(TINY, weight_decay=0.07, label_smoothing=0.2)
    trainer = mnist.make_trainer(few, recipe, seed=0)
    assert isinstance(trainer.optimizer, torch.optim.AdamW)
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups} == {0.07}

    x, y = data.normalize(few.train_images[:20]), few.train_labels[:20]
    logits = trainer.model.eval()(x)
    got = trainer.loss_fn(trainer.model, (x, y))
    torch.testing.assert_close(got, F.cross_entropy(logits, y, label_smoothing=0.2))
    assert (got - F.cross_entropy(logits, y)).abs() > 1e-3


@pytest.mark.parametrize("moved", [{"degrees": 7, "shift": 0}, {"degrees": 0, "shift": 3}])
def test_the_recipe_reaches_the_augmentation(few, moved, monkeypatch):
    asked = []

    def spy(x, generator, **amounts):
        asked.append(amounts)
        return augmented(x, generator, **amounts)

    augmented = augmentation.augment
    monkeypatch.setattr(augmentation, "augment", spy)
    x, _ = next(mnist.batches_from(few, replace(TINY, **moved), seed=0)(0))
    assert asked == [moved]
    still, _ = next(mnist.batches_from(few, replace(TINY, degrees=0, shift=0), seed=0)(0))
    assert not torch.equal(x, still)


def test_weight_decay_and_label_smoothing_change_what_is_trained(few):
    plain = mnist.train(few, replace(TINY, weight_decay=0, label_smoothing=0), seed=0)
    for change in ({"weight_decay": 0.5}, {"label_smoothing": 0.2}):
        recipe = replace(TINY, **({"weight_decay": 0, "label_smoothing": 0} | change))
        assert not equal(plain, mnist.train(few, recipe, seed=0)), change


def test_the_seed_decides_the_initial_weights(few):
    first, again, other = (mnist.make_trainer(few, TINY, seed=s).model for s in (0, 0, 1))
    assert equal(first, again)
    assert not equal(first, other)


@pytest.mark.parametrize("start", [0, 3, 8])
def test_batches_resume_at_any_number(few, start):
    batches = mnist.batches_from(few, TINY, seed=5)
    whole = list(islice(batches(0), 12))
    for (x, y), (x_whole, y_whole) in zip(batches(start), whole[start:], strict=False):
        assert torch.equal(x, x_whole) and torch.equal(y, y_whole)
    assert x.is_contiguous(memory_format=torch.channels_last)


def test_batches_without_augmentation_are_the_normalized_images(few):
    recipe = replace(TINY, degrees=0, shift=0)
    x = torch.cat([x for x, _ in islice(mnist.batches_from(few, recipe, seed=0)(0), 6)])
    want = data.normalize(few.train_images)
    got, want = (t.sum((1, 2, 3)).sort()[0] for t in (x, want))
    torch.testing.assert_close(got, want, rtol=0, atol=0.01)  # sums of 784 pixels


def test_training_learns_repeats_and_resumes_bit_for_bit(few, digits, tmp_path):
    path = tmp_path / "half.pt"
    recipe = replace(TINY, epochs=6)
    save = [lambda trainer, _: trainer.step == 17 and trainer.save(path)]
    whole = mnist.train(few, recipe, seed=3, on_step=save)
    assert not whole.training
    assert mnist.accuracy(whole, digits.test_images, digits.test_labels) > 0.6  # chance is 0.1
    assert equal(whole, mnist.train(few, recipe, seed=3))
    trainer = mnist.make_trainer(few, recipe, seed=4)
    trainer.load(path)
    trainer.fit(mnist.batches_from(few, recipe, seed=3))
    assert equal(whole, trainer.model)


def test_classification_loss_is_cross_entropy_with_its_gradient():
    model, x, y = nn.Linear(5, 3), torch.randn(4, 5), torch.tensor([0, 2, 1, 2])
    mnist.classification_loss(model, (x, y)).backward()
    got = model.weight.grad.clone()
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    assert torch.equal(got, model.weight.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.uint8])
def test_classification_loss_refuses_other_labels(dtype):
    batch = (torch.randn(4, 5), torch.zeros(4, dtype=dtype))
    with pytest.raises(ValueError, match=rf"expected int64 labels \[N\], got {dtype} \[4\]"):
        mnist.classification_loss(nn.Linear(5, 3), batch)


# ---- prediction


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return models.ConvNet(width=4)


@pytest.mark.parametrize("n", [0, 1, 7])
@pytest.mark.parametrize("batch_size", [1, 3, 1000])
def test_predict_gives_probabilities_whatever_the_batch(model, n, batch_size):
    images = torch.randint(256, (n, 1, 28, 28), dtype=torch.uint8)
    p = mnist.predict(model, images, batch_size)
    assert p.shape == (n, 10) and p.dtype == torch.float32
    torch.testing.assert_close(p.sum(1), torch.ones(n))
    torch.testing.assert_close(p, mnist.predict(model, images), atol=1e-5, rtol=0)


@pytest.mark.parametrize("training", [True, False])
def test_predict_evaluates_and_leaves_the_model_as_it_was(model, training):
    before = [t.clone() for t in weights(model.train(training))]
    images = torch.randint(256, (5, 1, 28, 28), dtype=torch.uint8)
    first, again = mnist.predict(model, images), mnist.predict(model, images)
    assert torch.equal(first, again)  # dropout is off
    assert model.training is training
    assert all(map(torch.equal, before, weights(model)))  # batch norm has not moved
    assert not first.requires_grad


def test_predict_takes_non_contiguous_images(model):
    images = torch.randint(256, (4, 1, 28, 28), dtype=torch.uint8)
    turned = images.transpose(2, 3)
    assert not turned.is_contiguous()
    want = mnist.predict(model, turned.contiguous())
    torch.testing.assert_close(mnist.predict(model, turned), want)


def test_predict_refuses_images_that_are_normalized_already(model):
    with pytest.raises(ValueError, match="expected uint8 images"):
        mnist.predict(model, torch.zeros(1, 1, 28, 28))


@pytest.mark.parametrize("training", [True, False])
def test_predict_restores_the_mode_also_after_an_error(model, training):
    model.train(training)
    with pytest.raises(ValueError, match=r"expected images \[N, 1, 28, 28\]"):
        mnist.predict(model, torch.zeros(1, 1, 9, 9, dtype=torch.uint8))
    assert model.training is training


def test_accuracy_counts(model):
    images = torch.randint(256, (9, 1, 28, 28), dtype=torch.uint8)
    answers = mnist.predict(model, images).argmax(1)
    labels = torch.where(torch.arange(9) < 4, answers, (answers + 1) % 10)
    assert mnist.accuracy(model, images, labels) == pytest.approx(4 / 9)


@pytest.mark.parametrize(
    ("count", "labels", "got"),
    [
        (0, torch.zeros(0).long(), "0 images and labels [0]"),
        (3, torch.zeros(1).long(), "3 images and labels [1]"),  # would broadcast
        (3, torch.zeros(3, 1).long(), "3 images and labels [3, 1]"),
    ],
)
def test_accuracy_needs_a_label_for_each_image(model, count, labels, got):
    images = torch.zeros(count, 1, 28, 28, dtype=torch.uint8)
    message = "expected at least one image and one label for each, got " + got
    with pytest.raises(ValueError, match=re.escape(message)):
        mnist.accuracy(model, images, labels)


# ---- evaluation


def test_worst_mistakes_are_wrong_and_sorted():
    p = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6], [0.0, 1.0], [0.7, 0.3]])
    labels = torch.tensor([1, 1, 0, 1, 1])
    assert mnist.worst_mistakes(p, labels, 10).tolist() == [0, 4, 2]
    assert mnist.worst_mistakes(p, labels, 2).tolist() == [0, 4]
    assert mnist.worst_mistakes(p, p.argmax(1), 5).tolist() == []
    assert mnist.worst_mistakes(p[:0], labels[:0], 5).tolist() == []


def test_equally_confident_mistakes_keep_their_order():
    p = torch.full((200, 10), 0.1)
    p[:, 3] = 0.5
    assert mnist.worst_mistakes(p, torch.zeros(200).long(), 200).tolist() == list(range(200))


# ---- a drawing


def drawing(height, width, ink):
    canvas = torch.zeros(height, width, dtype=torch.uint8)
    for rows, columns in ink:
        canvas[rows, columns] = 255
    return canvas


L_SHAPE = [(slice(20, 90), slice(30, 40)), (slice(80, 90), slice(30, 80))]


def mass_center(image):
    mass = image.float()
    where = torch.arange(28.0)
    return (mass.sum(1) @ where / mass.sum()).item(), (mass.sum(0) @ where / mass.sum()).item()


def test_center_fits_the_box_and_centers_the_mass():
    out = mnist.center(drawing(120, 200, L_SHAPE))
    assert out.shape == (1, 1, 28, 28) and out.dtype == torch.uint8
    rows, columns = (out[0, 0].sum(d).nonzero().flatten() for d in (1, 0))
    assert max(rows[-1] - rows[0], columns[-1] - columns[0]) + 1 == 20
    assert (out.max(), out.min()) == (255, 0)
    for middle in mass_center(out[0, 0]):
        assert middle == pytest.approx(13.5, abs=0.51)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 30), st.integers(0, 110))
def test_center_does_not_depend_on_the_place(down, right):
    shape = drawing(120, 200, L_SHAPE)[20:90, 30:80]
    canvas = torch.zeros(120, 200, dtype=torch.uint8)
    canvas[down : down + 70, right : right + 50] = shape
    assert torch.equal(mnist.center(canvas), mnist.center(shape))


def test_center_hardly_depends_on_the_size():
    small = drawing(120, 200, L_SHAPE)
    large = small.repeat_interleave(2, 0).repeat_interleave(2, 1)
    gap = (mnist.center(small).float() - mnist.center(large).float()).abs()
    assert gap.mean() < 5


def test_center_changes_mnist_digits_little(digits):
    images = digits.test_images[:200]
    centered = torch.cat([mnist.center(image[0]) for image in images])
    away = (centered.float() - images.float()).abs().mean((1, 2, 3))
    other = (images.roll(1, 0).float() - images.float()).abs().mean((1, 2, 3))
    assert away.median() < 0.5 * other.median()


@pytest.mark.parametrize(
    "canvas",
    [
        drawing(1, 1, [(0, 0)]),
        drawing(28, 28, [(27, 0)]),
        drawing(3, 300, [(1, slice(0, 300))]),  # a bar: its other side rounds to nothing
        drawing(300, 3, [(slice(0, 300), 1)]),
        drawing(90, 60, L_SHAPE).T,  # not contiguous
        drawing(280, 280, [(slice(0, 280), slice(0, 280))]),
    ],
    ids=["pixel", "corner", "wide", "tall", "transposed", "full"],
)
def test_center_takes_any_ink(canvas):
    out = mnist.center(canvas)
    assert out.shape == (1, 1, 28, 28)
    assert out.any()
    for middle in mass_center(out[0, 0]):
        assert 7 < middle < 20


@pytest.mark.parametrize(
    ("canvas", "got"),
    [
        (torch.zeros(9, 7, dtype=torch.uint8), "some ink, got [9, 7] all black"),
        (torch.zeros(0, 7, dtype=torch.uint8), "some ink, got [0, 7] all black"),
        (torch.ones(1, 28, 28, dtype=torch.uint8), "255 white, got torch.uint8 [1, 28, 28]"),
        (torch.rand(9, 7), "255 white, got torch.float32 [9, 7]"),  # 0..1 would round to black
        (torch.full((9, 7), torch.nan), "255 white, got torch.float32 [9, 7]"),
        (torch.full((9, 7), 300), "255 white, got torch.int64 [9, 7]"),
    ],
)
def test_center_needs_ink_in_bytes(canvas, got):
    with pytest.raises(ValueError, match=re.escape(got)):
        mnist.center(canvas)


def test_the_cost_of_knowing_nothing_is_ln_10():
    loss = mnist.classification_loss(lambda x: x, (torch.zeros(6, 10), torch.arange(6)))
    assert loss.item() == pytest.approx(math.log(10))
