"""Trunk, head and prototypes against the reference's network, alone and in a short training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.models.resnet import Bottleneck

from zoo.data.loader import Batch
from zoo.engine.checkpoint import CheckpointFolder
from zoo.engine.checkpoint_writer import CheckpointWriter
from zoo.engine.collectives import WorldOfOne
from zoo.engine.loop import Callback, Loop, StepRecord
from zoo.engine.precision import Precision
from zoo.engine.signals import StopRequest
from zoo.models.factory import create_trunk
from zoo.models.resnet import resnet, stage_features
from zoo.optim.lars import LARS
from zoo.optim.schedule import WarmupCosine
from zoo.pretrain.methods.config_base import RunShape
from zoo.pretrain.methods.swav import SwAV
from zoo.pretrain.methods.swav_config import SwAVConfig
from zoo.weights.formats import read_model

from .cases import Case, case_ids, fill_state, hash_signed, load

ANY_SHAPE = RunShape(views=2, batch_size=4, world_size=1, steps_per_epoch=1, epochs=1)


def tiny_swav(case: Case, shape: RunShape = ANY_SHAPE, **settings: Any) -> SwAV:
    """The reference's small network in float64, filled by the formula."""
    trunk = resnet(Bottleneck, [1, 1, 1, 1], base_planes=16, width_per_group=16)
    config = SwAVConfig(name="swav", prototypes=10, hidden=32, dim=16, **settings)
    method = SwAV(trunk, config, shape, WorldOfOne())
    fill_state(method, case)
    return method.double()


def crops(prefix: str, batch: int, sizes: list[int]) -> list[torch.Tensor]:
    """Formula crops, one tensor for each run of crops of one size."""
    groups: dict[int, list[torch.Tensor]] = {}
    for index, size in enumerate(sizes):
        crop = hash_signed(f"{prefix}{index}", (batch, 3, size, size), 2.0)
        groups.setdefault(size, []).append(crop.double())
    return [torch.cat(group) for group in groups.values()]


@pytest.mark.parametrize("name", case_ids("tiny_trainmode_multicrop"))
def test_a_training_pass_over_two_resolutions(shared: Path, name: str) -> None:
    case = load(shared, name)
    method = tiny_swav(case).train()
    embeddings, scores = method(crops("tiny/crop", case.args["batch"], case.args["crop_sizes"]))
    ((scores * case.inputs["grad_scores"]).sum() + (embeddings * case.inputs["grad_emb"]).sum()).backward()
    case.check("embedding", embeddings)
    case.check("scores", scores)
    state = {key.removeprefix("trunk."): value for key, value in method.state_dict().items()}
    grads = {key.removeprefix("trunk."): param.grad for key, param in method.named_parameters()}
    for output in case.outputs:
        kind, _, key = output.partition("/")
        if key:
            case.check(output, {"after": state, "grad": grads}[kind][key])


