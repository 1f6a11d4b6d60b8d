"""Answers to the exercises of chapter 19, right and wrong."""

from contextlib import nullcontext

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator

from helpers import ecosystem
from helpers.exercises import check
from helpers.exercises.harness import WrongAnswer, find


def recall_by_rank(scores, right, k):
    hits = 0
    for row, document in zip(scores, right, strict=True):
        better = sum(1 for score in row if score > row[document])
        hits += better < k
    return hits / len(right)


def recall_by_topk(offset=0, largest=True, first=False, as_count=False, as_tensor=False):
    def recall(scores, right, k):
        k = min(max(k + offset, 1), scores.shape[1])
        best = scores.topk(k, dim=1, largest=largest).indices
        if first:
            best = best[:, :1]
        hits = (best == right[:, None]).any(1)
        if as_tensor:
            return hits.float().mean()
        return float(hits.sum()) if as_count else hits.double().mean().item()

    return recall


def strict_topk(scores, right, k):
    best = scores.topk(k, dim=1).indices
    return (best == right[:, None]).any(1).double().mean().item()


def over_documents(scores, right, k):
    best = scores.topk(min(k, scores.shape[1]), dim=1).indices
    return (best == right[:, None]).double().mean().item()


class Stub(L.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        return ...

    def configure_optimizers(self):
        return ...


class Regression(L.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.net = model

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.net(x)[:, 0], y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
        return [optimizer], [scheduler]


class WithDictionaries(Regression):
    def training_step(self, batch, batch_idx):
        loss = (self.net(batch[0]).flatten() - batch[1]).square().mean()
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self):
        (optimizer,), (scheduler,) = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler}}


class Forgetful(Regression):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)


class NoOptimizer(Regression):
    def configure_optimizers(self):
        super().configure_optimizers()


class NoScheduler(Regression):
    def configure_optimizers(self):
        return super().configure_optimizers()[0]


class EachStep(Regression):
    def configure_optimizers(self):
        (optimizer,), (scheduler,) = super().configure_optimizers()
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Broadcast(Regression):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.net(x), y)


class Summed(Regression):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.net(x)[:, 0], y, reduction="sum")


class Frozen(Regression):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class NoMomentum(Regression):
    def configure_optimizers(self):
        (optimizer,), (scheduler,) = super().configure_optimizers()
        optimizer.param_groups[0]["momentum"] = 0
        return [optimizer], [scheduler]


def accumulate(zero="end", clip_at="update", own_backward=False, context=True, halve=False):
    def backward(accelerator, loss):
        if own_backward:
            loss.backward()
        else:
            accelerator.backward(loss / 2 if halve else loss)

    def train(accelerator, model, optimizer, loader, clip):
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for x, y in loader:
            with accelerator.accumulate(model) if context else nullcontext():
                loss = F.mse_loss(model(x)[:, 0], y)
                if zero == "start":
                    optimizer.zero_grad()
                backward(accelerator, loss)
                if clip_at == "batch" or (clip_at == "update" and accelerator.sync_gradients):
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                if zero == "end":
                    optimizer.zero_grad()

    return train


def only_prepares(accelerator, model, optimizer, loader, clip):
    accelerator.prepare(model, optimizer, loader)


RIGHT = [
    ("recall", recall_by_rank),
    ("recall", recall_by_topk()),
    ("regression", Regression),
    ("regression", WithDictionaries),
    ("accumulated", accumulate()),
]

WRONG = [
    ("recall", recall_by_topk(offset=1)),
    ("recall", recall_by_topk(offset=-1)),
    ("recall", recall_by_topk(largest=False)),
    ("recall", recall_by_topk(first=True)),
    ("recall", recall_by_topk(as_count=True)),
    ("recall", strict_topk),
    ("recall", over_documents),
    ("regression", lambda model: None, "a class that inherits from L.LightningModule"),
    ("regression", Forgetful, "training_step returned None, so Lightning skips every batch"),
    ("regression", NoOptimizer, "configure_optimizers returned None, so nothing is updated"),
    ("regression", NoScheduler, "differs from that of the bare loop"),
    ("regression", EachStep, "differs from that of the bare loop"),
    ("regression", Broadcast, "differs from that of the bare loop"),
    ("regression", Summed, "differs from that of the bare loop"),
    ("regression", NoMomentum, "differs from that of the bare loop"),
    ("regression", Frozen, "no weight has changed"),
    ("accumulated", accumulate(zero="start"), "case 2 of 4"),
    ("accumulated", accumulate(clip_at="batch"), "case 3 of 4"),
    ("accumulated", accumulate(zero="start", clip_at="batch"), "case 2 of 4"),
    ("accumulated", accumulate(zero="never"), "case 1 of 4"),
    ("accumulated", accumulate(clip_at="never"), "case 1 of 4"),
    ("accumulated", accumulate(own_backward=True), "case 2 of 4"),
    ("accumulated", accumulate(context=False), "case 2 of 4"),
    ("accumulated", accumulate(halve=True), "differs from that of the bare loop by"),
    ("accumulated", only_prepares, "no weight has changed"),
]

STUBS = {"regression": Stub}


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("regression", lambda model: None, "a class that inherits from L.LightningModule"),
        ("regression", Forgetful, "training_step returned None, so Lightning skips every batch"),
        ("regression", NoOptimizer, "configure_optimizers returned None, so nothing is updated"),
        ("regression", Frozen, "no weight has changed"),
        ("regression", Summed, "a weight differs from that of the bare loop by"),
        ("accumulated", only_prepares, "no weight has changed"),
        ("accumulated", accumulate(halve=True), "differs from that of the bare loop by"),
    ],
)
def test_what_is_wrong_is_said(name, answer, words):
    exercise = find(f"ecosystem.{name}")
    answered = exercise.through(answer)
    with pytest.raises(WrongAnswer, match=words):
        for arguments in exercise.cases():
            answered(*arguments)


def test_the_settings_of_the_notebook_stay(capsys):
    """An `Accelerator` that was made before the check still has its precision after it."""
    ecosystem.forget_accelerate()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    check("ecosystem.accumulated", accumulate())
    assert capsys.readouterr().out.startswith("✓")
    assert accelerator.mixed_precision == "bf16" == Accelerator(cpu=True).mixed_precision
    ecosystem.forget_accelerate()
