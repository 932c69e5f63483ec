"""Small streams of batches for the tests of the loader."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zoo.data.loader import Batch, EpochOrder, view_batches
from zoo.data.source import ImageSource
from zoo.data.views.maker import PlannedViews, ViewMaker
from zoo.data.views.params import CropSpec, ViewPlan

PLAN = ViewPlan((CropSpec(16, 0.3, 1.0), CropSpec(16, 0.3, 1.0), CropSpec(8, 0.1, 0.3)))
SEED = 5
ENDLESS = 10**9


def stream(
    source: ImageSource,
    *,
    workers: int,
    maker: ViewMaker | None = None,
    batch_size: int = 4,
    first: int = 0,
    last: int = ENDLESS,
    **options: bool,
) -> Iterator[Batch]:
    order = EpochOrder(len(source), batch_size, SEED)
    maker = maker or PlannedViews(PLAN)
    return view_batches(source, maker, order, first_step=first, last_step=last, workers=workers, **options)


def bits(batch: Batch) -> list[bytes]:
    """Everything a batch holds."""
    parts = [*batch.views, batch.ids, batch.labels, torch.tensor(batch.epoch)]
    arrays = [part.numpy() for part in parts]
    for table in batch.colors or []:
        arrays += [table.order, table.factors, table.gray, table.blur]
    return [array.tobytes() for array in arrays] + [repr(batch.bad).encode()]
