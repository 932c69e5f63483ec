"""How fast is ``zoo --help``? Against ``import torch``, which it must not pay for.

python benchmarks/startup.py
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from runner import Case, measure, run_command

TARGET = 4.0  # at most a quarter of the time


def _zoo() -> str:
    beside = Path(sys.executable).with_name("zoo")
    found = str(beside) if beside.exists() else shutil.which("zoo")
    if found is None:
        raise SystemExit("the command `zoo` is not installed")
    return found


def _heavy_imports() -> list[str]:
    """Modules of torch and its company that ``zoo --help`` imports; there should be none."""
    code = "from _zoo_entry import main; main()"
    log = run_command([sys.executable, "-X", "importtime", "-c", code, "--help"]).stderr
    names = [line.rsplit("|", 1)[1].strip() for line in log.splitlines() if line.startswith("import time:")]
    if not any(name.startswith("cli") for name in names):
        raise SystemExit("the import log is empty: the check would prove nothing")
    return sorted(
        name for name in names if name.split(".")[0] in ("torch", "torchvision", "numpy", "skimage")
    )


def main() -> int:
    heavy = _heavy_imports()
    print(f"heavy modules imported by zoo --help: {', '.join(heavy) or 'none'}")
    zoo = _zoo()
    case = Case(
        "zoo --help / python -c 'import torch'",
        ours=lambda: run_command([zoo, "--help"]),
        peer=lambda: run_command([sys.executable, "-c", "import torch"]),
        target=TARGET,
        pairs=7,
    )
    met = measure("startup", [case], {"heavy_imports": heavy})
    torch_free = not any(name.split(".")[0].startswith("torch") for name in heavy)
    return 0 if met and torch_free else 1


if __name__ == "__main__":
    sys.exit(main())
