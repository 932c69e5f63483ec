"""How fast are ``zoo --help`` and ``zoo list``? Against ``import torch``, which they must not pay for.

python benchmarks/startup.py
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from statistics import median

from runner import Case, measure, run_command

TARGET = 4.0  # at most a quarter of the time
LIST_TARGET = 0.3  # seconds of zoo list


def _zoo() -> str:
    beside = Path(sys.executable).with_name("zoo")
    found = str(beside) if beside.exists() else shutil.which("zoo")
    if found is None:
        raise SystemExit("the command `zoo` is not installed")
    return found


def _heavy_imports(words: list[str]) -> list[str]:
    """Modules of torch and its company that a command imports; there should be none."""
    code = "from _zoo_entry import main; main()"
    log = run_command([sys.executable, "-X", "importtime", "-c", code, *words]).stderr
    names = [line.rsplit("|", 1)[1].strip() for line in log.splitlines() if line.startswith("import time:")]
    if not any(name.startswith("cli") for name in names):
        raise SystemExit("the import log is empty: the check would prove nothing")
    return sorted(
        name for name in names if name.split(".")[0] in ("torch", "torchvision", "numpy", "skimage")
    )


def _seconds(command: list[str], times: int = 11) -> float:
    found = []
    for _ in range(times):
        began = time.perf_counter()
        run_command(command)
        found.append(time.perf_counter() - began)
    return median(found)


def main() -> int:
    heavy = {" ".join(words): _heavy_imports(words) for words in (["--help"], ["list"])}
    for words, names in heavy.items():
        print(f"heavy modules imported by zoo {words}: {', '.join(names) or 'none'}")
    zoo = _zoo()
    seconds = _seconds([zoo, "list"])
    fast = seconds <= LIST_TARGET
    print(f"zoo list: {seconds:.3f} s, target {LIST_TARGET}: {'met' if fast else 'MISSED'}")
    case = Case(
        "zoo --help / python -c 'import torch'",
        ours=lambda: run_command([zoo, "--help"]),
        peer=lambda: run_command([sys.executable, "-c", "import torch"]),
        target=TARGET,
        pairs=7,
    )
    more = {"heavy_imports": heavy, "list_seconds": seconds, "list_target": LIST_TARGET}
    met = measure("startup", [case], more)
    return 0 if met and fast and not any(heavy.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
