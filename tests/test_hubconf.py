"""``torch.hub`` in fresh processes: offline, beside anybody's modules, without a question."""

from __future__ import annotations

import json
import shutil

import pytest

from tiny import ROOT
from weights.published import describe, in_fresh_process, isolate, publish
from zoo.weights.catalog import CATALOG

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


# --- entries with released weights ---

ENTRIES = (
    *("swav_resnet50", "swav_resnet50w2", "swav_resnet50w4", "swav_resnet50w5"),
    *("deepclusterv2_resnet50", "selav2_resnet50", "moco_v1_resnet50", "moco_v2_resnet50"),
    *("amdim_medium", "amdim_large"),
)
every_entry = pytest.mark.parametrize("entry", ENTRIES)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A checkout, for tests in this process."""
    return str(checkout(tmp_path_factory.mktemp("hub") / "owner_name_main"))


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A folder with files in the layout of SwAV's release: a pretraining file and its linear classifier."""
    import torch

    from zoo.models.factory import create_trunk

    folder = tmp_path_factory.mktemp("released")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        state = {f"module.{key}": value for key, value in create_trunk("resnet50").state_dict().items()}
        for name, shape in {
            "projection_head.0.weight": (2048, 2048), "projection_head.0.bias": (2048,),
            "projection_head.1.weight": (2048,), "projection_head.1.bias": (2048,),
            "projection_head.1.running_mean": (2048,), "projection_head.1.running_var": (2048,),
            "projection_head.3.weight": (128, 2048), "projection_head.3.bias": (128,),
            "prototypes.weight": (3000, 128),
        }.items():  # fmt: skip
            state[f"module.{name}"] = torch.rand(shape)
        state["module.projection_head.1.num_batches_tracked"] = torch.tensor(3)
        torch.save(state, folder / "swav_800ep_pretrain.pth.tar")
        linear = {"module.linear.weight": torch.randn(1000, 2048), "module.linear.bias": torch.randn(1000)}
    torch.save(
        {"epoch": 100, "state_dict": linear, "best_acc": 75.3}, folder / "swav_800ep_eval_linear.pth.tar"
    )
    return folder


def cards_of(entry):
    return [card for name, card in CATALOG.items() if name.startswith(f"{entry}.")]


def entry_of(repository, entry, **arguments):
    import torch

    return torch.hub.load(repository, entry, source="local", progress=False, **arguments)


@every_entry
def test_help_names_all_released_weights_and_their_numbers(repository, entry):
    import importlib.util

    spec = importlib.util.spec_from_file_location("hubconf_for_help", f"{repository}/hubconf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert set(ENTRIES) | {"load"} == {
        name for name, value in vars(module).items() if callable(value) and not name.startswith("_")
    }
    told = " ".join(getattr(module, entry).__doc__.split())  # what torch.hub.help prints
    cards = cards_of(entry)
    assert f"{cards[0].num_features:,} features" in told and cards[0].licence in told
    for card in cards:
        assert (card.file.name if card.file.gone else card.name.partition(".")[2]) in told
        for metric in card.metrics[:1]:
            assert str(metric.value) in told
    assert ("0.228" in told) == (cards[0].preprocessing["std"][0] == 0.228)


@every_entry
def test_an_entry_is_the_best_of_the_catalog_or_what_is_asked_for(repository, entry, monkeypatch):
    """Without a network and with an empty cache an entry says which file it would fetch."""
    monkeypatch.delenv("ZOO_MIRROR", raising=False)
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    cards = cards_of(entry)
    tags = [(card.name.partition(".")[2], card) for card in cards]
    for weights, card in (None, cards[0]), *tags, (cards[-1].name, cards[-1]):
        with pytest.raises(Exception, match=rf"{card.file.name} (is not in the cache|any more)") as caught:
            entry_of(repository, entry, weights=weights)
        assert type(caught.value).__name__ == "InputError"


@every_entry
def test_the_bare_network_needs_nothing(repository, entry):
    import torch

    with torch.device("meta"):  # five of them would not fit into a laptop's memory
        model = entry_of(repository, entry, pretrained=False)
    card = cards_of(entry)[0]
    assert model.zoo_info["arch"] == card.arch and model.fc.in_features == card.num_features
    assert model.transforms().crop_size == [card.preprocessing["crop"]]


