"""``zoo list`` and ``zoo show`` of the catalog: what there is, and quickly."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import pytest

import zoo
from tiny import ROOT
from zoo.errors import InputError
from zoo.weights.catalog import CATALOG, find_card
from zoo.weights.hubs.url import fetch
from zoo.weights.listing import cached, card_document, card_lines, catalog_rows

from .published import assert_clear, publish

BEST = "swav_resnet50.800ep"


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """A released file that was fetched from the user's own mirror; its publisher states no hash."""
    (tmp_path / "mirror").mkdir()
    card = find_card(BEST)
    (tmp_path / "mirror" / card.file.name).write_bytes(b"weights")
    monkeypatch.setenv("ZOO_MIRROR", str(tmp_path / "mirror"))
    return fetch(card, progress=False)


def test_the_list_has_every_card():
    rows = {row["name"]: row for row in catalog_rows()}
    assert list(rows) == list(CATALOG)
    assert rows[BEST] == {
        "name": BEST, "method": "swav", "arch": "resnet50", "epochs": 800, "licence": "CC-BY-NC-4.0", "top1": 75.3,
        "cached": False,
    }  # fmt: skip
    assert rows["supervised_resnet50.v1"]["top1"] == 76.13
    assert rows["amdim_medium.in128"]["top1"] is None and rows["amdim_large.in128"]["top1"] == 68.1


def test_what_was_fetched_is_said_to_be_cached(kept):
    assert cached(find_card(BEST).file) == kept
    assert [row["name"] for row in catalog_rows() if row["cached"]] == [BEST]
    document = card_document(find_card(BEST))
    assert document["cached"] == str(kept) and document["pinned"] == hashlib.sha256(b"weights").hexdigest()
    assert document["pinned"] in "\n".join(card_lines(find_card(BEST)))
    assert card_document(find_card("swav_resnet50.400ep"))["pinned"] is None


def test_the_command_lists_both(command):
    code, out, err = command("list")
    assert (code, err) == (0, "") and "no models in" in out and "zoo publish" in out
    assert all(name in out for name in CATALOG) and "75.3" in out and "CC-BY-NC-4.0" in out
    done = publish("me/one")
    out = command("list")[1]
    assert out.index(done.revision) < out.index(BEST)
    answer = json.loads(command("list", "--json")[1])
    assert [row["model"] for row in answer["models"]] == ["me/one"]
    assert [row["name"] for row in answer["catalog"]] == list(CATALOG)


def test_python_says_what_the_commands_say(command):
    done = publish("me/one", tag="v1")
    publish("me/one", seed=1)
    assert zoo.list_models() == json.loads(command("list", "--json")[1])
    (row,) = zoo.list_models()["models"]
    assert row["tags"] == ["v1"] and row["revisions"] == 2 and row["latest"] != done.revision
    assert zoo.describe("local:me/one@v1")["path"] == str(done.path)  # from now on there is a receipt
    for name in ("me/one@v1", BEST):
        assert zoo.describe(name) == json.loads(command("show", name, "--json")[1])
    with pytest.raises(InputError, match="no such model"):
        zoo.describe("me/two")


def test_show_prints_a_card(command, kept):
    code, out, err = command("show", BEST)
    assert (code, err) == (0, "")
    card = find_card(BEST)
    for word in (
        card.file.mirrors[0], card.page, card.licence, "unpinned upstream", "pinned on this machine", str(kept),
        "23,508,032 parameters", "SwAV paper, figure 2", "53.9", f'zoo.load("{BEST}", classifier="imagenet1k")',
    ):  # fmt: skip
        assert word in out, word
    assert command("show", f"catalog:{BEST}")[1] == out
    answer = json.loads(command("show", BEST, "--json")[1])
    assert answer["schema"] == 1 and answer["name"] == BEST and answer["pinning"] == "unpinned upstream"
    assert answer["metrics"][0]["value"] == 75.3 and answer["cached"] == str(kept)


@pytest.mark.parametrize("name", list(CATALOG))
def test_every_card_can_be_shown(name):
    text = "\n".join(card_lines(find_card(name)))
    assert "None" not in text and find_card(name).file.name in text


def test_what_nobody_serves_says_what_to_do(command):
    out = command("show", "amdim_large.in128")[1]
    assert "nobody serves it any more" in out and "ZOO_MIRROR" in out and "encoder_size 128" in out


def test_show_refuses_clearly(command):
    publish("me/one")
    assert_clear(command("show", "swav_resnet50"), "say which: swav_resnet50.800ep")
    assert_clear(command("show", "swav_resnet50.80ep"), "did you mean swav_resnet50.800ep")
    assert_clear(command("show", "catalog:nothing"), "nothing", "zoo list")
    assert_clear(command("show", BEST, "--verify"), f"zoo verify {BEST}")
    assert_clear(command("show", "me/two"), "did you mean me/one")
    assert_clear(command("show", "local:one"), "org/name")


def test_looking_loads_no_torch():
    publish("me/one")
    code = (
        "import sys\n"
        "from cli.main import run\n"
        "for line in sys.argv[1:]:\n"
        "    try:\n"
        "        run(line.split())\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, line\n"
        "    heavy = {'torch', 'torchvision', 'numpy', 'safetensors', 'huggingface_hub'} & set(sys.modules)\n"
        "    assert not heavy, (line, heavy)\n"
    )
    commands = ["list", "list --json", f"show {BEST}", f"show {BEST} --json", "show me/one", "show me/one --json",
                "tag me/one v1", "verify --help", "doctor --help", "diff --help"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code, *commands], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
