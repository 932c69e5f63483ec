"""SwAV's options: several sets of prototypes, a momentum encoder, the ablations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from golden.cases import case_ids, fill_state, load
from tiny import StopAfter, assert_same_state, go_on, state, trace, train
from zoo.data.loader import Batch
from zoo.engine.collectives import WorldOfOne
from zoo.errors import InputError
from zoo.models.factory import create_trunk
from zoo.pretrain.losses.sinkhorn import sinkhorn
from zoo.pretrain.losses.swav import swapped_prediction_loss
from zoo.pretrain.methods.config_base import RunShape
from zoo.pretrain.methods.swav import SwAV
from zoo.pretrain.methods.swav_config import SwAVConfig
from zoo.pretrain.resolve import resolve

VIEWS, BATCH = 4, 8


class PlainTrunk(nn.Module):
    """No norm: its rows know nothing of one another. Takes views of any size."""

    num_features = 6

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x.mean(dim=(2, 3))))


def swav(trunk: Any = None, **settings: Any) -> SwAV:
    torch.manual_seed(0)
    given = {"prototypes": 5, "hidden": 0, "dim": 4, "freeze_prototypes_steps": 0, "queue_start_epoch": 0}
    shape = RunShape(views=VIEWS, batch_size=BATCH, world_size=1, steps_per_epoch=4, epochs=1)
    return SwAV(trunk or PlainTrunk(), SwAVConfig(**{**given, **settings}), shape, WorldOfOne()).double()


def batch_of(seed: int) -> tuple[list[torch.Tensor], Batch]:
    """Three views of one size, then one of another."""
    generator = torch.Generator().manual_seed(seed)
    views = [
        torch.randn(count * BATCH, 3, side, side, generator=generator, dtype=torch.float64)
        for count, side in ((3, 3), (1, 2))
    ]
    return views, Batch(views, torch.arange(BATCH), torch.full((BATCH,), -1), 0)


def one_step(method: SwAV, seed: int, parts: int = 1) -> float:
    """A step as the loop makes it, with plain gradient descent."""
    views, batch = batch_of(seed)
    method.before_step(seed, 0)
    shares = [batch] if parts == 1 else batch.split(parts)
    given: list[Any] = [None]
    if parts > 1:
        with torch.no_grad():
            given = method.first_pass([(lambda p=share: p.views, share) for share in shares])
    total = 0.0
    for share, known in zip(shares, given, strict=True):
        loss, _ = method.step(views if parts == 1 else share.views, share, known)
        (loss / parts).backward()
        total += loss.item() / parts
    method.before_update(seed)
    with torch.no_grad():
        for parameter in method.parameters():
            if parameter.grad is not None:
                parameter -= 0.5 * parameter.grad
                parameter.grad = None
    method.after_step(seed)
    return total


# --- several sets of prototypes ---


@pytest.mark.parametrize("name", case_ids("rn50_multiprototypes"))
@torch.no_grad()
def test_scores_of_several_sets_are_the_references(shared: Path, name: str) -> None:
    case = load(shared, name)
    counts = tuple(case.args["nmb_prototypes"])
    config = SwAVConfig(prototypes=counts, hidden=case.args["hidden_mlp"], dim=case.args["output_dim"])
    shape = RunShape(views=2, batch_size=64, world_size=1, steps_per_epoch=1, epochs=1)
    method = SwAV(create_trunk("resnet50"), config, shape, WorldOfOne())
    fill_state(method, case)
    embeddings, scores = method.eval()([case.inputs["x"]])
    case.check("embedding", embeddings)
    for number, of_set in enumerate(scores.split(counts, dim=1)):
        case.check(f"scores{number}", of_set)


@pytest.mark.parametrize("codes", ["soft", "hard"])
def test_the_loss_is_the_mean_over_sets_that_share_embeddings_and_queue(codes: str) -> None:
    counts = (5, 3, 7)
    several = swav(prototypes=counts, queue_length=16, codes=codes)
    weights = [prototypes.weight for prototypes in several.prototype_sets()]
    assert [tuple(weight.shape) for weight in weights] == [(count, 4) for count in counts]
    assert [key for key in several.state_dict() if key.startswith("prototypes.")] == [
        f"prototypes.prototypes{number}.weight" for number in range(3)
    ]
    singles = []
    for count, weight in zip(counts, weights, strict=True):
        single = swav(prototypes=count, queue_length=16, codes=codes)
        single.prototypes.load_state_dict({"weight": weight.detach()})
        for name in ("trunk", "projection_head"):
            getattr(single, name).load_state_dict(getattr(several, name).state_dict())
        singles.append(single)
    for step in range(4):  # full after two
        views, batch = batch_of(step)
        losses = []
        for method in (several, *singles):
            method.zero_grad()
            method.before_step(step, 0)
            loss, _ = method.step(views, batch)
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(sum(losses[1:]) / 3, rel=1e-13)
        for weight, single in zip(weights, singles, strict=True):
            torch.testing.assert_close(3 * weight.grad, single.prototypes.weight.grad, rtol=1e-10, atol=1e-13)
        trunk = sum(single.trunk.linear.weight.grad for single in singles) / 3
        torch.testing.assert_close(several.trunk.linear.weight.grad, trunk, rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(several.queue, singles[0].queue)


def test_a_set_in_a_list_is_the_set_alone_under_another_name() -> None:
    alone, listed = swav(), swav(prototypes=(5,))
    assert [one_step(alone, step) for step in range(3)] == [one_step(listed, step) for step in range(3)]
    assert list(dict(listed.prototypes.named_parameters())) == ["prototypes0.weight"]


def test_all_sets_rest_while_frozen() -> None:
    method = swav(prototypes=(5, 3), freeze_prototypes_steps=1)
    method.before_step(0, 0)
    before = [prototypes.weight.clone() for prototypes in method.prototype_sets()]
    one_step(method, 0)
    assert all(torch.equal(a, b.weight) for a, b in zip(before, method.prototype_sets(), strict=True))
    one_step(method, 1)
    assert not any(torch.equal(a, b.weight) for a, b in zip(before, method.prototype_sets(), strict=True))


@pytest.mark.parametrize("value", ["[]", "[3, 0]", "0", "many", "2.5"])
def test_prototypes_that_are_none_are_refused_by_key(value: str) -> None:
    with pytest.raises(InputError, match=r"a number above 0, or .* a list") as caught:
        resolve("swav_tiny", {"method.prototypes": value})
    assert str(caught.value.where) == "method.prototypes (from --set)"


def test_a_list_survives_writing_and_reading(tmp_path: Path) -> None:
    resolved = resolve("swav_tiny", {"method.prototypes": "[30, 20]"})
    (tmp_path / "recipe.yaml").write_text(resolved.to_yaml())
    again = resolve(tmp_path / "recipe.yaml").recipe
    assert again.method.prototypes == (30, 20)
    assert resolve("swav_tiny").recipe.method.prototypes == 64
    shape = RunShape(views=2, batch_size=16, world_size=1, steps_per_epoch=99, epochs=9)
    (text,) = SwAVConfig(prototypes=(16, 20), freeze_prototypes_steps=0).check(shape)
    assert "(20)" in text


# --- a momentum encoder ---


def test_codes_and_queue_come_from_the_average_and_predictions_from_the_network() -> None:
    """Beside the same written out: two networks, the average moved after each step."""
    share, assign = 0.75, (1, 3)
    method = swav(momentum_encoder=share, crops_for_assign=assign, queue_length=16)
    twin = swav(crops_for_assign=assign)
    average = PlainTrunk().double()
    average.load_state_dict(twin.trunk.state_dict())
    head = nn.Linear(6, 4).double()
    head.load_state_dict(twin.projection_head.state_dict())
    queue = torch.zeros(2, 0, 4, dtype=torch.float64)
    for step in range(5):
        views, _ = batch_of(step)
        crops = [*views[0].split(BATCH), views[1]]
        twin.before_step(step, 0)
        with torch.no_grad():
            seen = [nn.functional.normalize(head(average(crops[crop])), dim=1) for crop in assign]
            used = queue if queue.shape[1] == 16 else queue[:, :0]
            codes = [
                sinkhorn(twin.prototypes(torch.cat((past, rows))), 0.05, 3)[-BATCH:]
                for past, rows in zip(used, seen, strict=True)
            ]
            queue = torch.cat((torch.stack(seen), queue), dim=1)[:, :16]
        _, scores = twin(views)
        want = swapped_prediction_loss(scores, codes, assign, 0.1)
        want.backward()
        new = [*twin.trunk.parameters(), *twin.projection_head.parameters()]
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter -= 0.5 * parameter.grad
                parameter.grad = None
            for mine, other in zip((*average.parameters(), *head.parameters()), new, strict=True):
                mine.mul_(share).add_(other, alpha=1 - share)
        assert one_step(method, step) == pytest.approx(want.item(), rel=1e-12)
        torch.testing.assert_close(method.queue[:, : queue.shape[1]], queue, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(method.momentum_encoder.linear.weight, average.linear.weight)
    assert not torch.allclose(method.momentum_encoder.linear.weight, method.trunk.linear.weight, atol=1e-4)


@pytest.mark.parametrize("assign", [(1, 0), (0, 1, 2, 3), (3,)])
def test_an_average_that_keeps_nothing_is_the_network_itself(assign: tuple[int, ...]) -> None:
    plain = swav(crops_for_assign=assign, queue_length=16)
    follower = swav(crops_for_assign=assign, queue_length=16, momentum_encoder=0.0)
    for step in range(4):
        assert one_step(follower, step) == pytest.approx(one_step(plain, step), rel=1e-12)
        torch.testing.assert_close(follower.queue, plain.queue)


@pytest.mark.parametrize("settings", [{"momentum_encoder": 0.5}, {"prototypes": (5, 3)}])
def test_parts_give_the_losses_of_the_whole_batch(settings: dict[str, Any]) -> None:
    whole, parted = swav(queue_length=16, **settings), swav(queue_length=16, **settings)
    for step in range(4):
        assert one_step(parted, step, parts=4) == pytest.approx(one_step(whole, step), rel=1e-12)
    for (name, a), b in zip(whole.state_dict().items(), parted.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("parts", [1, 2])
def test_each_networks_statistics_move_once_a_part(parts: int) -> None:
    method = swav(create_trunk("resnet18", base_planes=4), hidden=5, momentum_encoder=0.5)
    generator = torch.Generator().manual_seed(0)
    views = [torch.randn(VIEWS * BATCH, 3, 8, 8, generator=generator, dtype=torch.float64)]
    batch = Batch(views, torch.arange(BATCH), torch.full((BATCH,), -1), 0)
    shares = [batch] if parts == 1 else batch.split(parts)
    with torch.no_grad():
        given = [None] if parts == 1 else method.first_pass([(lambda p=s: p.views, s) for s in shares])
    for share, known in zip(shares, given, strict=True):
        method.step(share.views, share, known)
    counters = {k: int(v) for k, v in method.state_dict().items() if k.endswith("num_batches_tracked")}
    assert set(counters.values()) == {parts}
    assert sum(key.startswith("momentum_encoder.") for key in counters) == len(counters) / 2


def test_without_a_momentum_encoder_nothing_is_added() -> None:
    assert swav().momentum_encoder is None
    assert not any("momentum" in key for key in swav().state_dict())


def test_initial_weights_reach_the_average(images, tmp_path) -> None:
    first = train(images, tmp_path / "first", epochs=1)
    options = {"method__momentum_encoder": 0.999, "optimizer__lr": 1e-30, "schedule__warmup_epochs": 0}
    run = train(images, tmp_path / "run", epochs=1, init_from=first.path, **options)
    key = "layer1.0.conv1.weight"
    assert torch.equal(run.method.momentum_encoder.state_dict()[key], first.method.trunk.state_dict()[key])


def test_going_on_with_a_momentum_encoder_is_bit_for_bit(images, tmp_path) -> None:
    options = {
        "method__momentum_encoder": 0.9,
        "method__queue_length": 16,
        "method__queue_start_epoch": 0,
        "method__prototypes": [8, 4],
    }
    whole = train(images, tmp_path / "whole", **options)
    half = train(images, tmp_path / "half", callbacks=(StopAfter(4),), **options)
    go_on(half.path)
    assert trace(half.path) == trace(whole.path)
    assert_same_state(half.path, whole.path)
    saved = state(half.path)
    assert "shared/learner/momentum_encoder.projection_head.3.weight" in saved
    assert "shared/learner/prototypes.prototypes1.weight" in saved


@pytest.mark.parametrize("value", [1.0, -0.1])
def test_a_momentum_outside_its_range_is_refused(value: float) -> None:
    with pytest.raises(InputError, match="should be") as caught:
        resolve("swav_tiny", {"method.momentum_encoder": value})
    assert "method.momentum_encoder" in str(caught.value.where)


# --- the other options ---


def test_a_head_without_norm_has_the_widest_networks_keys() -> None:
    keys = [key for key in swav(hidden=5, head_norm=False).state_dict() if "projection_head" in key]
    assert keys == [f"projection_head.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")]


def test_a_high_epsilon_gives_uniform_codes_and_a_low_one_does_not() -> None:
    spreads = {}
    for epsilon in (0.05, 50.0):
        method = swav(epsilon=epsilon)
        views, batch = batch_of(0)
        method.before_step(0, 0)
        codes = method.codes(*method(views), batch.size)
        spreads[epsilon] = max((q - 1 / 5).abs().max().item() for q in codes)
    assert spreads[50.0] < 0.02 < 0.3 < spreads[0.05]
