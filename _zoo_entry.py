"""The `zoo` command's first lines: make sure that the packages found are this toolkit's.

`cli`, `transfer` and `zoo` are short names that another distribution may use too. Whichever was
installed last would win silently; here that is an error in plain words.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from pathlib import Path


def main() -> None:
    """Run the command line."""
    # A sixth of a command's start: importing makes many objects and no garbage, and pydantic looks through
    # all that is installed for plugins.
    gc.set_threshold(100_000)
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    home = Path(__file__).resolve().parent
    for name in ("zoo", "transfer", "cli"):
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec and spec.origin else None
        if origin is None or origin.parent.parent != home:
            print(
                f"error: the package `{name}` of this toolkit is hidden by another one.\n"
                f"  where: {origin or 'nowhere'} (expected below {home})\n"
                "  fix:   install vision-model-zoo in a virtual environment of its own, "
                "and don't run it from a folder that holds such a package",
                file=sys.stderr,
            )
            raise SystemExit(1)
    from cli.main import run

    run()


if __name__ == "__main__":  # as `zoo pretrain --nproc` starts its processes
    main()
