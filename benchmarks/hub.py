"""The Hugging Face hub: publishing against hashing and copying, and loading from a warm cache against the local hub.

The hub is the tests' own, in a process of its own on the loopback device, behind the hub's real client.

python benchmarks/hub.py [--arch resnet50] [--pairs 5]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from runner import Case, load_average, write_result

ROOT = Path(__file__).resolve().parent.parent
SLACK = 1.0  # seconds that publishing may take beyond hashing and copying
CARD_BYTES = 100_000  # sent at most when only the card changed
WARM = 0.9  # of the local hub's speed, at least


def serve() -> None:
    """A hub that is told by lines on standard input what to do, and answers on standard output."""
    sys.path.insert(0, str(ROOT / "tests"))
    from weights.hub_server import serving

    with serving() as hub:
        hub.hashes = False  # a hub's machines are not this one
        print(hub.endpoint, flush=True)
        for line in sys.stdin:
            if line.strip() == "reset":
                hub.reset()
            print(hub.received, flush=True)
            hub.received = 0


class Server:
    """The hub's process."""

    def __init__(self) -> None:
        command = [sys.executable, __file__, "--serve"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.endpoint = self.process.stdout.readline().strip()

    def ask(self, word: str) -> int:
        """Bytes that came since the last question; ``reset`` makes it forget everything."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self) -> None:
        """End it."""
        self.process.communicate()


@contextlib.contextmanager
def homes() -> Iterator[Path]:
    """Everything that is written goes into a folder that is removed; a hub listens."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for variable in ("ZOO_HOME", "ZOO_CACHE", "HF_HOME"):
            os.environ[variable] = str(home / variable)
        os.environ["HF_TOKEN"] = "hf_PlantedSecretThatMustNeverBeSeen"  # the one that the hub knows
        yield home


def bundle(arch: str) -> str:
    """A model in the local hub; returns its name."""
    from zoo.models.factory import create_trunk
    from zoo.weights.bundle import Description, write_bundle
    from zoo.weights.hubs.local import LocalHub

    trunk = create_trunk(arch)
    how = {"mean": [0.485, 0.456, 0.406], "std": [0.228, 0.224, 0.225], "resize": 256, "crop": 224}
    what = Description(
        arch=arch,
        stem="imagenet",
        base_planes=None,
        num_features=trunk.num_features,
        method="swav",
        preprocessing={**how, "interpolation": "bilinear"},
        recipe={"name": "bench"},
        data={"sources": ["nothing"], "count": 0},
        lineage={"step": 0, "total_steps": 0},
        versions={},
        licence="mit",
    )
    state = trunk.state_dict()
    LocalHub().publish("bench/model", lambda folder: write_bundle(folder, what, state, {}, "# bench\n"))
    return "bench/model"


def publishing(server: Server, name: str, home: Path, pairs: int) -> dict[str, Any]:
    """A first publish against hashing and copying what it sends; then one of the card alone."""
    from zoo.files import sha256_of
    from zoo.publishing import publish_to
    from zoo.weights.hubs.hf_download import fetch_model

    def ours() -> None:
        server.ask("reset")
        publish_to(name, f"hf:{name}", progress=False)

    ours()
    sent = home / "sent"
    shutil.copytree(fetch_model(name, progress=False).path, sent)
    from huggingface_hub import snapshot_download

    snapshot_download(name, local_dir=sent, endpoint=server.endpoint)  # transformers/ as well
    files = [path for path in sent.rglob("*") if path.is_file() and ".cache" not in path.parts]

    def peer() -> None:
        shutil.rmtree(home / "copy", ignore_errors=True)
        (home / "copy").mkdir()
        for index, file in enumerate(files):
            sha256_of(file)
            shutil.copyfile(file, home / "copy" / str(index))

    result = Case("publishing / hashing and copying what is sent", ours, peer, pairs=pairs).run()
    over = median(pair["ours"] - pair["peer"] for pair in result["pairs"])
    size = sum(file.stat().st_size for file in files)
    server.ask("")
    publish_to(name, f"hf:{name}", licence="apache-2.0", progress=False)
    card = server.ask("")
    print(
        f"{size / 1e6:.0f} MB: {result['seconds']['ours']:.2f} s, hashing and copying {result['seconds']['peer']:.2f}"
    )
    print(
        f"beyond that: {over:.2f} s (target: at most {SLACK}); card alone: {card:,} bytes (at most {CARD_BYTES:,})"
    )
    met = over <= SLACK and card <= CARD_BYTES
    return {**result, "bytes": size, "seconds_beyond": over, "card_bytes": card, "met": met}


def loading(name: str, pairs: int) -> list[dict[str, Any]]:
    """A warm cache, by the commit and by the branch (which asks the hub once), against the local hub."""
    import zoo
    from zoo.weights.hubs.hf_download import fetch_model

    commit = fetch_model(name, progress=False).path.name
    found = []
    for label, reference, target in (
        ("by commit", f"hf:{name}@{commit}", WARM),
        ("by branch, one question to the hub", f"hf:{name}", None),
    ):
        case = Case(
            f"loading, warm cache, {label} / local hub",
            lambda reference=reference: zoo.load(reference, progress=False),
            lambda: zoo.load(name, progress=False),
            target=target,
            pairs=2 * pairs,
        )
        found.append(case.run())
        seconds, ratio = found[-1]["seconds"], found[-1]["speedup"]
        print(
            f"{case.name}: {seconds['ours'] * 1e3:.0f} and {seconds['peer'] * 1e3:.0f} ms, {ratio['median']:.2f} "
            f"({ratio['min']:.2f} - {ratio['max']:.2f}) times as fast"
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", default="resnet50")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve()
        return 0
    load = load_average()
    with homes() as home:
        server = Server()
        os.environ["HF_ENDPOINT"] = server.endpoint
        try:
            name = bundle(given.arch)
            cases = [publishing(server, name, home, given.pairs), *loading(name, given.pairs)]
        finally:
            server.close()
    write_result("hub", {"load_before": load, "arch": given.arch, "cases": cases})
    return 0 if all(case["met"] is not False for case in cases) else 1


if __name__ == "__main__":
    sys.exit(main())
