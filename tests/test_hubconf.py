"""``torch.hub`` in fresh processes: offline, beside anybody's modules, without a question."""

from __future__ import annotations

import json
import shutil

import pytest

from tiny import ROOT
from weights.published import in_fresh_process, isolate, publish

# No network, and a helper that the scripts below share.
OFFLINE = """
import io, json, socket, sys, torch
def refuse(*_, **__):
    raise OSError("there is no network here")
socket.socket.connect = refuse
socket.create_connection = socket.getaddrinfo = refuse
torch.set_num_threads(1)
X = torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
def run(model):
    with torch.no_grad():
        return model.eval()(X)
"""


def script(body: str) -> str:
    return OFFLINE + body


@pytest.fixture(autouse=True)
def _homes(monkeypatch, tmp_path):
    isolate(monkeypatch, tmp_path)


def checkout(folder):
    """What ``torch.hub`` unpacks: the repository's files and nothing that was installed."""
    folder.mkdir(parents=True)
    skip = shutil.ignore_patterns("__pycache__")
    for package in ("zoo", "transfer", "cli"):
        shutil.copytree(ROOT / package, folder / package, ignore=skip)
    shutil.copy(ROOT / "hubconf.py", folder)
    return folder


@pytest.fixture
def hub(tmp_path):
    """A hub folder with a checkout of a branch."""
    checkout(tmp_path / "hub" / "owner_name_main")
    return tmp_path / "hub"


