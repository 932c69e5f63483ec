"""Whether there is a detectron2 that can be used, and how to get one. Nothing of it is imported before this was asked."""

from __future__ import annotations

import importlib
import importlib.util
import re
from types import ModuleType

from zoo.errors import InputError

__all__ = ["install_lines", "need_detectron2"]

OLDEST = "0.6"
_REPOSITORY = "git+https://github.com/facebookresearch/detectron2.git"
_PARTS = ("_C", "checkpoint", "config", "data", "engine", "modeling", "solver", "structures", "utils.comm")
"""What is imported of it. ``_C`` is what is compiled; ``model_zoo`` is left alone: it wants an old setuptools."""


def need_detectron2() -> None:
    """Import detectron2.

    Raises:
        InputError: it is not there, too old, or not whole.
    """
    if importlib.util.find_spec("detectron2") is None:
        raise InputError("detectron2 is not installed.", where="--engine detectron2", fix=install_lines())
    import torch  # noqa: F401 - its libraries are what the compiled part links to

    package = _imported("detectron2", "detectron2")
    version = getattr(package, "__version__", None)
    if version is None:
        raise InputError(
            "There is a folder called detectron2, and the package isn't in it.",
            where=", ".join(map(str, package.__path__)),
            fix="work in another folder; if it isn't installed either: " + install_lines(),
        )
    if _number(version) < _number(OLDEST):
        raise InputError(
            f"detectron2 {version} is too old: {OLDEST} is the oldest that works.",
            where=package.__file__,
            fix=install_lines(again=True),
        )
    for part in _PARTS:
        _imported(f"detectron2.{part}", f"detectron2 {version}")


def install_lines(again: bool = False) -> str:
    """How to install it for the torch that is here, on one line.

    Args:
        again: over one that is there.
    """
    import torch

    force = "--force-reinstall --no-deps --no-cache-dir " if again else ""
    cuda = torch.version.cuda
    needs, prefix = "a C++ compiler", ""
    if cuda:
        needs += f" and nvcc of CUDA {cuda}"
        prefix = "" if torch.cuda.is_available() else "FORCE_CUDA=1 "
    return (
        f"python -m pip install -U setuptools wheel && {prefix}python -m pip install {force}"
        f"--no-build-isolation '{_REPOSITORY}' (it is compiled for the torch that is here, {torch.__version__}, "
        f"and needs {needs})"
    )


def _imported(name: str, what: str) -> ModuleType:
    """Import a part, or say what is wrong with ``what``; of the package itself too: it looks for what it needs."""
    try:
        return importlib.import_module(name)
    except (ImportError, AssertionError) as error:
        # What it needs comes with an installation that leaves the package alone if it is the same.
        its_own = (getattr(error, "name", None) or "").partition(".")[0] == "detectron2"
        raise InputError(
            f"{what} is only half installed: {_first_line(error)}.",
            where=name,
            fix=install_lines(again=its_own),
        ) from None
    except AttributeError as error:  # Pillow 10 and numpy 1.24 took names away
        raise InputError(
            f"{what} is too old for what is installed beside it: {_first_line(error)}.",
            where=name,
            fix=install_lines(again=True),
        ) from None


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
