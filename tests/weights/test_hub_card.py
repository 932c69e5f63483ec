"""The card of a repository: complete before anything is sent, and each of its code lines runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
import yaml

import zoo
from tiny import ROOT
from zoo.errors import InputError
from zoo.weights.hub_card import check_card, hub_card

from .hub_server import serving
from .hub_state import TOKEN
from .hub_world import HF, NAME, model, send, settle
from .published import describe, publish, standard

KNN = {"recipe": "knn", "dataset": "photos", "metrics": {"top1": 61.5, "top5": 90.0}, "protocol": {"k": 20}}


def metadata(card):
    return yaml.safe_load(card.split("---\n")[1])


def of(what, transformers=False):
    return hub_card(NAME, what, transformers=transformers)


def test_each_protocol_has_a_row_of_its_own():
    results = [
        KNN,
        {**KNN, "protocol": {"k": 200}},
        {**KNN, "protocol": {"k": 200}},
        {"recipe": "linear", "dataset": "photos", "metrics": {"top1": 70.0, "lr": None}, "protocol": {}},
        {"recipe": "detect", "dataset": "voc", "metrics": {"AP": 50.0}, "protocol": {}},
    ]
    card = of(describe(licence="mit", results=results))
    check_card(card, 5)
    rows = metadata(card)["model-index"][0]["results"]
    configs = [row["dataset"]["config"] for row in rows]
    assert configs == ["knn (k 20)", "knn (k 200)", "knn (k 200) #2", "linear", "detect"]
    assert rows[-1]["task"]["type"] == "object-detection"
    assert [m["value"] for m in rows[0]["metrics"]] == [61.5, 90.0]
    assert "| knn | photos | top1 | 61.5 | k 20 |" in card


def test_rows_that_would_be_merged_are_refused():
    card = of(describe(licence="mit", results=[KNN, {**KNN, "protocol": {"k": 200}}]))
    with pytest.raises(InputError, match="merged or lost"):
        check_card(card.replace("knn (k 200)", "knn (k 20)"), 2)
    with pytest.raises(InputError, match="merged or lost"):
        check_card(card, 3)


@pytest.mark.parametrize(
    ("licence", "told"),
    [("MIT", {"license": "mit"}), ("Own: words, v2!", {"license": "other", "license_name": "own-words-v2"})],
)
def test_a_licence_is_stated_as_the_hub_knows_it(licence, told):
    card = of(describe(licence=licence))
    check_card(card, 0)
    assert told.items() <= metadata(card).items()
    assert licence in card


def test_without_a_licence_there_is_no_card():
    with pytest.raises(InputError, match="needs a licence") as caught:
        of(describe())
    assert "--licence" in caught.value.fix


def test_base_and_lineage_are_named():
    lineage = {"run": "second", "step": 6, "total_steps": 6, "init_from": "hf:you/base@v1"}
    card = of(describe(licence="mit", lineage=lineage))
    assert metadata(card)["base_model"] == "you/base"
    assert "- init from: hf:you/base@v1" in card and "- run: second" in card
    assert "base_model" not in metadata(of(describe(licence="mit")))


def test_odd_characters_break_nothing():
    odd = "pf\udce4d | <script> \x07 --- \n# not a title: `x` 漢字 \U0001f600"
    results = [{**KNN, "dataset": odd, "protocol": {odd: odd}}]
    what = describe(
        licence="mit", method=odd, results=results, data={"sources": [odd], "kind": "files", "count": 1}
    )
    card = of(what)
    check_card(card, 1)
    lines = card.splitlines()
    assert sum(line.startswith("# ") for line in lines) == 1
    assert all(line.count("|") - line.count("\\|") == 6 for line in lines if line.startswith("| "))
    assert "<script>" not in card.split("---\n", 2)[2].split("```json")[0]
    assert "漢字" in card and card.encode("utf-8")


def test_a_card_that_can_t_be_read_is_refused():
    for bad in ("---\nlicense: [\n---\n", "---\nlicense: nonsense\n---\n", "no metadata", "---\na: 1\n---\n"):
        with pytest.raises(InputError):
            check_card(bad, 0)


# --- strangers ---


@pytest.fixture(scope="module")
def homes(tmp_path_factory):
    """A server with a standard ResNet-18, a narrow one and a ResNeXt, published by our command."""
    folder = tmp_path_factory.mktemp("strangers")
    with pytest.MonkeyPatch.context() as patch, serving() as hub:
        for variable in ("ZOO_HOME", "ZOO_CACHE"):
            patch.setenv(variable, str(folder / variable))
        settle(patch, hub, folder)
        publish("me/standard", what=standard(licence="mit"))
        model()
        send("me/standard", "hf:me/standard")
        send()
        yield hub, folder


def blocks(hub, name):
    card = hub.repos[name].files["README.md"].decode()
    return re.findall(r"```python\n(.*?)```", card, re.DOTALL)


_COMPARE = """
import torch
X = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    out = model.eval()(X)
out = getattr(out, "pooler_output", out).flatten(1)
torch.save(out, {place!r})
"""


def run_lines(hub, folder, lines, place):
    """Lines of a card in a process of their own, as a stranger types them."""
    code = lines.replace("REPOSITORY", repr(str(ROOT))) + _COMPARE.format(place=str(place))
    env = {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(folder / "stranger"),
        "ZOO_HOME": str(folder / "stranger-home"),
        "ZOO_CACHE": str(folder / "stranger-cache"),
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    env.pop("HF_TOKEN", None)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stderr
    return torch.load(place, weights_only=True)


def test_every_line_of_the_card_runs(homes, tmp_path, monkeypatch):
    hub, folder = homes
    settle_again = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / "hf"), "HF_TOKEN": TOKEN}
    for variable, value in settle_again.items():
        monkeypatch.setenv(variable, value)
    found = blocks(hub, "me/standard")
    kinds = (
        "import zoo",
        "torch.hub.load",
        "import timm",
        "from transformers",
        "torchvision.models.resnet18",
    )
    assert len(found) == len(kinds) and all(kind in block for kind, block in zip(kinds, found, strict=True))
    expected = zoo.load("hf:me/standard", progress=False).eval()
    with torch.no_grad():
        wanted = expected(torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)))
    # One process for all: what they import is most of the time.
    lines = [block for block in found if "transformers" not in block]
    code = "models = []\n" + "".join(f"{block}\nmodels.append(model.eval())\n" for block in lines)
    code += (
        "import torch\n"
        "class All(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.stack([model(x) for model in models])\n"
        "model = All()\n"
    )
    got = run_lines(hub, folder, code, tmp_path / "out.pt").reshape(len(lines), *wanted.shape)
    for block, values in zip(lines, got, strict=True):
        assert torch.equal(values, wanted), block


_OTHER_CLASSES = """
import torch
import transformers
others = [
    getattr(transformers, kind).from_pretrained("{name}", subfolder="transformers")
    for kind in ("ResNetModel", "ResNetForImageClassification")
]
assert all(type(found) is transformers.ResNetModel for found in (model, others[0], others[1].resnet))
wanted = model.state_dict()
for found in (others[0], others[1].resnet):
    assert all(torch.equal(value, wanted[key]) for key, value in found.state_dict().items())