@pytest.fixture
def users(tmp_path):
    """A program's own modules, which happen to have our names."""
    folder = tmp_path / "program"
    for package in ("zoo", "cli", "transfer", "src"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text(f"MINE = {package!r}\n")
        (folder / package / "later.py").write_text("MINE = 'later'\n")
    for module in ("utils", "models"):
        (folder / f"{module}.py").write_text(f"MINE = {module!r}\n")
    return folder


def test_a_checkout_in_the_hub_folder_lists_and_loads_offline(hub, users):
    publish("me/small", tag="v1")
    code = script("""
hub, users = sys.argv[1:]
torch.hub.set_dir(hub)
repository = "owner/name:main"
names = torch.hub.list(repository)
assert "load" in names, names
assert not [name for name in names if name.startswith("_")], names
assert "random:" in torch.hub.help(repository, "load")
heavy = [name for name in sys.modules if name.split(".")[0] in ("torchvision", "PIL", "safetensors", "pydantic")]
assert not heavy, heavy
assert not [name for name in sys.modules if name.split(".")[0] == "zoo" or name.startswith("_zoo_hub")]
model = torch.hub.load(repository, "load", "me/small@v1", progress=False)
assert run(model).shape == (1, 64)
assert torch.equal(run(model), run(torch.hub.load(repository, "load", "me/small", progress=False)))
# What comes after us finds its names free.
sys.path.insert(0, users)
import zoo.later, cli.later, transfer.later, utils, models
assert zoo.MINE == "zoo" and cli.MINE == "cli" and transfer.MINE == "transfer" and models.MINE == "models"
assert run(torch.hub.load(repository, "load", "random:resnet18@1", progress=False)).shape == (1, 512)
print(json.dumps(names))
""")
    done = in_fresh_process(code, hub, users, cwd=hub)
    assert "load" in json.loads(done.stdout.splitlines()[-1])


def test_it_lives_beside_a_programs_modules_and_another_checkout(tmp_path, users, run):  # case 8
    publish("me/small")
    first, second = checkout(tmp_path / "one" / "vision"), checkout(tmp_path / "two" / "vision")
    loading = second / "zoo" / "loading.py"
    text = loading.read_text()
    assert text.count("model.zoo_info = loaded.info") == 1
    loading.write_text(
        text.replace("model.zoo_info = loaded.info", "model.zoo_info = {**loaded.info, 'second': True}")
    )
    code = script("""
first, second, users, trained = sys.argv[1:]
sys.path.insert(0, users)
import zoo, cli, transfer, src, utils, models
names = ("zoo", "cli", "transfer", "src", "utils", "models")
before = {name: sys.modules[name] for name in names}
a = torch.hub.load(first, "load", "me/small", source="local", progress=False)
b = torch.hub.load(second, "load", "me/small", source="local", progress=False)
c = torch.hub.load(first, "load", "me/small", source="local", progress=False)
assert "second" not in a.zoo_info and b.zoo_info["second"] and "second" not in c.zoo_info
assert torch.equal(run(a), run(b)) and torch.equal(run(a), run(c))
from torchvision.models.resnet import ResNet
assert type(a) is type(b) is type(c) is ResNet  # whichever checkout: any program can unpickle it
# A run is read by code that lies deep, where registries import by name.
d = torch.hub.load(first, "load", "run:" + trained, source="local", progress=False)
assert run(d).shape[1] == d.fc.in_features
assert {name: sys.modules[name] for name in names} == before
assert all(module.MINE == name for name, module in before.items())
assert first not in sys.path and second not in sys.path
import zoo.later
assert zoo.later.MINE == "later"
print("fine")
""")
    assert in_fresh_process(code, first, second, users, run).stdout == "fine\n"


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    from weights.published import small_run

    return small_run(tmp_path_factory)


def test_a_hidden_dependency_is_named_and_listing_still_works(hub, tmp_path):  # case 53
    broken = tmp_path / "broken"
    (broken / "yaml").mkdir(parents=True)
    (broken / "yaml" / "__init__.py").write_text("raise ImportError('this yaml is broken on purpose')\n")
    code = script("""
hub, broken = sys.argv[1:]
torch.hub.set_dir(hub)
repository = "owner/name:main"
sys.modules["safetensors"] = None
assert {"load", "swav_resnet50"} <= set(torch.hub.list(repository))
try:
    torch.hub.load(repository, "load", "random:resnet18")
except RuntimeError as error:
    assert "safetensors" in str(error), error
else:
    raise AssertionError("loaded without safetensors")
del sys.modules["safetensors"]
# Found, but it fails when it is imported: what it says must reach the user.
sys.path.insert(0, broken)
assert "load" in torch.hub.list(repository)
try:
    torch.hub.load(repository, "load", "run:nowhere")
except Exception as error:
    assert "broken on purpose" in str(error), error
else:
    raise AssertionError("loaded with a broken yaml")
sys.path.remove(broken)
for reference, words in (("me/nothing", "nor a model"), ("radnom:resnet18", "no kind of model")):
    try:
        torch.hub.load(repository, "load", reference)
    except Exception as error:
        assert type(error).__name__ == "InputError" and words in str(error), error
print("fine")
""")
    assert in_fresh_process(code, hub, broken).stdout == "fine\n"


def test_the_entries_take_what_torchvisions_take(hub):
    """In this process: torch.hub never asks about a local folder, nor prints to standard output."""
    import torch
    from torch import nn
    from torchvision.models.resnet import ResNet
    from torchvision.ops import FrozenBatchNorm2d

    publish("me/small")
    repository = str(hub / "owner_name_main")
    model = torch.hub.load(
        repository,
        "load",
        "me/small",
        source="local",
        num_classes=5,
        norm_layer=FrozenBatchNorm2d,
        progress=False,
    )
    assert isinstance(model, ResNet) and model.fc.out_features == 5
    assert isinstance(model.bn1, FrozenBatchNorm2d)
    plain = torch.hub.load(repository, "load", "random:resnet18@3", source="local", progress=False)
    assert type(plain) is ResNet and type(plain.fc) is nn.Identity and plain.fc.in_features == 512


def test_swav_resnet50_is_a_drop_in_for_the_supervised_one(hub):
    import torch
    from torch import nn
    from torchvision.models.resnet import ResNet

    repository = str(hub / "owner_name_main")

    def swav(**arguments):
        return torch.hub.load(repository, "swav_resnet50", source="local", progress=False, **arguments)

    bare = swav(pretrained=False)
    assert type(bare) is ResNet and type(bare.fc) is nn.Identity and bare.fc.in_features == 2048
    weights = swav(weights="random:resnet50@2")
    assert not torch.equal(weights.conv1.weight, bare.conv1.weight)
    assert swav(pretrained=False, num_classes=3).fc.out_features == 3
    with pytest.raises(ValueError, match="resnet18, not a resnet50"):
        swav(weights="random:resnet18")
    with pytest.raises(ValueError, match="pass weights="):
        swav()
