"""A detectron2 that is absent, too old, half installed or hidden: said, with how to install it."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from transfer.detect.detectron2_engine.presence import install_lines
from weights.published import assert_clear, in_fresh_process

COMMAND = ("transfer", "detect", "--engine", "detectron2", "--model", "random:resnet18")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Put a package of these files on the path; it is gone afterwards."""

    def install(**files):
        package = tmp_path / "site" / "detectron2"
        package.mkdir(parents=True)
        for name, text in files.items():
            (package / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(package.parent))
        importlib.invalidate_caches()

    yield install
    for name in [name for name in sys.modules if name.partition(".")[0] == "detectron2"]:
        del sys.modules[name]


def test_an_absent_one_is_installed_by_these_lines(command, tmp_path):
    assert importlib.util.find_spec("detectron2") is None
    answer = command(*COMMAND, "--out", tmp_path / "out")
    assert_clear(answer, "not installed", "--no-build-isolation", "github.com/facebookresearch/detectron2")
    assert torch.__version__ in answer[2] and "setuptools" in answer[2]
    assert not (tmp_path / "out").exists()


def test_the_lines_are_for_the_torch_at_hand(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "nvcc of CUDA 13.0" in install_lines() and "FORCE_CUDA=1 python -m pip" in install_lines()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "FORCE_CUDA" not in install_lines()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "nvcc" not in install_lines() and "C++ compiler" in install_lines(again=True)


def test_too_old(installed, command):
    installed(__init__='__version__ = "0.5"')
    assert_clear(command(*COMMAND), "detectron2 0.5 is too old", "0.6", "--force-reinstall")


def test_not_compiled(installed, command):
    installed(__init__='__version__ = "0.6"')
    assert_clear(command(*COMMAND), "half installed", "detectron2._C", "--force-reinstall")


def test_a_library_is_missing(installed, command):
    installed(__init__='__version__ = "0.6"', _C="", checkpoint="import fvcore_of_another_name")
    assert_clear(command(*COMMAND), "half installed", "fvcore_of_another_name", "detectron2.checkpoint")


def test_the_package_itself_asks_for_a_library_that_is_missing(installed, command):
    """As detectron2 does for fvcore: it would not come with what is installed without dependencies."""
    installed(__init__='import fvcore_of_another_name\n__version__ = "0.6"')
    answer = command(*COMMAND)
    assert_clear(
        answer, "detectron2 is only half installed", "fvcore_of_another_name", "--no-build-isolation"
    )
    assert "--no-deps" not in answer[2]


def test_a_library_beside_it_is_too_old(installed, command):
    installed(__init__='assert False, "Requires fvcore>=0.1.2"')
    assert_clear(command(*COMMAND), "only half installed: Requires fvcore>=0.1.2")


def test_too_old_for_what_is_beside_it(installed, command):
    text = "from PIL import Image\nImage.A_NAME_OF_LONG_AGO"
    installed(__init__='__version__ = "0.6"', _C="", checkpoint="", config="", data=text)
    assert_clear(command(*COMMAND), "too old for what is installed beside it", "A_NAME_OF_LONG_AGO")


def test_a_folder_of_that_name(installed, command, tmp_path):
    installed()
    assert_clear(command(*COMMAND), "a folder called detectron2", tmp_path / "site" / "detectron2")


def test_other_commands_dont_ask_for_it(command):
    code = """
        import sys
        from cli.main import run
        for words in (["transfer", "detect", "--help"], ["transfer", "linear", "--help"]):
            try:
                run(words)
            except SystemExit as end:
                assert not end.code, end.code
        import transfer.detect.run
        assert not [name for name in sys.modules if "detectron2" in name.partition(".")[0]], "imported"
        assert "transfer.detect.detectron2_engine" not in sys.modules
    """
    in_fresh_process(code)


def test_what_only_the_other_engine_has(command):
    assert_clear(
        command("transfer", "detect", "--model", "random:resnet18", "--yaml", "mine.yaml"),
        "mine.yaml",
        "--engine",
    )
