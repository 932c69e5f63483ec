"""DeepCluster-v2 against the reference: clusters on one and two processes, an epoch of training, the network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distributed.world import in_processes
from zoo.data.loader import Batch
from zoo.engine.collectives import Collectives, WorldOfOne
from zoo.models.factory import create_trunk
from zoo.pretrain.methods.config_base import RunShape
from zoo.pretrain.methods.deepcluster_v2 import DeepClusterV2
from zoo.pretrain.methods.deepcluster_v2_config import DeepClusterV2Config

from .cases import Case, case_ids, fill_state, load


class PassedThrough(nn.Identity):
    """A trunk whose images are the embeddings already."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features


class GivenStart(DeepClusterV2):
    """DeepCluster-v2 without a head, a filled bank, and centroids that start from given rows."""

    def __init__(
        self, args: dict[str, Any], shape: RunShape, rows: list[torch.Tensor], world: Collectives
    ) -> None:
        config = DeepClusterV2Config(
            prototypes=args["nmb_prototypes"],
            dim=args["dim"],
            hidden=0,
            temperature=args.get("temperature", 0.1),
            crops_for_assign=args["crops_for_assign"],
            kmeans_iterations=args.get("kmeans_iters", 10),
        )
        super().__init__(PassedThrough(args["dim"]), config, shape, world)
        self.projection_head = nn.Identity()
        self.rows = rows

    def first_rows(self, epoch: int, head: int) -> torch.Tensor:
        return self.rows[head]

    def forward(self, views: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        embeddings, self.scores = super().forward(views)
        for scores in self.scores:
            scores.requires_grad_().retain_grad()
        return embeddings, self.scores

    def labels(self) -> torch.Tensor:
        """(heads, images) of the whole set."""
        return torch.stack(self.targets(self._table, self._known))


def no_pass() -> Iterator[Any]:
    pytest.fail("the bank is filled already")


@torch.no_grad()
def clustered(world: Collectives, given: dict[str, Any]) -> dict[str, Any]:
    """One start of an epoch; what every process knows afterwards."""
    bank, index = (given[key][world.rank] for key in ("banks", "indexes"))
    args = {**given["args"], "dim": bank.shape[2]}
    shape = RunShape(
        views=2,
        batch_size=len(index) * world.world_size,
        world_size=world.world_size,
        steps_per_epoch=1,
        epochs=1,
        samples=args["size_dataset"],
    )
    method = GivenStart(args, shape, given["rows"], world)
    method.bank, method.index = bank, index
    method.on_epoch_start(0, no_pass)
    return {"labels": method.labels(), "centroids": [head.weight.detach() for head in method.heads()]}


def cluster_case(case: Case) -> dict[str, Any]:
    ranks = [f"_rank{rank}" for rank in range(case.args["world_size"])] if "world_size" in case.args else [""]
    return {
        "banks": [case.inputs[f"bank{rank}"] for rank in ranks],
        "indexes": [case.inputs[f"index{rank}"] for rank in ranks],
        "rows": [case.inputs[f"init_rows{head}"] for head in range(len(case.args["nmb_prototypes"]))],
        "args": case.args,
    }


@pytest.mark.parametrize("name", case_ids("dcv2_cluster_"))
def test_clusters(shared: Path, name: str) -> None:
    case = load(shared, name)
    given = cluster_case(case)
    processes = len(given["banks"])
    results = in_processes(clustered, 2, given) if processes == 2 else [clustered(WorldOfOne(), given)]
    for result in results:
        case.check("assignments", result["labels"])
        for head, centroids in enumerate(result["centroids"]):
            case.check(f"centroids{head}", centroids)
    for a, b in zip(results[0]["centroids"], results[-1]["centroids"], strict=True):
        assert torch.equal(a, b)  # nothing brings them together again


@pytest.mark.parametrize("name", case_ids("dcv2_train_epoch"))
def test_an_epoch(shared: Path, name: str) -> None:
    case = load(shared, name)
    batch, steps = case.args["batch"], len(case.outputs["loss_per_iteration"])
    shape = RunShape(
        views=sum(case.args["nmb_crops"]),
        batch_size=batch,
        world_size=1,
        steps_per_epoch=steps,
        epochs=1,
        samples=case.args["size_dataset"],
    )
    given = cluster_case(case)
    args = {**case.args, "dim": case.inputs["bank"].shape[2]}
    method = GivenStart(args, shape, given["rows"], WorldOfOne())
    method.bank, method.index = case.inputs["bank"].clone(), case.inputs["index"].clone()
    with torch.no_grad():
        method.on_epoch_start(0, no_pass)
    losses = []
    for step in range(steps):
        views, ids = [case.inputs[f"it{step}_embeddings"]], case.inputs[f"it{step}_index"]
        method.before_step(step, 0)
        loss, _ = method.step(views, Batch(views, ids, torch.full_like(ids, -1), 0))
        loss.backward()
        losses.append(loss.item())
        for head, scores in enumerate(method.scores):
            case.check(f"it{step}_grad_output{head}", scores.grad)
        method.after_step(step)
    case.check("loss_per_iteration", losses)
    case.check("assignments", method.labels())
    for head, prototypes in enumerate(method.heads()):
        case.check(f"centroids{head}", prototypes.weight)
    case.check("bank_after", method.bank)
    case.check("index_after", method.index)


@pytest.mark.parametrize("name", case_ids("rn50_multiprototypes"))
@torch.no_grad()
def test_the_full_network(shared: Path, name: str) -> None:
    case = load(shared, name)
    config = DeepClusterV2Config(
        prototypes=case.args["nmb_prototypes"], hidden=case.args["hidden_mlp"], dim=case.args["output_dim"]
    )
    shape = RunShape(views=2, batch_size=64, world_size=1, steps_per_epoch=1, epochs=1)
    method = DeepClusterV2(create_trunk("resnet50"), config, shape, WorldOfOne())
    fill_state(method, case)
    embeddings, scores = method.eval()([case.inputs["x"]])
    case.check("embedding", embeddings)
    for head, of_head in enumerate(scores):
        case.check(f"scores{head}", of_head)