if {standard}:  # timm has the architecture, and transformers has timm
    whole = AutoModel.from_pretrained("{name}").eval()
    x = torch.zeros(1, 3, 64, 64)
    torch.testing.assert_close(whole(x).pooler_output.flatten(), model.eval()(x).pooler_output.flatten())
"""


@pytest.mark.parametrize("name", ["me/standard", NAME])
def test_the_lines_for_transformers_run(homes, tmp_path, monkeypatch, name):
    hub, folder = homes
    for variable, value in {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / "hf")}.items():
        monkeypatch.setenv(variable, value)
    block = next(block for block in blocks(hub, name) if "transformers" in block)
    more = _OTHER_CLASSES.format(name=name, standard=name == "me/standard")
    got = run_lines(hub, folder, block + more, tmp_path / "out.pt")
    with torch.no_grad():
        model = zoo.load(f"hf:{name}", progress=False).eval()
        wanted = model(torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_the_files_for_transformers_are_what_its_classes_ask_for(homes):
    """Where transformers isn't installed, at least the names and shapes that its ResNet has."""
    from safetensors.torch import load

    hub, _ = homes
    files = hub.repos[NAME].files
    tensors = load(files["transformers/model.safetensors"])
    ours = load(files["model.safetensors"])
    assert len(tensors) == len(ours)
    assert torch.equal(tensors["embedder.embedder.convolution.weight"], ours["conv1.weight"])
    assert b'"model_type": "resnet"' in files["transformers/config.json"]
    assert HF.removeprefix("hf:") in files["README.md"].decode()
