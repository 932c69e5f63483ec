"""One of the processes of a detection training; ``transfer.detect.run`` starts them. Not a command for people."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from zoo.engine.launch import first_to_say
from zoo.engine.world import process_world
from zoo.errors import ZooError
from zoo.files import read_json, write_json

from .config import DetectConfig
from .run import Work, work

__all__ = ["main"]


def main(request: str) -> int:
    """Do the work that a file asks for; the first process leaves the answer beside it."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    asked = read_json(Path(request))
    try:
        what, config = Work(**asked["work"]), DetectConfig.model_validate(asked["settings"])
        with process_world(what.device) as place:
            found = work(what, config, place, asked["sizes"])
    except ZooError as error:
        if first_to_say(f"{error.what} {error.where}"):
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if os.environ.get("RANK") == "0":
        write_json(Path(request).with_name("answer.json"), found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
