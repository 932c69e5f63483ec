"""AMDIM's costs, soft clip, classifiers' cost and short training against the reference's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zoo.pretrain.losses.amdim import Maps, amdim_costs, classifier_cost, matches, soft_clip

from .cases import Case, case_ids, load

COSTS = case_ids("amdim_nce")
NAMES = {"1to5": "loss_1t5", "1to7": "loss_1t7", "5to5": "loss_5t5", "regularizer": "lgt_reg"}


def leaves(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    names = [f"r{side}_x{view}" for view in (1, 2) for side in (1, 5, 7)]
    return {name: case.inputs[name].to(dtype).requires_grad_() for name in names}


def costs_of(case: Case, maps: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    views = [
        Maps(maps[f"r1_x{view}"].flatten(1)[:, None], maps[f"r5_x{view}"], maps[f"r7_x{view}"])
        for view in (1, 2)
    ]
    places = torch.stack([case.inputs["loc5_x1"], case.inputs["loc5_x2"]])
    return amdim_costs(views, places, clip=case.args["tclip"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", COSTS)
def test_costs_and_gradients(
    shared: Path, name: str, layout: torch.memory_format, dtype: torch.dtype
) -> None:
    case = load(shared, name)
    maps = leaves(case, dtype)
    found = costs_of(case, {key: value.contiguous(memory_format=layout) for key, value in maps.items()})
    for key, output in NAMES.items():
        case.check(output, found[key])
        assert found[key].dtype == dtype
    total = torch.stack(list(found.values())).sum()
    case.check("total", total)
    total.backward()
    for key, value in maps.items():
        case.check(f"grad/{key}", value.grad)


@pytest.mark.parametrize("name", COSTS)
@torch.no_grad()
def test_each_terms_score(shared: Path, name: str) -> None:
    case = load(shared, name)
    r1, r7, clip = case.inputs["r1_x1"], case.inputs["r7_x2"], case.args["tclip"]
    terms, squares = matches(r1.flatten(1)[:, None], r7, clip)
    case.check("scores_1to7_x1x2/nce_scores", terms[:, 0])
    case.check("scores_1to7_x1x2/lgt_reg", 0.05 * squares[0])
    own = torch.einsum("bd,bdl->bl", r1.flatten(1), r7.flatten(2)) / r1.shape[1] ** 0.5
    case.check("scores_1to7_x1x2/pos_scores", soft_clip(own, clip))


@pytest.mark.parametrize("name", COSTS)
@torch.no_grad()
def test_the_papers_regularizer_and_single_costs(shared: Path, name: str) -> None:
    """The mean square weighs 0.04 in the paper; a cost that is left out changes no other."""
    case = load(shared, name)
    maps = leaves(case, torch.float64)
    views = [Maps(maps[f"r1_x{v}"].flatten(1)[:, None], maps[f"r5_x{v}"], maps[f"r7_x{v}"]) for v in (1, 2)]
    places = torch.stack([case.inputs["loc5_x1"], case.inputs["loc5_x2"]])
    clip = case.args["tclip"]
    regularizers = 0.0
    for cost in ("1to5", "1to7", "5to5"):
        alone = amdim_costs(views, places, (cost,), clip=clip, regularizer=0.04)  # type: ignore[arg-type]
        assert list(alone) == [cost, "regularizer"]
        case.check(NAMES[cost], alone[cost])
        regularizers += float(alone["regularizer"])
    case.compare("lgt_reg", regularizers / 0.8, case.outputs["lgt_reg"])


@pytest.mark.parametrize("name", case_ids("amdim_tanhclip"))
def test_soft_clip_and_the_classifiers_cost(shared: Path, name: str) -> None:
    case = load(shared, name)
    for limit in case.args["clips"]:
        case.check(f"clip{limit:.0f}", soft_clip(case.inputs["x"], limit))
    logits = case.inputs["logits"].requires_grad_()
    loss = classifier_cost(logits, case.inputs["labels"])
    case.check("loss_xent", loss)
    loss.backward()
    case.check("grad_logits", logits.grad)
