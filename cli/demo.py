"""``zoo demo``: the whole way, in two minutes on two cores."""

from __future__ import annotations

from ._options import Json, Out, Quiet, Seed
from ._output import print_json, print_table, set_up_notes

__all__ = ["demo"]


def demo(
    seed: Seed = None,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Pretrain on built-in photographs, publish, load through torch.hub, judge (two minutes on two cores)."""
    set_up_notes(quiet)
    from transfer.demo import run_demo

    result = run_demo(seed=seed or 0, out=out, progress="quiet" if quiet or as_json else "auto")
    if as_json:
        print_json(result)
        return
    rows = [
        {"features": row["features"], **{name: f"{100 * row[name]:.1f} %" for name in ("knn", "linear")}}
        for row in result["rows"]
    ]
    print_table(
        f"Accuracy on builtin:photos: {result['classes']} photographs, {result['val_images']} patches "
        f"that share no pixel with the training patches (seed {result['seed']})",
        ["features", "knn", "linear"],
        rows,
    )
    print(f"pretraining took {result['pretrain_seconds']:.0f} s, all of it {result['seconds']:.0f} s")
    print(f"run: {result['run']}   published: {result['model']}")
