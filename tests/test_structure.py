"""The house keeps its shape: imports run one way, files stay small, nothing heavy is loaded early."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("zoo", "transfer", "cli")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in FILES]

# Single modules of zoo/ that know nobody but one another.
GROUND = {"addresses", "heap", "errors", "files", "keyed", "products", "registry", "homes", "tensors"}
# Folder of zoo/ -> the folders it may import besides itself and the ground.
FLOORS = {
    "models": set(),
    "data": set(),
    "optim": set(),
    "engine": set(),
    "weights": {"models"},
    "probe": {"data", "models"},
    "pretrain": {"data", "engine", "models", "optim", "probe", "weights"},
}


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> list[tuple[str, bool]]:
    """(absolute dotted target, was it written relatively) of every import, also those inside functions."""
    package = path.relative_to(ROOT).parent.parts
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, False) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = [*base, *(node.module.split(".") if node.module else [])]
            # `from . import a, b` imports modules
            names = [alias.name for alias in node.names] if not node.module else [None]
            found += [(".".join([*module, name] if name else module), node.level > 0) for name in names]
    return found


def test_the_reader_of_imports_sees_what_it_should(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    file = tmp_path / "zoo" / "data" / "x.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "import os.path\nfrom ..errors import A\nfrom . import y\n"
        "def f():\n    from ...transfer.z import B\n    from zoo.models import C\n"
    )
    assert imports(file) == [
        ("os.path", False),
        ("zoo.errors", True),
        ("zoo.data.y", True),
        ("transfer.z", True),
        ("zoo.models", False),
    ]


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_imports_run_one_way(path):
    home, *rest = path.relative_to(ROOT).with_suffix("").parts
    below = {"cli": set(PACKAGES), "transfer": {"transfer", "zoo"}, "zoo": {"zoo"}}[home]
    for target, relative in imports(path):
        top, *inner = target.split(".")
        if top not in PACKAGES:
            continue
        assert top in below, f"{home} must not import {target}"
        if home != "zoo":
            continue
        assert relative, f"{target} must be imported relatively: a torch.hub checkout is called otherwise"
        if not inner:
            continue
        floor = rest[0]
        if floor in GROUND:
            assert inner[0] in GROUND, f"{floor} must not import {target}"
        elif floor in FLOORS:
            allowed = GROUND | FLOORS[floor] | {floor}
            assert inner[0] in allowed, f"zoo.{floor} must not import {target}"


def test_every_folder_has_its_floor():
    folders = {path.name for path in (ROOT / "zoo").iterdir() if (path / "__init__.py").exists()}
    assert folders == set(FLOORS)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_files_are_small_and_say_what_they_are(path):
    text = path.read_text("utf-8")
    assert text.count("\n") <= 450
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), "a module starts with what it is for"
    assert path.name == "__init__.py" or text.strip()


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_what_a_module_promises_is_there(path):
    tree = ast.parse(path.read_text("utf-8"))
    promised = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__"
    ]
    if not promised:
        return
    module = importlib.import_module(dotted(path))
    assert [name for name in promised[0] if not hasattr(module, name)] == []
    assert len(set(promised[0])) == len(promised[0])


def test_every_registered_method_is_where_it_is_said_to_be():
    from zoo.pretrain.methods import METHODS
    from zoo.pretrain.methods.base import Method
    from zoo.pretrain.methods.config_base import MethodConfig

    for name, entry in METHODS.items():
        assert issubclass(METHODS.config(name), MethodConfig)
        assert issubclass(METHODS.code(name), Method)
        assert METHODS.config(name).model_fields["name"].default == name
        assert entry.summary


def test_the_light_parts_load_no_torch():
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'torchvision', 'skimage', 'huggingface_hub', 'PIL'} & set(sys.modules)\n"
        "    assert not heavy, (name, heavy)\n"
    )
    configs = [dotted(path) for path in FILES if path.stem == "config" or path.stem.endswith("_config")]
    assert "zoo.pretrain.methods.swav_config" in configs
    commands = [f"cli.{path.stem}" for path in (ROOT / "cli").glob("*.py") if path.stem != "__init__"]
    light = ["zoo", "zoo.pretrain", "zoo.pretrain.resolve", "zoo.pretrain.rundir", *configs, *commands]
    subprocess.run([sys.executable, "-c", code, *light], check=True, timeout=60)


@pytest.mark.parametrize("package", PACKAGES)
def test_types_are_published(package):
    assert (ROOT / package / "py.typed").is_file()


def test_no_tests_folder_hides_a_package():
    """pytest puts this folder first on the path: a folder `cli` in it would hide the real one."""
    tests = Path(__file__).resolve().parent
    assert [name for name in PACKAGES if (tests / name).exists()] == []


def test_a_name_given_twice_is_refused():
    from zoo.registry import Entry, Registry

    with pytest.raises(ValueError, match="two methods are called 'swav'"):
        Registry("method", "zoo", Entry("swav", "a:b", "c:d", "one"), Entry("swav", "e:f", "g:h", "another"))
