"""MoCo against the reference: loss, momentum, queue, shuffled BatchNorm, and a short training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from distributed.world import in_processes
from zoo.data.loader import Batch
from zoo.engine.checkpoint import CheckpointFolder
from zoo.engine.checkpoint_writer import CheckpointWriter
from zoo.engine.collectives import Collectives, WorldOfOne
from zoo.engine.loop import Callback, Loop, StepRecord
from zoo.engine.precision import Precision
from zoo.engine.signals import StopRequest
from zoo.models.factory import create_trunk
from zoo.optim.schedule import WarmupCosine, WarmupSteps
from zoo.pretrain.losses import info_nce
from zoo.pretrain.methods.config_base import RunShape
from zoo.pretrain.methods.moco import MoCo
from zoo.pretrain.methods.moco_config import MoCoConfig

from .cases import Case, case_ids, fill_rule, load


class Given(nn.Identity):
    """A trunk whose images are the features already."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features


class TinyEncoder(nn.Module):
    """The cases' encoder up to its ``fc``, which is the projection head."""

    num_features = 6

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.bn1(self.conv1(x))).mean(dim=(2, 3))


class OrderedMoCo(MoCo):
    """Shuffles in a given order."""

    order: torch.Tensor

    def shuffled(self, count: int, part: int, view: int) -> torch.Tensor:
        assert count == len(self.order)
        return self.order


def shape_of(batch: int, world_size: int = 1, views: int = 2) -> RunShape:
    return RunShape(views=views, batch_size=batch, world_size=world_size, steps_per_epoch=4, epochs=1)


def ours(name: str) -> str:
    """The name in the method of one of the reference's encoder."""
    return name.replace("fc.", "projection_head.") if name.startswith("fc.") else f"trunk.{name}"


def fill(method: MoCo, encoder: dict[str, torch.Tensor], queue: torch.Tensor) -> None:
    """Give both encoders the same values; every tensor must be named."""
    state = {ours(name): value for name, value in encoder.items()}
    state |= {f"momentum_encoder.{key.removeprefix('trunk.')}": value for key, value in state.items()}
    method.load_state_dict({**state, "queue": queue, "queue_ptr": torch.zeros(1, dtype=torch.int64)})