class FormulaRun:
    """The batches of the reference's short training, and what came of it."""

    def __init__(self, args: dict[str, Any]) -> None:
        self.batch = args["bs"]
        self.sizes = [
            size for size, n in zip(args["sizes"], args["nmb_crops"], strict=True) for _ in range(n)
        ]
        self.per_epoch = args["per_epoch"]
        self.total = args["per_epoch"] * args["epochs"]

    def batches(self, first: int) -> Iterator[Batch]:
        for step in range(first, self.total):
            views = crops(f"train/it{step}/crop", self.batch, self.sizes)
            ids = torch.arange(self.batch)
            yield Batch(views, ids, torch.full_like(ids, -1), step // self.per_epoch)


class Records(Callback):
    """Keeps the record of each step, and whether the prototypes had a momentum after it."""

    def __init__(self, prototypes: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
        self.prototypes = prototypes
        self.optimizer = optimizer
        self.steps: list[StepRecord] = []
        self.prototypes_move: list[bool] = []

    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record)
        self.prototypes_move.append(self.prototypes in self.optimizer.state)


@pytest.mark.parametrize("name", case_ids("tiny_swav_training"))
def test_the_loop_trains_as_the_reference(shared: Path, name: str, tmp_path: Path) -> None:
    case = load(shared, name)
    args = case.args
    run = FormulaRun(args)
    shape = RunShape(
        views=len(run.sizes),
        batch_size=run.batch,
        world_size=1,
        steps_per_epoch=run.per_epoch,
        epochs=args["epochs"],
    )
    method = tiny_swav(
        load(shared, "tiny_trainmode_multicrop"),  # the same network; that case states its filling
        shape,
        temperature=args["temperature"],
        epsilon=args["epsilon"],
        sinkhorn_iterations=args["sinkhorn_iterations"],
        crops_for_assign=tuple(args["crops_for_assign"]),
        freeze_prototypes_steps=args["freeze"],
        queue_length=args["queue"],
        queue_start_epoch=args["queue_from"],
    )
    optimizer = LARS(
        method.param_groups(exclude_one_dimensional=False),
        lr=args["base_lr"],
        momentum=args["momentum"],
        weight_decay=args["wd"],
        trust=args["trust_coefficient"],
    )
    schedule = WarmupCosine(
        base=args["base_lr"],
        final=args["final_lr"],
        start=args["start_warmup"],
        warmup_steps=args["warmup"] * run.per_epoch,
        total_steps=run.total,
    )
    records = Records(method.prototypes.weight, optimizer)
    loop = Loop(
        learner=method,
        optimizer=optimizer,
        lr_at=schedule.at,
        batches=run.batches,
        prepare=lambda batch: batch.views,
        precision=Precision("float64", torch.device("cpu")),
        steps_per_epoch=run.per_epoch,
        total_steps=run.total,
        checkpoints=CheckpointWriter(CheckpointFolder(tmp_path / "checkpoints"), WorldOfOne()),
        callbacks=[records],
    )
    loop.run(StopRequest())

    case.check("lr", [record.lr for record in records.steps])
    case.check("losses", [record.loss for record in records.steps])
    # Frozen means no momentum either, not a momentum of zeros.
    assert records.prototypes_move == [step >= args["freeze"] for step in range(run.total)]
    state = {key.removeprefix("trunk."): value for key, value in method.state_dict().items()}
    for output in case.outputs:
        if output.startswith("final/"):
            case.check(output, state[output.removeprefix("final/")])
    case.check("queue_final", method.queue)
    floating = [key for key, value in state.items() if value.is_floating_point()]
    assert floating == case.entry["summary_keys"]
    summary = torch.stack([torch.stack((state[key].sum(), state[key].norm())) for key in floating])
    case.check("summary_sum_l2", summary)


def full_swav(case: Case) -> SwAV:
    """A full-size network with the head that the case states, filled by the formula."""
    arch = "resnet" + case.id.split("_")[0].removeprefix("rn")
    config = SwAVConfig(
        name="swav",
        prototypes=case.args["nmb_prototypes"],
        hidden=case.args["hidden_mlp"],
        dim=case.args["output_dim"],
    )
    method = SwAV(create_trunk(arch), config, ANY_SHAPE, WorldOfOne())
    fill_state(method, case)
    assert sum(p.numel() for p in method.parameters()) == case.entry["parameters"]
    return method.eval()


def probe(maps: torch.Tensor) -> torch.Tensor:
    """The mean, the deviation and the first six values of sample 0."""
    return torch.cat((maps.mean()[None], maps.std()[None], maps[0].flatten()[:6]))


def crop_groups(case: Case) -> list[torch.Tensor]:
    given = [case.inputs[key] for key in sorted(case.inputs) if key.startswith("crop")]
    sizes = sorted({crop.shape[-1] for crop in given}, reverse=True)
    return [torch.cat([crop for crop in given if crop.shape[-1] == size]) for size in sizes]


# Several sets of prototypes at once and the bare trunks of the hub have tests of their own.
@pytest.mark.parametrize(
    "name", case_ids("rn50", without=["rn50_multiprototypes", "rn50_torchvision_hub", "rn50w2_hub"])
)
@torch.no_grad()
def test_full_size(shared: Path, tmp_path: Path, name: str) -> None:
    case = load(shared, name)
    method = full_swav(case)
    images = case.inputs["x"]
    maps = stage_features(method.trunk, images)
    for output in case.outputs:
        if output.startswith("probe/"):
            stage = output.removeprefix("probe/")
            case.check(output, probe(maps["stem" if stage == "maxpool" else stage]))
    if "feature_map_eval_mode" in case.outputs:
        case.check("feature_map_eval_mode", maps["layer4"])
    embedding, scores = method([images])
    case.check("pooled", method.embed(images))
    if name == "rn50w2_full":  # the hub's bare trunk, out of a file in the released layout
        file = tmp_path / "swav_RN50w2_400ep_pretrain.pth.tar"
        state = method.state_dict()
        torch.save({f"module.{key.removeprefix('trunk.')}": value for key, value in state.items()}, file)
        model = read_model(file)
        assert (model.format, model.network.arch) == ("swav", "resnet50w2")
        assert model.heads.keys() == {key for key in state if not key.startswith("trunk.")}
        method.trunk.load_state_dict(model.trunk)
        load(shared, "rn50w2_hub").check("pooled", method.trunk(images))
    case.check("embedding", embedding)
    case.check("scores", scores)
    views = crop_groups(case)
    if views:
        embedding, scores = method(views)
        case.check("multicrop_embedding", embedding)
        case.check("multicrop_scores_first100", scores[:, :100])

    method.double()
    finer = {"rtol": 1e-9, "atol": 1e-12}
    case.check("pooled_float64", method.embed(images.double()), **finer)
    case.check("embedding_float64", method([images.double()])[0], **finer)
    if views:
        case.check("multicrop_embedding_float64", method([v.double() for v in views])[0], **finer)


@pytest.mark.parametrize("name", case_ids("rn50_torchvision_hub"))
@torch.no_grad()
def test_bare_trunk_at_an_odd_size(shared: Path, name: str) -> None:
    case = load(shared, name)
    trunk = create_trunk("resnet50")
    fill_state(trunk, case)
    trunk.eval()
    case.check("pooled", trunk(case.inputs["x"]))
    odd = trunk(case.inputs["x_odd"])
    case.check("pooled_odd", odd)
    case.check("pooled_odd_swav_class", odd)
