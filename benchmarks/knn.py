"""Exact nearest neighbours of 10,000 queries among 50,000 rows of 2,048 features, against faiss-cpu's flat index.

    python benchmarks/knn.py [--pairs 3] [--bank 50000] [--queries 10000]

Both get unnormalised float32 features and give the 20 nearest by cosine; normalising counts. The memory beyond the
features is the peak of a process that does nothing else. faiss-cpu is for this comparison alone: the toolkit doesn't
use it, and without it only memory and our time are measured (``pip install faiss-cpu``).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

if os.environ.get("OMP_WAIT_POLICY") != "PASSIVE":  # read when torch is first imported
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.execv(sys.executable, [sys.executable, *sys.argv])

import torch
from runner import Case, measure, run_command, write_result

from zoo.probe.knn import nearest

TARGET, MEMORY = 1.0, 1.0  # times as fast; GB
WIDTH, K = 2048, 20


def _features(count: int, seed: int) -> torch.Tensor:
    """Like a network's: not negative, a few directions stronger than the rest."""
    generator = torch.Generator().manual_seed(seed)
    strength = torch.linspace(1.5, 0.2, WIDTH)
    return torch.randn(count, WIDTH, generator=generator).mul_(strength).abs_()


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux counts in KiB


def _memory(bank: int, queries: int) -> None:
    known, asked = _features(bank, 0), _features(queries, 1)
    nearest(asked[:64], known[:64], K)  # whatever the libraries set up once
    before = _peak()
    nearest(asked, known, K)
    print(json.dumps({"beyond_features_gb": _peak() - before}))


def _flat(known: torch.Tensor, asked: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    try:
        import faiss
    except ImportError:
        return None
    faiss.omp_set_num_threads(torch.get_num_threads())

    def search() -> torch.Tensor:
        bank, queries = known.numpy().copy(), asked.numpy().copy()  # normalised in place
        faiss.normalize_L2(bank)
        faiss.normalize_L2(queries)
        index = faiss.IndexFlatIP(WIDTH)
        index.add(bank)
        return torch.from_numpy(index.search(queries, K)[1])

    return search


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--bank", type=int, default=50_000)
    parser.add_argument("--queries", type=int, default=10_000)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        _memory(options.bank, options.queries)
        return 0
    sizes = ["--bank", str(options.bank), "--queries", str(options.queries)]
    done = run_command([sys.executable, str(Path(__file__)), "--memory", *sizes])
    memory = json.loads(done.stdout.splitlines()[-1])["beyond_features_gb"]
    small = memory < MEMORY
    print(f"memory beyond the features: {memory:.2f} GB (at most {MEMORY:g}): {'met' if small else 'MISSED'}")
    known, asked = _features(options.bank, 0), _features(options.queries, 1)
    more = {
        "bank": options.bank,
        "queries": options.queries,
        "width": WIDTH,
        "k": K,
        "threads": torch.get_num_threads(),
        "memory": {"beyond_features_gb": memory, "target": MEMORY, "met": small},
    }
    flat = _flat(known, asked)
    if flat is None:
        began = time.perf_counter()
        nearest(asked, known, K)
        seconds = time.perf_counter() - began
        print(f"faiss-cpu isn't installed: nothing to compare with. Ours alone: {seconds:.1f} s")
        write_result("knn", {**more, "seconds": seconds, "peer": "faiss-cpu is absent"})
        return 0 if small else 1
    same = float((nearest(asked, known, K)[1] == flat()).double().mean())
    print(f"the same neighbours in the same places: {100 * same:.2f} % (the rest are ties to rounding)")
    if same < 0.99:
        return 1
    case = Case(
        f"{options.queries} x {options.bank} x {WIDTH}, k {K} / faiss flat",
        lambda: nearest(asked, known, K),
        flat,
        TARGET,
        options.pairs,
        0,
    )
    good = measure("knn", [case], {**more, "same_neighbours": same})
    return 0 if good and small else 1


if __name__ == "__main__":
    sys.exit(main())
