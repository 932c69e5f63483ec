"""detectron2's Python files, fetched from the package index once and kept beside pytest's cache: nothing is compiled.

The index has them as ``pb1-detectron2``, without the C++ sources. What 0.6 asks of older libraries is given to it:
an empty compiled part (a C4 or FPN detector calls nothing of it), and names that Pillow and numpy had then.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tiny import ROOT
from weights.published import bundle_at, describe

__all__ = ["narrow", "part", "python_part"]

WHAT = "pb1-detectron2==0.6"
KEPT = ROOT / ".pytest_cache" / WHAT.replace("==", "-")
_LOADED: dict[str, ModuleType] = {}
OLD_NAMES = """
import numpy as _numpy
import PIL.Image as _image

for _name, _old in {"int": int, "str": str, "float": float, "object": object}.items():
    if _name not in vars(_numpy):
        setattr(_numpy, _name, _old)
if not hasattr(_image, "LINEAR"):
    _image.LINEAR = _image.BILINEAR
"""


def python_part() -> Path:
    """The folder to put on the path. Without the index a test is skipped; on CI it fails."""
    KEPT.parent.mkdir(exist_ok=True)
    with open(KEPT.with_name(f"{KEPT.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one fetches
        if not KEPT.is_dir():
            with tempfile.TemporaryDirectory(dir=KEPT.parent) as folder:
                _fetch(Path(folder)).rename(KEPT)
    return KEPT


def _fetch(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    command += ["--no-build-isolation", "--dest", str(folder), WHAT]  # its metadata step imports torch
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        reason = f"{WHAT} can't be fetched: {done.stderr[-500:]}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder / "all", filter="data")
    package = next((folder / "all").glob("*/detectron2"))
    (package / "_C.py").write_text('"""What would be compiled; nothing of it is called."""\n')
    first = package / "__init__.py"
    first.write_text(OLD_NAMES + first.read_text("utf-8"), "utf-8")
    found = folder / "found"
    found.mkdir()
    package.rename(found / "detectron2")
    return found


@pytest.fixture(scope="module", autouse=True)
def part() -> Iterator[Path]:
    """detectron2 on the path, and gone afterwards; it can't be imported twice, so another module gets the same one."""
    folder = python_part()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        importlib.invalidate_caches()
        sys.modules.update(_LOADED)
        yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "detectron2"]:
        _LOADED[name] = sys.modules.pop(name)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A narrow ResNet-50 with statistics like a trained one's."""
    what = describe(arch="resnet50", num_features=256)
    return str(bundle_at(tmp_path_factory.mktemp("bundles") / "narrow", what).path)