def test_released_weights_load_once_and_then_without_network_or_mirror(
    hub, users, released, tmp_path, monkeypatch
):
    mirror = tmp_path / "mirror"
    shutil.copytree(released, mirror)
    monkeypatch.setenv("ZOO_MIRROR", str(mirror))
    code = script("""
import shutil
hub, second, mirror, users = sys.argv[1:]
torch.hub.set_dir(hub)
repository = "owner/name:main"
assert "400ep_bs256 (74.3)" in torch.hub.help(repository, "swav_resnet50")
published = torch.load(mirror + "/swav_800ep_pretrain.pth.tar", weights_only=True)
linear = torch.load(mirror + "/swav_800ep_eval_linear.pth.tar", weights_only=True)["state_dict"]
def load(**arguments):
    return torch.hub.load(repository, "swav_resnet50", progress=False, **arguments)
model = load()
for key, value in model.state_dict().items():
    assert torch.equal(value, published["module." + key]), key
features = run(model)
assert features.shape == (1, 2048) and torch.equal(features, run(load(weights="800ep")))
normalise = model.transforms()
assert normalise.std == [0.228, 0.224, 0.225] and normalise.crop_size == [224]
assert model.zoo_info["licence"] == "CC-BY-NC-4.0" and model.zoo_info["method"] == "swav"
logits = run(load(classifier="imagenet1k"))
assert torch.allclose(logits, features @ linear["module.linear.weight"].T + linear["module.linear.bias"], atol=1e-3)
assert load(num_classes=5).fc.out_features == 5
shutil.rmtree(mirror)
assert torch.equal(run(load()), features) and torch.equal(run(load(classifier="imagenet1k")), logits)
maps = run(load(features_only=True))
maps = list(maps.values() if isinstance(maps, dict) else maps)
assert [m.shape[1] for m in maps][-4:] == [256, 512, 1024, 2048]
torch.testing.assert_close(maps[-1].mean((2, 3)), features)
# Another checkout, and a program with a zoo of its own: the cache is all that they share.
sys.path.insert(0, users)
import zoo, utils
other = torch.hub.load(second, "swav_resnet50", source="local", progress=False)
assert torch.equal(run(other), features) and zoo.MINE == "zoo" and utils.MINE == "utils"
assert len([name for name in sys.modules if name.startswith("_zoo_hub_") and "." not in name]) == 2
print("fine")
""")
    second = checkout(tmp_path / "second" / "vision")
    assert in_fresh_process(code, hub, second, mirror, users, cwd=hub).stdout == "fine\n"


def test_a_file_of_ones_own_and_other_references(repository, released, monkeypatch):
    import torch

    monkeypatch.setenv("ZOO_OFFLINE", "1")
    published = torch.load(released / "swav_800ep_pretrain.pth.tar", weights_only=True)
    path = released / "swav_800ep_pretrain.pth.tar"
    monkeypatch.chdir(released)
    for weights in (str(path), path, path.name):
        model = entry_of(repository, "swav_resnet50", weights=weights)
        assert torch.equal(model.conv1.weight, published["module.conv1.weight"])
    with pytest.raises(Exception, match="contradict each other"):
        entry_of(repository, "swav_resnet50", pretrained=False, weights="400ep")
    bare = entry_of(repository, "swav_resnet50", pretrained=False)
    other = entry_of(repository, "swav_resnet50", weights="random:resnet50@2")
    assert not torch.equal(other.conv1.weight, bare.conv1.weight)
    assert entry_of(repository, "swav_resnet50", pretrained=False, num_classes=3).fc.out_features == 3


@pytest.mark.parametrize(
    ("entry", "weights", "words", "advice"),
    [
        (
            "swav_resnet50",
            "random:resnet18",
            "This is resnet18 with 512 features, not resnet50",
            "the entry `load`",
        ),
        ("swav_resnet50", "me/narrow", "resnet50 with 256 features, not resnet50 with 2048", "`load`"),
        ("swav_resnet50w2", "random:resnet50", "resnet50 with 2048 features, not resnet50w2", "`load`"),
        ("swav_resnet50", "80ep", "no such weights", "did you mean 800ep"),
        ("moco_v1_resnet50", "800ep", "no such weights", "Known: 200ep"),
    ],
)
def test_weights_that_are_no_use_are_refused(repository, entry, weights, words, advice):
    publish("me/narrow", what=describe(arch="resnet50", num_features=256))
    with pytest.raises(Exception, match=words) as caught:
        entry_of(repository, entry, weights=weights)
    assert type(caught.value).__name__ == "InputError" and advice in caught.value.fix


