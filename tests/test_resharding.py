"""Checkpoints of sharded training: the same bits on as many ranks, and on fewer."""

import re
import shutil

import pytest
import torch

from helpers import resharding
from helpers.distributed import RankError, spawn
from tests import sharding_job as job


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run one"
    results = spawn(job.save_on, str(folder), ranks=4)
    return folder.with_name("run one kept"), results


@pytest.fixture(scope="module")
def loaded(saved):
    """On 4, 2 and 1 ranks, from the newest step; the one of 1 rank is not sharded at all."""
    folder, _ = saved
    return {ranks: spawn(job.load_on, str(folder), ranks == 4, ranks=ranks) for ranks in (4, 2, 1)}


def assert_same(got, want):
    assert list(got) == list(want)
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("ranks", [4, 2, 1])
def test_weights_and_optimizer_are_the_same_to_the_bit(saved, loaded, ranks):
    _, results = saved
    for result in loaded[ranks]:
        assert result["path"].name == "step-00000004" and result["step"] == 4
        assert_same(result["loaded"], results[0]["saved later"])


def test_training_goes_on_to_the_same_bits_on_as_many_ranks(saved, loaded):
    _, results = saved
    for result in loaded[4]:
        assert result["warnings"] == []
        assert_same(result["end"], results[0]["end"])


def test_other_ranks_are_told_of_their_random_numbers(loaded):
    for ranks in (2, 1):
        for result in loaded[ranks]:
            (text,) = result["warnings"]
            assert f"was saved by 4 ranks, here are {ranks}: weights and optimizer" in text


def test_a_save_in_the_background_holds_the_step_at_which_it_began(saved):
    folder, results = saved
    for result in results:
        assert result["async path"] == folder.with_name("run one") / "step-00000004"
        assert "step-00000004" not in result["before publishing"]
        assert not torch.equal(
            result["saved later"]["tokens.weight"], result["end"]["tokens.weight"]
        )


def test_what_is_in_the_folder(saved):
    folder, _ = saved
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000003", "step-00000004"]
    names = {p.name for p in (folder / "step-00000003").iterdir()}
    assert {".metadata", *(f"rank-{r}.pt" for r in range(4))} <= names
    assert {f"__{r}_0.distcp" for r in range(4)} <= names


def test_what_does_not_fit_is_refused_and_changes_nothing(loaded):
    for ranks in (4, 2):
        for result in loaded[ranks]:
            assert "group 0 lr: expected 0.02, got 0.01" in result["lr"]
            assert "clip_norm: expected 2.0, got 1.0" in result["clip"]
            assert "tokens.weight: expected [12, 16] torch.float32" in result["width"]
            assert all(result[name, "unchanged"] for name in ("lr", "clip", "width"))


def test_a_plain_save_is_refused_and_a_failed_one_raises_on_every_rank(saved):
    _, results = saved
    for result in results:
        assert "NotImplementedError: this model is sharded" in result["plain"]
        assert "expected to keep at least 1 step, got 0" in result["keep"]
        text = "RuntimeError: rank 2 could not write .*step-00000006: No space left on device"
        assert re.match(text, result["failed"])
        assert result["twice"] == "step-00000005"
        assert result["steps"] == ["step-00000004", "step-00000005", "step-00000006.partial"]
        assert result["blocked"].startswith(("NotADirectoryError", "FileExistsError"))


def test_a_save_before_training_changes_nothing(tmp_path):
    """PyTorch gives Adam a state by a step with a rate of 0, which would count as its first."""
    for result in spawn(job.save_before_training, str(tmp_path), ranks=2):
        for kind in ("adamw", "sgd", "momentum"):
            assert_same(result["with", kind], result["without", kind])
            assert_same(result["loaded", kind], result["without", kind])


def test_another_mesh_gets_the_same_bits(tmp_path):
    saved = spawn(job.save_mesh, str(tmp_path), ranks=4)
    for result in spawn(job.load_mesh, str(tmp_path), ranks=2):
        assert_same(result, saved[0])


def test_a_damaged_file_of_one_rank_is_refused_by_all(saved, tmp_path):
    folder, _ = saved
    shutil.copytree(folder, tmp_path / "damaged")
    damaged = tmp_path / "damaged" / "step-00000004" / "rank-3.pt"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    for text in spawn(job.load_damaged, str(damaged.parents[1]), ranks=4):
        assert re.match("ValueError: .*rank-3.pt is not a readable checkpoint", text)


def test_a_rank_that_is_killed_in_a_save_leaves_the_step_before(tmp_path):
    with pytest.raises(RankError, match="rank 1 of 2 was killed by signal 9"):
        spawn(job.die_in_save, str(tmp_path), 1, ranks=2, echo=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-00000001",
        "step-00000002.partial",
    ]
    assert spawn(job.save_again, str(tmp_path), ranks=2) == [1, 1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_without_a_step_there_is_nothing_to_load(tmp_path):
    (tmp_path / "step-00000007.partial").mkdir()
    with pytest.raises(FileNotFoundError, match="no complete step-N in"):
        resharding.newest(tmp_path)
    for number in (9, 99999999, 123456789):
        (tmp_path / f"step-{number:08d}").mkdir()
    assert resharding.newest(tmp_path).name == "step-123456789"


def test_another_format_is_refused(saved, tmp_path, monkeypatch):
    folder, _ = saved
    trainer = job.sharded_trainer(1, wrap=False)
    monkeypatch.setattr(resharding, "FORMAT", 2)
    with pytest.raises(ValueError, match="expected format 2, got 1"):
        resharding.load_sharded(trainer, folder)
