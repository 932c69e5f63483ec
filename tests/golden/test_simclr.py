"""SimCLR's loss with several positives against the paper's formula, computed pair by pair elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from zoo.pretrain.losses.nt_xent import nt_xent, survey

from .cases import Case, case_ids, load

CASES = case_ids("simclr_multicrop_")


def check_layout(case: Case) -> None:
    """Rows are crop-major: the loss takes for granted what the case says of each row."""
    batch = case.args["B"]
    assert case.inputs["instance"].tolist() == list(range(batch)) * case.args["M"]


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient(shared: Path, name: str) -> None:
    case = load(shared, name)
    check_layout(case)
    rows = case.inputs["z"].clone().requires_grad_()
    loss = nt_xent(rows, case.args["M"], case.args["tau"])
    loss.backward()
    assert rows.grad is not None
    case.check("loss", loss)
    case.check("grad_z", rows.grad)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_image_by_image(shared: Path, name: str) -> None:
    """Each image is a part of its own that knows the others from the survey."""
    case = load(shared, name)
    check_layout(case)
    batch, views, temperature = (case.args[key] for key in ("B", "M", "tau"))
    rows = case.inputs["z"].clone().requires_grad_()
    parts = [rows[image::batch] for image in range(batch)]
    found = survey([part.detach() for part in parts], views, temperature)
    losses = [nt_xent(p, views, temperature, whole=w) for p, w in zip(parts, found, strict=True)]
    loss = sum(losses) / batch
    loss.backward()
    assert rows.grad is not None
    case.check("loss", loss)
    case.check("grad_z", rows.grad)
