"""AMDIM as a method: what learns, parts of a batch, drawn places, classifiers, what it refuses, runs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from zoo.data.loader import Batch
from zoo.engine.collectives import WorldOfOne
from zoo.errors import InputError
from zoo.models.amdim import AMDIMEncoder
from zoo.pretrain.losses.amdim import Maps
from zoo.pretrain.methods.amdim import AMDIM, MixtureFeatures
from zoo.pretrain.methods.amdim_config import AMDIMConfig
from zoo.pretrain.methods.config_base import RunShape

BATCH, SIZE = 8, 32


def shape_of(views: int = 2, sizes: tuple[int, ...] = (SIZE,), **more: Any) -> RunShape:
    given = {"batch_size": BATCH, "world_size": 1, "steps_per_epoch": 4, "epochs": 1, **more}
    return RunShape(views=views, sizes=sizes, **given)


def method_of(norms: bool = True, views: int = 2, **settings: Any) -> AMDIM:
    """A tiny AMDIM in float64; without ``norms`` an image's maps know nothing of other images."""
    torch.manual_seed(0)
    trunk = AMDIMEncoder(encoder_size=SIZE, ndf=2, n_rkhs=8, n_depth=1)
    for module in trunk.modules():
        if hasattr(module, "use_bn") and not norms:
            module.use_bn = False
        if isinstance(module, nn.Conv2d) and not module.weight.any():
            nn.init.kaiming_normal_(module.weight)  # fresh residuals add nothing
    config = AMDIMConfig(**settings)
    shape = shape_of(views, classes=("a", "b", "c"))
    assert list(config.check(shape)) == []
    return AMDIM(trunk, config, shape, WorldOfOne()).double().train()


def batch_of(seed: int, views: int = 2) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(views * BATCH, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)
    return Batch([images], 100 + torch.arange(BATCH), torch.arange(BATCH) % 4 - 1, 0)


def gradients_of(method: AMDIM) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in method.named_parameters() if p.requires_grad}


KINDS: dict[str, dict[str, Any]] = {
    "all costs": {},
    "mixtures and classifiers": {"mixtures": 3, "mixture_hidden": 5, "classifiers": True},
    "without 5to5": {"costs": ["1to5", "1to7"]},
    "only 1to7": {"costs": ["1to7"]},
    "only 1to5": {"costs": ["1to5"]},
    "Local DIM": {"costs": ["1to7"], "across_views": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_that_is_given_to_the_optimizer_learns(kind: str) -> None:
    """Several processes wait for the gradients of all of them."""
    views = 1 if kind == "Local DIM" else 2
    method = method_of(views=views, **KINDS[kind])
    batch = batch_of(1, views)
    loss, logs = method.step(batch.views, batch)
    assert list(logs)[: len(method.config.costs) + 1] == [*method.config.costs, "regularizer"]
    costs = [logs[name] for name in (*method.config.costs, "regularizer")]
    assert loss.item() == pytest.approx(sum(costs), rel=1e-12)
    loss.backward()
    assert all(gradient is not None and gradient.any() for gradient in gradients_of(method).values())
    (group,) = method.param_groups(False)
    assert len(group["params"]) == len(gradients_of(method))
    still = {name.partition(".bn")[0] for name, p in method.named_parameters() if not p.requires_grad}
    assert ("trunk.rkhs_block_5.conv1.weight" in still) is (kind in ("only 1to7", "Local DIM"))
    assert ("trunk.rkhs_block_7.conv1.weight" in still) is (kind == "only 1to5")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, 4])
