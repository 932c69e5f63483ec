"""The code of a network of the user's own, as a hash: what makes its features beside its weights. No torch here."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

__all__ = ["code_sha256"]

_PACKAGES = {"site-packages", "dist-packages"}
_INSTALLED = (
    Path(__file__).resolve().parent.parent,
    *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


def code_sha256(modules: Iterable[str]) -> str:
    """SHA-256 of the files of modules and of all that they use of the user's; of installed packages the versions.

    Files are read as they are now: what was changed since it was imported is taken for what runs. What code reads
    beside its modules (files, variables) is not seen.

    Args:
        modules: names of imported modules: of the function that makes the network, and of its layers' classes.
    """
    names = list(modules)
    own = {name.partition(".")[0] for name in names[:1]}  # the user's even where it is installed
    seen: dict[str, str] = {}
    packages: set[str] = set()
    while names:
        name = names.pop()
        module, top = sys.modules.get(name), name.partition(".")[0]
        if module is None or name in seen or top in sys.stdlib_module_names:
            continue
        if top not in own and _is_installed(module):
            packages.add(top)
            continue
        seen[name] = _digest(module)
        names += _used(module)
    versions = [f"{top} {_version(top)}" for top in sorted(packages)]
    lines = [*(f"{name} {seen[name]}" for name in sorted(seen)), *versions]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _is_installed(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if file is None:
        return False
    path = Path(file).resolve()
    return bool(_PACKAGES & set(path.parts)) or any(path.is_relative_to(folder) for folder in _INSTALLED)


def _digest(module: ModuleType) -> str:
    if hasattr(module, "__path__") and getattr(module, "__file__", None) is None:
        return "a folder"  # without code of its own
    try:
        return hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()
    except (OSError, AttributeError):  # typed in by hand: nobody can say later whether it is the same
        return os.urandom(16).hex()


def _used(module: ModuleType) -> Iterator[str]:
    """Modules that a module has names of, or of whose classes and functions."""
    for value in list(vars(module).values()):
        if isinstance(value, ModuleType):
            yield value.__name__
        elif callable(value):
            name = getattr(value, "__module__", None)
            yield name if isinstance(name, str) else type(value).__module__
        else:
            yield type(value).__module__


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # published under another name
        return str(getattr(sys.modules.get(package), "__version__", ""))
