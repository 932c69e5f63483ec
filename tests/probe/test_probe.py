"""kNN and feature extraction."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tiny import half_jpeg, image_folder
from zoo.data.folder import open_folder
from zoo.data.views.apply import normalize, resize_and_center
from zoo.errors import InputError, RunError
from zoo.models.factory import create_trunk
from zoo.probe.features import source_features
from zoo.probe.knn import knn_accuracy, knn_ranks, knn_scores, nearest

MEAN, STD = (0.485, 0.456, 0.406), (0.228, 0.224, 0.225)


def brute_force(queries, bank, labels, classes, k, temperature):
    """The definition, one query and one neighbour at a time."""
    out = []
    for query in queries.tolist():
        similar = []
        for row, label in zip(bank.tolist(), labels.tolist(), strict=True):
            dot = sum(a * b for a, b in zip(query, row, strict=True))
            similar.append((dot / math.hypot(*query) / math.hypot(*row), label))
        scores = [0.0] * classes
        for cosine, label in sorted(similar, reverse=True)[:k]:
            scores[label] += math.exp((cosine - 1) / temperature)
        out.append(scores)
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("k", [1, 5, 40])
@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_knn_is_the_definition(k, temperature):
    generator = torch.Generator().manual_seed(k)
    queries, bank = (torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in (9, 30))
    labels = torch.randint(0, 4, (30,), generator=generator)
    expected = brute_force(queries, bank, labels, 4, k, temperature)
    got = knn_scores(queries, bank, labels, 4, k, temperature)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    single = knn_scores(queries.float(), bank.float(), labels, 4, k, temperature)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected, rtol=1e-3, atol=1e-6)


def test_knn_over_several_blocks_is_the_same(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    queries, bank = (torch.randn(n, 6, generator=generator) for n in (9, 30))
    labels = torch.randint(0, 4, (30,), generator=generator)
    whole = knn_scores(queries, bank, labels, 4, 5)
    alone = nearest(bank, bank, 5, leave_one_out=True)[1]
    monkeypatch.setattr("zoo.probe.knn._QUERIES", 4)
    for block in (3, 7, 30):
        monkeypatch.setattr("zoo.probe.knn._BANK", block)
        torch.testing.assert_close(knn_scores(queries, bank, labels, 4, 5), whole)
        assert torch.equal(nearest(bank, bank, 5, leave_one_out=True)[1], alone)


def test_each_image_is_asked_after_all_others():
    generator = torch.Generator().manual_seed(1)
    bank = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    labels = torch.arange(12) % 3
    ((_, _, ranks),) = knn_ranks(bank, labels, bank, labels, 3, [4], [0.1], leave_one_out=True)
    for row in range(12):
        others = [other for other in range(12) if other != row]
        scores = knn_scores(bank[row : row + 1], bank[others], labels[others], 3, 4, 0.1)
        better = int((scores[0] > scores[0, labels[row]]).sum())
        assert ranks[row] == (better if scores[0, labels[row]] > 0 else 3)


def test_lists_of_k_and_temperature_are_the_single_ones():
    generator = torch.Generator().manual_seed(2)
    queries, bank = (torch.randn(n, 6, generator=generator) for n in (20, 60))
    labels, truth = (torch.randint(0, 6, (n,), generator=generator) for n in (60, 20))
    several = list(knn_ranks(queries, truth, bank, labels, 6, [30, 5], [0.07, 0.5]))
    assert [(k, t) for k, t, _ in several] == [(30, 0.07), (30, 0.5), (5, 0.07), (5, 0.5)]
    for k, temperature, ranks in several:
        ((_, _, alone),) = knn_ranks(queries, truth, bank, labels, 6, [k], [temperature])
        assert torch.equal(ranks, alone)
        scores = brute_force(queries.double(), bank.double(), labels, 6, k, temperature)
        assert torch.equal(ranks == 0, scores.argmax(1) == truth)


def test_a_class_without_votes_is_in_no_top_five():
    """Six classes, three neighbours: of the other three none is fifth best."""
    bank, labels = torch.eye(6), torch.arange(6)
    query = torch.tensor([[3.0, 2.0, 1.0, 0.0, 0.0, 0.0]] * 2)
    ((_, _, ranks),) = knn_ranks(query, torch.tensor([2, 4]), bank, labels, 6, [3], [0.07])
    assert ranks.tolist() == [2, 6]
    ((_, _, ranks),) = knn_ranks(query, torch.tensor([2, 4]), bank, labels, 6, [6], [0.0001])
    assert ranks[0] < 5 and ranks[1] < 6  # all have a vote, however faint


@pytest.mark.parametrize("rows", [100, 128, 500, 513])
def test_the_nearest_of_many_rows_are_the_nearest_of_all(rows):
    generator = torch.Generator().manual_seed(rows)
    bank = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    for k in (1, 3, 60):
        cosines, index = nearest(bank, bank, k, leave_one_out=True)
        unit = bank / bank.norm(dim=1, keepdim=True)
        wanted = (unit @ unit.T).fill_diagonal_(-2.0).sort(dim=1, descending=True)
        assert torch.equal(index, wanted.indices[:, :k])
        torch.testing.assert_close(cosines, wanted.values[:, :k])


def test_knn_accuracy_counts_and_a_class_may_be_missing_from_the_bank():
    bank, labels = torch.eye(2), torch.tensor([0, 1])
    queries = torch.tensor([[1.0, 0.1], [0.1, 1.0], [1.0, 0.0], [0.0, 1.0]])
    assert knn_accuracy(queries, torch.tensor([0, 1, 1, 5]), bank, labels, k=1) == 0.5


def test_knn_does_not_overflow_at_a_small_temperature():
    scores = knn_scores(torch.eye(2), torch.eye(2), torch.tensor([0, 1]), 2, 1, temperature=0.001)
    assert torch.equal(scores, torch.eye(2))


HOW = {"mean": MEAN, "std": STD, "resize": 20, "crop": 16}


@pytest.fixture()
def source(tmp_path):
    return open_folder(image_folder(tmp_path, 6, side=24))


def test_features_of_a_source(source):
    trunk = create_trunk("resnet18", stem="small", base_planes=4).train()
    before = {key: value.clone() for key, value in trunk.state_dict().items()}
    features, labels = source_features(trunk, source, HOW, batch_size=4)
    assert features.shape == (6, 32) and features.dtype == torch.float32
    assert not features.requires_grad
    assert labels.tolist() == [source.label(i) for i in range(6)]
    assert trunk.training
    assert all(torch.equal(value, before[key]) for key, value in trunk.state_dict().items())
    # By hand: the test transform, and eval mode, in which an image's company doesn't matter.
    trunk.eval()
    for index in range(6):
        image = resize_and_center(source.read(index), 20, 16)
        inputs = normalize(torch.from_numpy(image.copy()).permute(2, 0, 1)[None], MEAN, STD)
        torch.testing.assert_close(features[index], trunk(inputs)[0].detach(), rtol=1e-4, atol=1e-5)


def test_an_image_has_the_same_features_in_any_company(source):
    trunk = create_trunk("resnet18", stem="small", base_planes=4)
    together, _ = source_features(trunk, source, HOW, batch_size=4)

    class Alone:
        classes = ()

        def __init__(self, index):
            self.index = index

        def __len__(self):
            return 1

        def read(self, _):
            return source.read(self.index)

        def label(self, _):
            return -1

    for index in range(6):
        features, labels = source_features(trunk, Alone(index), HOW, batch_size=4)
        assert torch.equal(features[0], together[index])
        assert labels.tolist() == [-1]


def test_the_mode_comes_back_even_after_an_error(source):
    class Failing(nn.Linear):
        def forward(self, input):
            raise RuntimeError("no")

    trunk = Failing(2, 2).train()
    with pytest.raises(RuntimeError, match="no"):
        source_features(trunk, source, HOW)
    assert trunk.training


def test_an_unreadable_image_is_named(tmp_path):
    half_jpeg(tmp_path / "bad.jpg")
    with pytest.raises(InputError) as caught:
        source_features(create_trunk("resnet18", base_planes=4), open_folder(tmp_path), HOW)
    assert caught.value.where.endswith("bad.jpg")


def test_features_without_a_trunk_are_normalised_pixels(source):
    features, _ = source_features(nn.Flatten(), source, {**HOW, "mean": (0.0,) * 3, "std": (1.0,) * 3})
    image = resize_and_center(source.read(2), 20, 16)
    expected = torch.from_numpy(image.copy()).permute(2, 0, 1).flatten().float() / 255
    torch.testing.assert_close(features[2], expected)


def test_features_that_are_no_numbers_are_no_result(source):
    trunk = create_trunk("resnet18", stem="small", base_planes=4)
    with torch.no_grad():
        trunk.conv1.weight[0] = float("nan")
    with pytest.raises(RunError, match="no finite numbers") as caught:
        source_features(trunk, source, HOW)
    assert caught.value.where == source.where(0) and "zoo doctor" in caught.value.fix