def test_parts_give_the_loss_and_gradient_of_the_whole_batch(kind: str, count: int) -> None:
    views = 1 if kind == "Local DIM" else 2
    settings = {**KINDS[kind], "classifiers": False}
    whole, parted = (method_of(norms=False, views=views, **settings) for _ in range(2))
    batch = batch_of(2, views)
    loss, logs = whole.step(batch.views, batch)
    loss.backward()
    parts = batch.split(count)
    with torch.no_grad():
        given = parted.first_pass([(lambda p=part: p.views, part) for part in parts])
    total = 0.0
    for part, known in zip(parts, given, strict=True):
        share, partly = parted.step(part.views, part, known)
        (share / count).backward()
        total += share.item() / count
        assert partly == pytest.approx(logs, rel=1e-12)
    assert total == pytest.approx(loss.item(), rel=1e-12)
    for name, gradient in gradients_of(whole).items():
        torch.testing.assert_close(gradients_of(parted)[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


def test_the_classifiers_see_all_labelled_images_of_a_batch_in_parts() -> None:
    """Parts with unequal numbers of labels; the MLP has a norm, which sees the parts, so only the linear one."""
    whole, parted = (method_of(norms=False, classifiers=True) for _ in range(2))
    batch = batch_of(3)
    batch.labels = torch.tensor([0, 1, 2, 0, -1, -1, 1, -1])
    whole.step(batch.views, batch)[0].backward()
    parts = batch.split(2)
    with torch.no_grad():
        given = parted.first_pass([(lambda p=part: p.views, part) for part in parts])
    for part, known in zip(parts, given, strict=True):
        (parted.step(part.views, part, known)[0] / 2).backward()
    torch.testing.assert_close(parted.classifier.weight.grad, whole.classifier.weight.grad, rtol=1e-9, atol=0)


def test_the_first_pass_leaves_running_statistics_alone() -> None:
    method = method_of(mixtures=2)
    batch = batch_of(4)
    before = {key: value.clone() for key, value in method.state_dict().items()}
    parts = batch.split(2)
    with torch.no_grad():
        given = method.first_pass([(lambda p=part: p.views, part) for part in parts])
    assert all(torch.equal(value, before[key]) for key, value in method.state_dict().items())
    method.step(parts[0].views, parts[0], given[0])
    counts = {
        int(v)
        for k, v in method.state_dict().items()
        if k.endswith("rkhs_block_5.bn_out.bn.num_batches_tracked")
    }
    assert counts == {2}  # a pass for each view


@pytest.mark.parametrize("kind", KINDS)
def test_the_doctor_sees_features_and_the_loss_of_guessing(kind: str) -> None:
    """Guessing is scores that are all alike."""
    views = 1 if kind == "Local DIM" else 2
    method, batch = method_of(views=views, **KINDS[kind]), batch_of(0, views)
    method.step(batch.views, batch)
    assert method.seen is None
    method.watched = True
    method.step(batch.views, batch)
    seen = method.seen
    assert seen is not None and seen.embeddings is not None and not seen.embeddings.requires_grad
    assert seen.embeddings.shape == (views * BATCH, 8)
    torch.testing.assert_close(seen.embeddings.norm(dim=1), torch.ones(views * BATCH).double())
    mixtures = method.config.mixtures or 1
    blank = Maps(torch.zeros(BATCH, mixtures, 8), torch.zeros(BATCH, 8, 5, 5), torch.zeros(BATCH, 8, 7, 7))
    costs = method._costs([blank] * views, batch.ids)
    assert math.log(seen.outcomes) == pytest.approx(float(torch.stack(list(costs.values())).sum()))


def test_where_entropy_outweighs_the_costs_there_is_no_guessing() -> None:
    method, batch = method_of(mixtures=4, mixture_entropy=100.0), batch_of(0)
    method.watched = True
    method.step(batch.views, batch)
    assert method.seen is not None and method.seen.outcomes == 1


def test_places_belong_to_the_step_and_the_image_alone() -> None:
    method = method_of()
    ids = torch.tensor([5, 2**62, 7, 8])
    method.before_step(3, 0)
    places = method.places(ids)
    assert places.shape == (2, 4)
    assert torch.equal(method.places(ids.flip(0)), places.flip(1))
    assert torch.equal(method.places(ids[1:2]), places[:, 1:2])
    assert not torch.equal(places[0], places[1])
    method.before_step(4, 0)
    assert not torch.equal(method.places(ids), places)
    many = method.places(torch.arange(20000))
    counts = torch.stack([torch.bincount(row, minlength=25) for row in many])
    assert counts.shape == (2, 25)
    assert (counts - 800).abs().max() < 5 * 800**0.5
    together = torch.bincount(many[0] * 25 + many[1], minlength=625)
    assert (together - 32).abs().max() < 5 * 32**0.5  # either view by itself


@pytest.mark.parametrize("parts", [1, 2])
def test_the_encoder_is_bit_for_bit_the_same_with_classifiers(parts: int) -> None:
    states, losses = [], []
    for classifiers in (False, True):
        method = method_of(classifiers=classifiers)
        optimizer = torch.optim.Adam(method.param_groups(False), lr=1e-3, weight_decay=1e-5)
        for step in range(3):
            method.before_step(step, 0)
            batch = batch_of(step)
            shares = batch.split(parts)
            given: list[Any] = [None]
            if parts > 1:
                with torch.no_grad():
                    given = method.first_pass([(lambda p=part: p.views, part) for part in shares])
            for part, known in zip(shares, given, strict=True):
                loss, _ = method.step(part.views, part, known)
                (loss / parts).backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        states.append({k: v for k, v in method.state_dict().items() if k.startswith("trunk.")})
    assert losses[: len(losses) // 2] == losses[len(losses) // 2 :]
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


def test_the_classifiers_learn_from_the_features_of_both_views() -> None:
    method = method_of(classifiers=True)
    batch = batch_of(5)
    optimizer = torch.optim.Adam(
        [*method.classifier.parameters(), *method.mlp_classifier.parameters()], lr=0.05
    )
    figures = []
    for _ in range(30):
        loss, logs = method.step(batch.views, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        figures.append(logs)
    for name in ("linear", "mlp"):
        assert figures[-1][f"{name}_loss"] < 0.75 * figures[0][f"{name}_loss"]
        assert figures[-1][f"{name}_accuracy"] > 0.75  # a third by chance
    assert figures[-1]["1to7"] == pytest.approx(figures[0]["1to7"], rel=1e-12)


def test_mixture_features_are_residuals_and_no_two_are_alike() -> None:
    torch.manual_seed(0)
    module = MixtureFeatures(4, 3, 6)
    features = torch.randn(2, 4)
    mixed = module(features)
    first, _, second = module.layers
    want = features[:, None] + second(first(features).relu()).view(2, 3, 4)
    torch.testing.assert_close(mixed, want)
    assert not torch.allclose(mixed[:, 0], mixed[:, 1])
    nn.init.zeros_(second.weight)
    nn.init.zeros_(second.bias)
    assert torch.equal(module(features), features[:, None].expand(-1, 3, -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_near_full(dtype: torch.dtype) -> None:
    method = method_of(mixtures=2).float()
    batch = batch_of(6)
    views = [batch.views[0].float()]
    full, _ = method.step(views, batch)
    with torch.autocast("cpu", dtype=dtype):
        half, _ = method.step(views, batch)
    assert half.dtype == torch.float32
    assert half.item() == pytest.approx(full.item(), rel=0.02)
    half.backward()
    assert all(gradient.isfinite().all() for gradient in gradients_of(method).values())  # type: ignore[union-attr]


def test_compiling_the_trunk_reaches_its_maps() -> None:
    seen = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return graph.forward

    method = method_of()
    batch = batch_of(7)
    plain, _ = method.step(batch.views, batch)
    method.trunk.compile(backend=backend)
    compiled, _ = method.step(batch.views, batch)
    assert seen
    torch.testing.assert_close(compiled, plain)


class Other(nn.Module):
    num_features = 6


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "multi-crop": ({}, {"views": 8, "sizes": (224, 96)}, "views.count", "two views of one size"),
    "two sizes": ({}, {"views": 2, "sizes": (64, 32)}, "views.count", "64 and 32 pixels"),
    "one view": ({}, {"views": 1}, "views.count", "two views of one size"),
    "two views for Local DIM": (
        {"across_views": False, "costs": ["1to7"]},
        {"views": 2},
        "views.count",
        "takes one view",
    ),
    "5to5 within a view": ({"across_views": False}, {"views": 1}, "method.costs", "1to7"),
    "nothing for the features": ({"costs": ["5to5"]}, {}, "method.costs", "learn nothing"),
    "classifiers without labels": ({"classifiers": True}, {"classes": ()}, "method.classifiers", "no labels"),
    "classifiers of one class": ({"classifiers": True}, {"classes": ("a",)}, "method.classifiers", "'a'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_settings_that_can_not_work_are_refused(what: str) -> None:
    settings, shape, where, words = REFUSED[what]
    with pytest.raises(InputError) as caught:
        list(AMDIMConfig(**settings).check(shape_of(**shape)))
    assert caught.value.where == where
    assert words in str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("size", "words"),
    [(64, ["64 x 64", "trunk.options.encoder_size to 64"]), (48, ["48 x 48", "nearest takes 32"])],
)
def test_views_of_another_size_than_the_encoders_are_refused(size: int, words: list[str]) -> None:
    trunk = AMDIMEncoder(encoder_size=32, ndf=2, n_rkhs=8, n_depth=1)
    with pytest.raises(InputError) as caught:
        AMDIM(trunk, AMDIMConfig(), shape_of(sizes=(size,)), WorldOfOne())
    assert caught.value.where == "views.size"
    assert all(word in str(caught.value) for word in words)


def test_another_trunk_is_refused_with_advice() -> None:
    with pytest.raises(InputError, match="5 x 5 and 7 x 7") as caught:
        AMDIM(Other(), AMDIMConfig(), shape_of(), WorldOfOne())
    assert caught.value.where == "trunk.arch"
    assert "amdim" in str(caught.value.fix)
