"""``zoo plan``: what is printed, its JSON, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tiny import TINY, as_options, image_folder

KEYS = {
    "schema",
    "name",
    "summary",
    "published",
    "recipe",
    "sources",
    "images",
    "devices",
    "steps",
    "learning_rate",
    "parameters",
    "crops",
    "flops",
    "memory",
    "exchanged",
    "checkpoints",
    "time",
    "failures",
    "uncounted",
    "scaling",
    "paper",
    "trial",
    "warnings",
}
SETS = as_options({key: value for key, value in TINY.items() if key not in ("epochs", "batch_size")})
SMALL = ["swav_tiny", "--epochs", "2", "--batch-size", "8", *SETS]


@pytest.fixture(autouse=True)
def _one_processor(monkeypatch):
    monkeypatch.setattr("zoo.engine.precision.processors", lambda: 1)


@pytest.fixture()
def zoo(zoo):
    return lambda *words: zoo("plan", *words)


def test_a_plan_for_people(zoo):
    code, out, err = zoo(
        *SMALL, "--images", "24", "--gpus", "2", "--device-kind", "v100", "--failures", "0.01"
    )
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "epochs: 2  # option" in lines and "  prototypes: 8  # --set" in lines  # the recipe, with sources
    for part in (
        "24 (as given)",
        "2 x v100 (16.00 GB), float32",
        "6: 2 epochs of 3",
        "prototypes 64",
        "in practice about",
        "gradients",
        "lost by failures",
        "2 x 16",
        "Not on 8, 16",
    ):
        assert part in out
    # What doesn't fit comes last, and is counted.
    assert lines[-2].startswith("warning: crops of 16 and 8 pixels") and lines[-1] == "1 warning"


def test_the_paper_stands_beside_its_recipe(zoo):
    code, out, _ = zoo("swav_rn50_100ep", "--gpus", "64", "--device-kind", "v100")
    assert code == 0 and out.splitlines()[-1] == "0 warnings"
    assert "100 epochs in 6 h 15 min, 12.8 GB a device (SwAV's table 4" in out
    assert "the assumed speed comes from this very run" in out
    assert "1,281,167 (ImageNet, as published" in out


def test_a_plan_as_json(zoo, tmp_path):
    folder = image_folder(tmp_path / "images", 24)
    code, out, err = zoo(*SMALL, "--data", folder, "--device-kind", "cpu", "--img-s", "100", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "") and found["schema"] == 1
    assert found.keys() == KEYS
    assert found["images"] == {"count": 24, "source": str(folder), "classes": 2}
    assert found["time"]["step_seconds"] == pytest.approx(8 / 100)
    assert found["learning_rate"] == {"lr": 0.001, "optimizer": "adamw", "linear_rule": None}
    assert found["sources"]["batch_size"] == "option"
    for row in found["scaling"]:
        assert row.keys() == found["scaling"][0].keys()


def test_a_probe_measures(zoo, tmp_path):
    folder = image_folder(tmp_path / "images", 24)
    code, out, err = zoo(*SMALL, "--data", folder, "--device-kind", "cpu", "--probe", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["time"]["from"] == "measured" and found["trial"]["images"] == 8
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["swav_tinny"], ["swav_tinny", "swav_tiny"]),
        (["swav_tiny", "--device-kind", "v10"], ["v10", "v100"]),
        (["swav_tiny", "--gpus", "3"], ["64 images", "3 process(es)", "multiple of 3"]),
        (["swav_tiny", "--img-s", "0"], ["--img-s 0"]),
        (["swav_tiny", "--failures=-1"], ["--failures -1"]),
        (["swav_tiny", "--failures", "nan"], ["--failures nan"]),
        (["swav_tiny", "--img-s", "inf"], ["--img-s inf"]),
        (["swav_tiny", "--restart", "1e308"], ["--restart 1e+308"]),
        (["swav_tiny", "--images", "9", "--data", "x"], ["--images 9"]),
        (["swav_tiny", "--epochs", "9", "--samples", "64"], ["--epochs 9"]),
        (["swav_tiny", "--data", "/no/such/folder"], ["/no/such/folder"]),
        (
            [
                "moco_v2_rn50_200ep",
                *("--set", "method.dictionary=memory_bank", "--set", "method.shuffle_groups=1"),
                *("--images", str(10**12), "--device-kind", "h200", "--gpus", "8"),
            ],
            [f"{10**12} keys of 128 numbers", "h200 has 141.0 GB", "method.dictionary", "dictionary: queue"],
        ),
    ],
)
def test_mistakes_are_told_and_not_planned(zoo, words, named):
    code, out, err = zoo(*words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and "Traceback" not in err and "unexpected" not in err
    for name in named:
        assert name in err


def test_devices_that_never_fail(zoo):
    code, out, err = zoo("swav_tiny", "--images", "640", "--img-s", "100", "--failures", "0", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["failures"] is None


def test_mistakes_load_no_torch():
    code = (
        "import sys\n"
        "from cli.main import run\n"
        "for words in (['plan', 'swav_tinny'], ['plan', 'swav_tiny', '--gpus', '3', '--device-kind', 'v100']):\n"
        "    try:\n"
        "        run(words)\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 2, words\n"
        "    assert 'torch' not in sys.modules, words\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
