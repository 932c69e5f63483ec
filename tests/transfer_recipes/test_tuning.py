"""Fine-tuning: shares, protocols, when it is tested, and the whole network on all labels."""

from __future__ import annotations

import pytest
import torch

from transfer import RECIPES
from transfer.finetune.config import FinetuneConfig
from transfer.run import open_context, transfer
from transfer.semisup.config import SemisupConfig
from weights.published import class_folders
from zoo.errors import InputError


@pytest.mark.parametrize(
    ("protocol", "labelled", "share", "want"),
    [
        ("auto", 12_811, 0.01, ("swav", 256, 20, 0.02, 5.0)),
        ("auto", 128_116, 0.1, ("swav", 256, 20, 0.01, 0.2)),
        ("auto", 50, 0.01, ("small", 32, 60, 0.01, 0.2)),
        ("auto", 500, 0.1, ("small", 32, 20, 0.01, 0.2)),
        ("swav", 50, 0.01, ("swav", 256, 20, 0.02, 5.0)),
    ],
)
def test_what_is_not_given_is_the_protocols(protocol, labelled, share, want):
    config = SemisupConfig(protocol=protocol, fraction=share).settled(labelled, share)
    assert (config.protocol, config.batch_size, config.epochs, config.lr, config.lr_head) == want
    assert config.fraction == share and config.settled(labelled, share) == config
    mine = SemisupConfig(protocol=protocol, lr=0.5, epochs=3).settled(labelled, share)
    assert (mine.lr, mine.epochs, mine.batch_size) == (0.5, 3, want[1])
    sixty = [factor for factor in config.factors() if factor == 1.0]
    assert len(sixty) == 0.6 * config.epochs and config.factors()[-1] == pytest.approx(0.04)


def test_finetuning_uses_all_labels_and_says_how(small, greys):
    settings = {"epochs": 3, "lr": 0.001, "batch_size": 12}
    result = transfer("finetune", model=small, dataset=str(greys), settings=settings)
    done = result["details"]
    assert done["labelled_images"] == 36 and result["protocol"]["protocol"] == "small"
    assert done["tested_epochs"] == [1, 2, 3] and done["last_epoch"] == 3
    assert result["metrics"]["best_top1"] >= result["metrics"]["top1"]
    assert "trunk_sha256" not in done  # it isn't meant to stay
    assert FinetuneConfig().settled(1_281_167).protocol == "swav"


def test_finetuning_is_semisup_with_every_label(small, greys):
    settings = {"epochs": 2, "batch_size": 12, "lr": 0.001}
    all_labels = transfer("finetune", model=small, dataset=str(greys), settings=settings)
    share = transfer("semisup", model=small, dataset=str(greys), settings={**settings, "fraction": 1.0})
    assert all_labels["metrics"] == share["metrics"]


def test_short_epochs_are_not_all_tested(small, tmp_path):
    class_folders(tmp_path / "train", {"a": 20, "b": 220}, 4)
    class_folders(tmp_path / "val", {"a": 20, "b": 220}, 20, seed=1)
    settings = {"fraction": 0.5, "epochs": 8, "lr": 0.001}
    done = transfer("semisup", model=small, dataset=str(tmp_path), settings=settings)["details"]
    # Four images an epoch, forty to test: due after every third epoch, and at the end.
    assert done["tested_epochs"] == [3, 6, 8] and done["best_epoch"] in (3, 6, 8)
    assert len(done["rates"]) == 8


def test_a_single_labelled_image_is_refused(small, tmp_path):
    class_folders(tmp_path / "train", {"a": 20}, 3)
    class_folders(tmp_path / "val", {"a": 20}, 2, seed=1)
    with pytest.raises(InputError, match="a single one is labelled"):
        transfer("semisup", model=small, dataset=str(tmp_path), settings={"fraction": 0.1})


def test_a_list_decides_the_rates_by_its_share(small, greys, tmp_path):
    context = open_context(small, str(greys))
    names = [f"{'abc'[k]}/{n:03d}.png" for k in range(3) for n in range(4)]
    (tmp_path / "list.txt").write_text("\n".join(names))
    config = SemisupConfig(labels=str(tmp_path / "list.txt"), epochs=1, protocol="swav", lr=0.001)
    found = RECIPES.code("semisup")(context, config)
    assert found["settled"].lr_head == 0.2 and found["labelled_images"] == 12  # a third of the labels
    assert found["labelled_classes"] == 3 and len(found["labelled_sha256"]) == 64
    assert torch.isfinite(torch.tensor(found["metrics"]["train_loss"]))
