"""DETR's parts: frozen norms, attention, matching, views, the new layers."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

from transfer.detect.detr.detector import DetrSettings
from transfer.detect.detr.frozen import freeze_trunk
from transfer.detect.detr.loss import set_loss
from transfer.detect.detr.matching import match, wanted_of
from transfer.detect.detr.protocol import choose_detr
from transfer.detect.detr.transformer import Attention
from transfer.detect.detr.views import Crops, crop_boxes, draw_detr_view, make_view
from transfer.detect.models.images import Target
from transfer.detect.run import detector_for
from transfer.detect.training import Normalisation, make_images
from zoo.engine.precision import Precision
from zoo.models.factory import create_trunk
from zoo.tensors import seeded

SMALL = choose_detr("own", "")


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_frozen_norms_are_those_of_evaluation():
    with seeded(1):
        trunk = create_trunk("resnet50", base_planes=8).eval()
        for module in trunk.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                for value in (module.weight, module.bias, module.running_mean, module.running_var):
                    value.data.uniform_(0.5, 1.5)
        images = torch.randn(2, 3, 64, 64)
    wanted = trunk(images)
    wanted.sum().backward()
    gradients = {name: p.grad.clone() for name, p in trunk.named_parameters()}
    state = {name: value for name, value in trunk.state_dict().items() if "num_batches" not in name}
    trunk.zero_grad()
    freeze_trunk(trunk)
    assert same(dict(sorted(state.items())), dict(sorted(trunk.state_dict().items())))
    found = trunk.train()(images)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    found.sum().backward()
    for name, p in trunk.named_parameters():
        assert p.requires_grad == name.startswith(("layer2.", "layer3.", "layer4.")) == (p.grad is not None)
        if p.grad is not None:
            torch.testing.assert_close(
                p.grad, gradients[name], rtol=1e-3, atol=1e-4 * float(gradients[name].abs().max())
            )


def test_attention_is_torchs():
    with seeded(2):
        ours, theirs = Attention(16, 4, 0.0), torch.nn.MultiheadAttention(16, 4, batch_first=True)
        ours.load_state_dict(theirs.state_dict())
        query, key, value = torch.randn(2, 5, 16), torch.randn(2, 7, 16), torch.randn(2, 7, 16)
    keep = torch.ones(2, 7, dtype=torch.bool)
    keep[1, 4:] = False
    torch.testing.assert_close(ours(query, key, value, keep), theirs(query, key, value, ~keep)[0])
    torch.testing.assert_close(ours(key, key, value), theirs(key, key, value)[0])


def test_of_more_objects_than_queries_some_have_none():
    with seeded(3):
        logits, boxes = torch.randn(2, 2, 3, 6), 0.2 + 0.5 * torch.rand(2, 2, 3, 4)
        wanted = wanted_of(
            [torch.zeros(7, dtype=torch.int64), torch.ones(1, dtype=torch.int64)],
            [0.2 + 0.5 * torch.rand(7, 4), 0.2 + 0.5 * torch.rand(1, 4)],
        )
    found = set_loss(logits, boxes, wanted, 8.0)
    assert Counter(found.matched.image.tolist()) == {0: 6, 1: 2}  # of two layers
    assert all(value.isfinite().all() for value in found.terms.values())


def test_costs_that_are_not_finite_end_no_training():
    costs = torch.full((1, 1, 3, 2), math.nan)
    assert len(match(costs, [2]).query) == 2


def test_the_pairs_are_the_cheapest_of_all():
    with seeded(4):
        costs = torch.rand(2, 3, 4, 3)
    pairs = match(costs, [3, 0, 2])
    for layer, (image, count) in itertools.product(range(2), [(0, 3), (1, 0), (2, 2)]):
        mine = (pairs.layer == layer) & (pairs.image == image)
        paid = costs[layer, image, pairs.query[mine], pairs.target[mine]].sum()
        every = [
            sum(float(costs[layer, image, q, t]) for t, q in enumerate(queries))
            for queries in itertools.permutations(range(4), count)
        ]
        assert float(paid) == pytest.approx(min(every)) and int(mine.sum()) == count


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_half_precision_comes_near(name):
    detector = detector_for(create_trunk("resnet18", base_planes=16), SMALL, 3, seed=0).train()
    for module in detector.modules():
        if isinstance(module, torch.nn.Dropout | Attention):
            module.p = module.dropout = 0.0
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 64, 96), dtype=np.uint8))
    losses = []
    for how in (Precision("float32", torch.device("cpu")), Precision(name, torch.device("cpu"))):
        target = Target(torch.tensor([[10.0, 10.0, 50.0, 60.0]]), torch.tensor([1]))
        with how.autocast():
            views = make_images(detector, [pixels], Normalisation((127.0,) * 3, (60.0,) * 3), how)
            terms = detector.losses(views, [target])
        assert all(term.dtype == torch.float32 for term in terms.values())
        losses.append({key: float(term.detach()) for key, term in terms.items()})
    assert losses[1] == pytest.approx(losses[0], rel=0.1)
    assert {"loss_ce", "loss_bbox", "loss_giou", "loss_aux"} == losses[0].keys()


def test_views_follow_from_the_key_and_keep_their_bounds():
    crops = Crops((40, 50, 60), 38, 60)
    sizes = (48, 64, 80)
    pixels = np.random.default_rng(0).integers(0, 256, (90, 130, 3), dtype=np.uint8)
    boxes = np.array([[10.0, 20.0, 60.0, 70.0], [100.0, 5.0, 129.0, 30.0]])
    seen = Counter()
    for sample in range(300):
        view = draw_detr_view(0, 1, sample, sizes, crops)
        assert view == draw_detr_view(0, 1, sample, sizes, crops)
        seen.update([f"flip {view.flip}", f"crop {bool(view.before)}", view.short, f"before {view.before}"])
        if sample < 60:
            shown, left, rows = make_view(pixels, boxes, view, 133, crops)
            assert abs(max(shown.shape[:2]) - 133) <= 2 or min(shown.shape[:2]) == view.short
            assert len(left) == len(rows) <= 2 and (left >= 0).all()
            assert (left[:, [0, 2]] <= shown.shape[1] + 1e-6).all() and (
                left[:, [1, 3]] <= shown.shape[0] + 1e-6
            ).all()
    assert all(110 < seen[f"{what} True"] < 190 for what in ("flip", "crop"))
    assert all(70 < seen[size] < 130 for size in sizes) and all(
        seen[f"before {side}"] > 25 for side in crops.shorts
    )
    assert not any(draw_detr_view(0, 0, sample, sizes, None).before for sample in range(50))


def test_a_view_moves_its_boxes_with_its_pixels():
    """A bright rectangle stays inside its box, and fills it."""
    crops = Crops((60, 70), 40, 60)
    pixels = np.zeros((80, 120, 3), np.uint8)
    pixels[20:60, 30:90] = 255
    for sample in range(40):
        view = draw_detr_view(5, 0, sample, (48, 64), crops)
        shown, left, rows = make_view(pixels, np.array([[30.0, 20.0, 90.0, 60.0]]), view, 400, crops)
        if not len(rows):
            assert shown.max() < 255
            continue
        bright = np.argwhere(shown[..., 0] > 127)
        x1, y1, x2, y2 = left[0]
        low, high = bright.min(axis=0), bright.max(axis=0) + 1
        assert np.abs([low[1] - x1, low[0] - y1, high[1] - x2, high[0] - y2]).max() <= 1.5


def test_a_box_that_is_cut_off_is_gone():
    boxes = np.array([[0.0, 0.0, 10.0, 10.0], [5.0, 5.0, 30.0, 30.0], [40.0, 0.0, 50.0, 9.0]])
    left, rows = crop_boxes(boxes, 10, 10, 20, 25)
    assert rows.tolist() == [1] and left.tolist() == [[0.0, 0.0, 20.0, 20.0]]


def test_new_layers_follow_from_the_seed():
    first, again, other = (
        detector_for(create_trunk("resnet18", base_planes=8), SMALL, 3, seed).state_dict()
        for seed in (0, 0, 1)
    )
    new = [name for name in first if not name.startswith("trunk.")]
    assert all(torch.equal(first[name], again[name]) for name in new)
    assert not torch.equal(first["query_embed.weight"], other["query_embed.weight"])
    # The reference's: all matrices of the transformer by Xavier, biases of attention 0.
    weight = first["transformer.encoder.layers.0.linear1.weight"]
    bound = math.sqrt(6 / sum(weight.shape))
    assert 0.9 * bound < float(weight.abs().max()) <= bound
    assert not first["transformer.decoder.layers.0.multihead_attn.out_proj.bias"].any()
    assert DetrSettings(91).queries == 100