def test_a_small_amdim_is_not_the_released_one(repository, tmp_path):
    import torch

    from zoo.models.factory import create_trunk

    options = {"encoder_size": 32, "ndf": 8, "n_rkhs": 64, "n_depth": 1}
    trunk = create_trunk("amdim", options=options)
    state = {f"encoder.module.{key}": value for key, value in trunk.state_dict().items()}
    torch.save(
        {"model": state, "hyperparams": {**options, "use_bn": False}, "cursor": {}}, tmp_path / "small.pth"
    )
    with pytest.raises(Exception, match="amdim with 64 features, not amdim with 2048"):
        entry_of(repository, "amdim_medium", weights=tmp_path / "small.pth")
    model = entry_of(repository, "load", reference=str(tmp_path / "small.pth")).eval()
    with torch.no_grad():
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 64)


@pytest.mark.parametrize(
    ("entry", "ndf", "n_rkhs"), [("amdim_medium", 256, 2048), ("amdim_large", 320, 2560)]
)
def test_amdims_entries_take_a_local_file_and_give_three_maps(
    repository, shared, tmp_path, monkeypatch, entry, ndf, n_rkhs
):
    """The published keys at a sixteenth of the widths, and a catalog that says so."""
    import dataclasses
    import sys

    import torch

    from weights.formats.layouts import DIVISOR, published_state, save, wrapped
    from zoo.models.factory import create_trunk

    name = f"amdim_in128_ndf{ndf}_rkhs{n_rkhs}_rd10"
    state = published_state(shared, name, narrow=True)
    for key, value in state.items():
        if key.endswith("running_var"):
            value.abs_()
        elif value.ndim == 4 and value.is_floating_point():
            value.div_(value[0].numel() ** 0.5)
    file = save(tmp_path / "copy.pth", wrapped(name, state))
    with pytest.raises(Exception, match=f"amdim with {n_rkhs // DIVISOR} features, not amdim with {n_rkhs}"):
        entry_of(repository, entry, weights=file)
    (module,) = [
        module
        for module_name, module in sys.modules.items()
        if module_name.startswith("_zoo_hub_")
        and module_name.endswith(".zoo.weights.catalog")
        and module.__file__.startswith(repository)
    ]
    card = cards_of(entry)[0]
    narrow = {**card.options, "ndf": ndf // DIVISOR, "n_rkhs": n_rkhs // DIVISOR}
    small = dataclasses.replace(card, options=narrow, num_features=narrow["n_rkhs"])
    monkeypatch.setattr(module, "CATALOG", {**CATALOG, card.name: small})
    model = entry_of(repository, entry, weights=file).eval()
    trunk = create_trunk("amdim", options=narrow).eval()
    encoder = "encoder.module."
    trunk.load_state_dict({k.removeprefix(encoder): v for k, v in state.items() if k.startswith(encoder)})
    images = torch.randn(2, 3, 128, 128)
    with torch.no_grad():
        maps = model.maps(images)
        assert [tuple(found.shape[1:]) for found in maps] == [
            (narrow["n_rkhs"], side, side) for side in (1, 5, 7)
        ]
        assert all(torch.equal(found, wanted) for found, wanted in zip(maps, trunk.maps(images), strict=True))
        assert torch.equal(model(images), maps[0].flatten(1)) and model(images).isfinite().all()
    other = dataclasses.replace(small, options={**narrow, "n_depth": 9})
    monkeypatch.setattr(module, "CATALOG", {**CATALOG, card.name: other})
    with pytest.raises(Exception, match="This is amdim with n_depth 10, not 9") as caught:
        entry_of(repository, entry, weights=file)
    assert type(caught.value).__name__ == "InputError" and "`load`" in caught.value.fix