def below(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


@pytest.mark.parametrize("name", case_ids("moco_infonce"))
def test_logits_loss_and_gradients(shared: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = load(shared, name)
    seen: list[torch.Tensor] = []
    real = info_nce.contrastive_logits

    def watched(*args: Any) -> torch.Tensor:
        seen.append(real(*args))
        seen[-1].retain_grad()
        return seen[-1]

    monkeypatch.setattr(info_nce, "contrastive_logits", watched)
    args = case.args
    config = MoCoConfig(negatives=args["K"], dim=args["dim"], temperature=args["T"])
    method = MoCo(Given(args["dim"]), config, shape_of(args["batch"]), WorldOfOne())
    method.projection_head = method.momentum_encoder.projection_head = nn.Identity()
    method.to(case.inputs["queue"].dtype)
    method.queue.copy_(case.inputs["queue"])

    query = case.inputs["feat_q"].clone().requires_grad_()
    views = [query, case.inputs["feat_k"]]
    ids = torch.arange(args["batch"])
    loss, _ = method.step([torch.cat(views)], Batch(views, ids, ids, 0))
    loss.backward()
    case.check("q", method.queries(views)[0])
    case.check("k", method.keys(views, 0)[0])
    (logits,) = seen
    case.check("logits", logits)
    assert not case.outputs["labels"].any()  # the own key comes first
    case.check("loss", loss)
    case.check("grad_logits", logits.grad)
    case.check("grad_feat_q", query.grad)
    case.compare("the queue before the update", method.queue, case.inputs["queue"], exact=True)
    method.after_step(0)
    case.check("queue_after", method.queue)
    case.check("queue_ptr_after", method.queue_ptr)


@pytest.mark.parametrize("name", case_ids("moco_momentum"))
def test_only_parameters_follow(shared: Path, name: str) -> None:
    case = load(shared, name)
    method = MoCo(
        TinyEncoder(), MoCoConfig(negatives=8, dim=5, momentum=case.args["m"]), shape_of(4), WorldOfOne()
    )
    encoder = below(case.inputs, "q/")
    method.load_state_dict({ours(key): value for key, value in encoder.items()}, strict=False)
    following = {ours(key).removeprefix("trunk."): value for key, value in below(case.inputs, "k0/").items()}
    method.momentum_encoder.load_state_dict(following)
    for step in (1, 2, 3):
        method.before_step(step, 0)
        state = method.momentum_encoder.state_dict()
        for key, want in below(case.outputs, f"k{step}/").items():
            case.compare(f"k{step}/{key}", state[ours(key).removeprefix("trunk.")], want)
    for key, value in encoder.items():
        assert torch.equal(method.state_dict()[ours(key)], value), key


@pytest.mark.parametrize("name", case_ids("moco_enqueue"))
def test_the_queue(shared: Path, name: str) -> None:
    case = load(shared, name)
    dim, length = case.inputs["queue"].shape
    method = MoCo(
        Given(dim), MoCoConfig(negatives=length, dim=dim), shape_of(case.args["batch"]), WorldOfOne()
    ).double()
    method.queue.copy_(case.inputs["queue"])
    pointers = []
    for step in range(len(case.outputs["ptr_after"])):
        method.enqueue(case.inputs[f"keys{step}"])
        case.check(f"queue{step}", method.queue)
        pointers.append(method.queue_ptr.clone())
    case.check("ptr_after", torch.cat(pointers))


def shuffled_step(world: Collectives, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """One forward pass of this process's share of the images, whose views are (2, all images, ...)."""
    images = given["images"].chunk(world.world_size, dim=1)[world.rank]
    size = images.shape[1]
    config = MoCoConfig(
        negatives=given["queue"].shape[1],
        dim=given["queue"].shape[0],
        temperature=given["T"],
        momentum=given["m"],
        shuffle_groups=2,
    )
    shape = shape_of(size * world.world_size, world.world_size)
    method = OrderedMoCo(TinyEncoder(), config, shape, world).train()
    method.order = given["order"]
    fill(method, given["encoder"], given["queue"])
    method.before_step(0, 0)
    ids = torch.arange(size)
    loss, _ = method.step([images.flatten(0, 1)], Batch([images], ids, ids, 0))
    key_norm, query_norm = method.momentum_encoder.bn1, method.trunk.bn1
    statistics = [tensor.clone() for norm in (key_norm, query_norm) for tensor in norm.buffers()]
    queries, keys = method.queries(list(images)), method.keys(list(images), 0)[0]
    own = keys.chunk(world.world_size)[world.rank]
    method.after_step(0)
    return {
        "loss": loss.detach(),
        "k": own,
        "logits": info_nce.contrastive_logits(queries[0], own, given["queue"], given["T"]).detach(),
        "queue": method.queue,
        "pointer": method.queue_ptr,
        "bn_k_mean": statistics[0],
        "bn_k_var": statistics[1],
        "bn_q_mean": statistics[3],
        "bn_q_var": statistics[4],
    }


def shuffle_case(case: Case) -> dict[str, Any]:
    views = [torch.cat([case.inputs[f"im_{side}_rank{rank}"] for rank in (0, 1)]) for side in "qk"]
    return {
        "images": torch.stack(views),
        "order": case.inputs["idx_shuffle"],
        "queue": case.inputs["queue"],
        "encoder": below(case.inputs, "encoder/"),
        "T": case.args["T"],
        "m": case.args["m"],
    }


@pytest.mark.parametrize("name", case_ids("moco_mp2_shufflebn"))
def test_shuffled_batchnorm_of_two_processes(shared: Path, name: str) -> None:
    case = load(shared, name)
    results = in_processes(shuffled_step, 2, shuffle_case(case))
    assert torch.equal(case.inputs["idx_shuffle"].argsort(), case.outputs["idx_unshuffle"])
    for rank, result in enumerate(results):
        for output in ("k", "logits", "loss", "bn_k_mean", "bn_k_var", "bn_q_mean", "bn_q_var"):
            case.check(f"{output}_rank{rank}", result[output])
        case.check("queue_after", result["queue"])
        case.check("queue_ptr_after", result["pointer"])


@pytest.mark.parametrize("name", case_ids("moco_mp2_shufflebn"))
def test_two_groups_of_one_process_are_two_processes(shared: Path, name: str) -> None:
    case = load(shared, name)
    result = shuffled_step(WorldOfOne(), shuffle_case(case))
    for output in ("k", "logits"):
        both = torch.cat([case.outputs[f"{output}_rank{rank}"] for rank in (0, 1)])
        case.compare(output, result[output], both)
    case.compare("loss", result["loss"], torch.stack([case.outputs[f"loss_rank{r}"] for r in (0, 1)]).mean())
    case.check("queue_after", result["queue"])
    case.check("queue_ptr_after", result["pointer"])


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step(self, record: StepRecord) -> None:
        self.losses.append(record.loss)


@pytest.mark.parametrize("name", case_ids("moco_tiny_training"))
def test_the_loop_trains_as_the_reference(shared: Path, name: str, tmp_path: Path) -> None:
    case = load(shared, name)
    args = case.args
    config = MoCoConfig(
        negatives=args["K"], dim=args["dim"], hidden=6, temperature=args["T"], momentum=args["m"]
    )
    method = MoCo(TinyEncoder(), config, shape_of(args["batch"]), WorldOfOne()).double()
    fill(method, below(case.inputs, "encoder/"), case.inputs["queue"])
    optimizer = torch.optim.SGD(
        method.param_groups(exclude_one_dimensional=False),
        lr=args["lr"],
        momentum=args["momentum"],
        weight_decay=args["weight_decay"],
    )

    def batches(first: int) -> Iterator[Batch]:
        ids = torch.arange(args["batch"])
        for step in range(first, 4):
            views = torch.cat((case.inputs[f"im_q{step}"], case.inputs[f"im_k{step}"]))
            yield Batch([views], ids, ids, 0)

    losses = Losses()
    loop = Loop(
        learner=method,
        optimizer=optimizer,
        lr_at=lambda step: args["lr"],
        batches=batches,
        prepare=lambda batch: batch.views,
        precision=Precision("float64", torch.device("cpu")),
        steps_per_epoch=4,
        total_steps=4,
        checkpoints=CheckpointWriter(CheckpointFolder(tmp_path / "checkpoints"), WorldOfOne()),
        callbacks=[losses],
    )
    loop.run(StopRequest())
    case.check("queue_ptr", method.queue_ptr)
    case.check("losses", losses.losses)
    case.check("queue", method.queue)
    state = method.state_dict()
    for output in case.outputs:
        side, _, key = output.partition("/")
        if key:
            prefix = {"q": "", "k": "momentum_encoder."}[side]
            name = ours(key) if side == "q" else ours(key).removeprefix("trunk.")
            case.check(output, state[prefix + name])


@pytest.mark.parametrize("name", case_ids("moco_rn50"))
@torch.no_grad()
def test_the_full_encoder(shared: Path, name: str) -> None:
    case = load(shared, name)
    config = MoCoConfig(negatives=8, hidden=2048 if case.args["mlp"] else 0)
    method = MoCo(create_trunk("resnet50"), config, shape_of(2), WorldOfOne()).eval()
    for key, tensor in method.state_dict().items():
        if key.startswith(("trunk.", "projection_head.")):
            reference = key.replace("projection_head.", "fc.").removeprefix("trunk.")
            tensor.copy_(fill_rule(reference, tensor.shape, case.args["gain"]))
            digest = case.entry["weight_digest"].get(reference)
            if digest is not None:
                assert float(tensor.double().sum()) == pytest.approx(digest["sum_float64"], rel=1e-9)
    images = load(shared, "moco_rn50_v1_encoder").inputs["x"]
    pooled = method.embed(images)
    case.check("pooled", pooled)
    case.check("out", method.projection_head(pooled))
    case.check("q", method.queries([images, images])[0])
    method.on_trunk_replaced()
    case.check("q", method.keys([images, images], 0)[0])


@pytest.mark.parametrize("name", case_ids("lr_moco"))
def test_learning_rates(shared: Path, name: str) -> None:
    case = load(shared, name)
    args = case.args
    schedule: Any
    if args["cos"]:
        schedule = WarmupCosine(args["lr"], 0.0, 0.0, 0, args["epochs"])
    else:
        schedule = WarmupSteps(args["lr"], 0.0, 0, tuple(args["schedule"]), 0.1)
    case.check("lr", [schedule.at(epoch) for epoch in range(args["epochs"])])


def test_version_one_is_a_linear_head_and_version_two_an_mlp() -> None:
    names = [
        list(
            MoCo(
                Given(4), MoCoConfig(negatives=8, dim=3, hidden=hidden), shape_of(4), WorldOfOne()
            ).state_dict()
        )
        for hidden in (0, 4)
    ]
    assert names[0] == [
        "queue",
        "queue_ptr",
        "projection_head.weight",
        "projection_head.bias",
        "momentum_encoder.projection_head.weight",
        "momentum_encoder.projection_head.bias",
    ]
    assert {name for name in names[1] if name.startswith("projection_head")} == {
        f"projection_head.{layer}.{part}" for layer in (0, 2) for part in ("weight", "bias")
    }


def test_equal_similarities_cost_the_logarithm_of_their_number() -> None:
    same = F.normalize(torch.ones(3, 4, dtype=torch.float64), dim=1)
    loss = info_nce.info_nce(same, same, same[:1].T.repeat(1, 7), 0.2)
    assert float(loss) == pytest.approx(float(torch.tensor(8.0).log()), rel=1e-6)
    loss = info_nce.info_nce_in_batch(same, same, torch.arange(3), 0.2)
    assert float(loss) == pytest.approx(float(torch.tensor(3.0).log()), rel=1e-6)
