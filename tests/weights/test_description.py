"""Whether ``zoo.json`` is complete, field by field."""

from __future__ import annotations

import pytest

from zoo.diff import diff
from zoo.doctor import diagnose
from zoo.errors import InputError
from zoo.verify import verify
from zoo.weights.description import check_description, check_preprocessing

from .published import describe
from .verifying import failed, recorded, rewrite

__all__ = ["recorded"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": ...}, "method is missing"),
        ({"num_features": "64"}, "num_features is a text, not a whole number"),
        ({"num_features": True}, "num_features is bool"),
        ({"base_planes": 8.0}, "base_planes is a number, not a whole number or null"),
        ({"results": {}}, "results is an object, not a list"),
        ({"results": [3]}, "results holds"),
        ({"lineage": None}, "lineage is null"),
        ({"features": {"picture": "rings-1"}}, "features lacks"),
        ({"preprocessing": {"mean": [0.5]}}, "preprocessing.std"),
    ],
)
def test_every_field_of_the_description_has_its_type(recorded, changes, said):
    rewrite(recorded, **changes)
    found = verify(str(recorded))
    assert list(failed(found)) == ["description"] and said in failed(found)["description"]


def test_two_wrong_fields_are_both_named_and_new_ones_are_let_pass(recorded):
    rewrite(recorded, arch=..., licence=3)
    said = failed(verify(str(recorded)))["description"]
    assert "arch is missing" in said and "licence is a whole number" in said
    rewrite(recorded, arch="resnet18", licence="mit", colour="red")
    found = verify(str(recorded))
    assert (
        found.passed
        and "of a later version: colour" in {c.name: c.detail for c in found.checks}["description"]
    )


def test_the_description_of_every_kind_of_bundle_passes():
    options = {"encoder_size": 32, "ndf": 4, "n_rkhs": 24, "n_depth": 2, "use_bn": False}
    for what in (describe(), describe(options=options, num_classes=3, recipe={}, results=[{"metrics": {}}])):
        assert check_description(what.to_json(), "here") == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mean": [0.1, 0.2]}, "one length"),
        ({"std": [0.2, 0.0, 0.2]}, "above 0"),
        ({"mean": [0.5], "std": [0.5]}, "1 values, the network takes 3"),
        ({"crop": 0}, "crop"),
        ({"resize": 32.0}, "resize"),
        ({"interpolation": "cubic"}, "'cubic'"),
        ({"mean": [0.1, 0.2, float("nan")]}, "mean"),
    ],
)
def test_a_preprocessing_that_can_not_be(changes, said):
    how = {**describe().preprocessing, **changes}
    with pytest.raises(InputError, match="preprocessing") as caught:
        check_preprocessing(how, "here", 3)
    assert said in caught.value.what and caught.value.where == "here"


@pytest.mark.parametrize(
    "changes",
    [
        {"preprocessing": {}},
        {"preprocessing": 3},
        {"aliases": {"model.safetensors": 3}},
        {"aliases": {"model.safetensors": {"a": ["b"]}}},
        {"base_planes": 10**12},
        {"lineage": {"converted_from": 3}},
    ],
)
def test_nobody_stumbles_over_a_made_up_description(recorded, changes):
    rewrite(recorded, **changes)
    assert list(failed(verify(str(recorded)))) == ["description"]
    assert diagnose(str(recorded))["verdict"] == "unreadable"
    with pytest.raises(InputError, match="not as it should be"):
        diff(str(recorded), str(recorded))
