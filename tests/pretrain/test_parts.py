"""A batch trained in parts, averaged weights, activations computed twice, and memory that runs out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tiny import StopAfter, assert_same_state, go_on, image_folder, state, trace, train
from zoo.data.loader import Batch
from zoo.engine.collectives import WorldOfOne
from zoo.engine.loop import Callback, Loop
from zoo.engine.memory import explained_memory
from zoo.errors import InputError, RunError
from zoo.models.factory import create_trunk
from zoo.models.recompute import recompute_blocks
from zoo.pretrain.methods.config_base import RunShape
from zoo.pretrain.methods.swav import SwAV
from zoo.pretrain.methods.swav_config import SwAVConfig
from zoo.pretrain.publish import read_run


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"))


class PlainTrunk(nn.Module):
    """No norm: its rows know nothing of one another."""

    num_features = 6

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x.flatten(1)))


def swav(queue: int = 0) -> SwAV:
    torch.manual_seed(0)
    config = SwAVConfig(
        prototypes=5, hidden=0, dim=4, queue_length=queue, queue_start_epoch=0, freeze_prototypes_steps=0
    )
    shape = RunShape(views=3, batch_size=8, world_size=1, steps_per_epoch=4, epochs=1)
    return SwAV(PlainTrunk(), config, shape, WorldOfOne()).double()


def batch_of(seed: int) -> tuple[list[torch.Tensor], Batch]:
    generator = torch.Generator().manual_seed(seed)
    views = [torch.randn(3 * 8, 3, 2, 2, generator=generator, dtype=torch.float64)]
    return views, Batch(views, torch.arange(8), torch.full((8,), -1), 0)


@pytest.mark.parametrize("queue", [0, 16])
def test_parts_give_the_codes_loss_and_gradient_of_the_whole_batch(queue):
    whole, parted = swav(queue), swav(queue)
    for step in range(4):
        views, batch = batch_of(step)
        for method in (whole, parted):
            method.zero_grad()
            method.before_step(step, 0)
        loss, _ = whole.step(views, batch)
        loss.backward()
        parts = batch.split(4)
        with torch.no_grad():
            given = parted.first_pass([(lambda p=part: p.views, part) for part in parts])
        total = 0.0
        for part, codes in zip(parts, given, strict=True):
            partial, _ = parted.step(part.views, part, codes)
            (partial / 4).backward()
            total += partial.item() / 4
        assert total == pytest.approx(loss.item(), rel=1e-12)
        for (name, a), b in zip(whole.named_parameters(), parted.parameters(), strict=True):
            assert torch.allclose(a.grad, b.grad, rtol=1e-9, atol=1e-12), name
    # without the codes of the whole batch it would be another loss
    alone, _ = parted.step(parts[0].views, parts[0])
    assert alone.item() != pytest.approx(parted.step(parts[0].views, parts[0], given[0])[0].item(), rel=1e-6)


def test_a_batch_is_split_view_by_view():
    views = torch.arange(3 * 8).view(24, 1, 1, 1).expand(24, 3, 2, 2).contiguous()
    batch = Batch([views], torch.arange(8), torch.arange(8), 0)
    first, second = batch.split(2)
    assert first.views[0][:, 0, 0, 0].tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19]
    assert second.ids.tolist() == [4, 5, 6, 7]
    with pytest.raises(ValueError, match="equal parts"):
        batch.split(3)


def test_a_run_in_parts_resumes_bit_for_bit(images, tmp_path):
    options = {"engine__accumulate": 2, "engine__ema_decay": 0.9, "method__queue_length": 16}
    whole = train(images, tmp_path / "whole", **options)
    half = train(images, tmp_path / "half", callbacks=(StopAfter(4),), **options)
    assert any(key.startswith("shared/average/") for key in state(half.path))
    go_on(half.path)
    assert trace(half.path) == trace(whole.path)
    assert_same_state(half.path, whole.path)


def test_the_average_follows_the_weights_and_is_published(images, tmp_path):
    run = train(images, tmp_path / "run", engine__ema_decay=0.5)
    trained = run.method.trunk.state_dict()
    what, trunk, _ = read_run(run.path)
    assert what.lineage["averaged"] is True
    assert not torch.equal(trunk["conv1.weight"], trained["conv1.weight"])
    assert torch.allclose(trunk["conv1.weight"], trained["conv1.weight"], atol=0.05)
    assert torch.equal(trunk["bn1.num_batches_tracked"], trained["bn1.num_batches_tracked"])
    plain, _, _ = read_run(train(images, tmp_path / "plain").path)
    assert plain.lineage["averaged"] is False


def test_recomputed_blocks_give_the_same_gradients_and_statistics():
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        trunk = create_trunk("resnet18", base_planes=8).double()
        if recompute:
            recompute_blocks(trunk)
        torch.manual_seed(1)
        x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
        trunk(x).square().sum().backward()
        results.append((trunk.state_dict(), {n: p.grad for n, p in trunk.named_parameters()}))
    (state_a, grads_a), (state_b, grads_b) = results
    assert state_a.keys() == state_b.keys()
    assert all(torch.equal(state_a[key], state_b[key]) for key in state_a)
    assert all(torch.allclose(grads_a[key], grads_b[key], rtol=1e-12, atol=1e-12) for key in grads_a)


def test_recomputed_blocks_keep_less(images):
    def kept(trunk: nn.Module) -> int:
        total = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            trunk(torch.randn(2, 3, 64, 64)).sum()
        return total

    plain, frugal = create_trunk("resnet18", base_planes=8), create_trunk("resnet18", base_planes=8)
    recompute_blocks(frugal)
    assert kept(frugal) < 0.6 * kept(plain)


def test_a_compiled_trunk_trains_to_nearly_the_same(images, tmp_path):
    plain = train(images, tmp_path / "plain", epochs=1)
    compiled = train(images, tmp_path / "compiled", epochs=1, engine__compile=True)
    a, b = plain.method.trunk.state_dict(), compiled.method.trunk.state_dict()
    assert a.keys() == b.keys()
    assert all(torch.allclose(a[k].double(), b[k].double(), rtol=1e-2, atol=1e-3) for k in a)


def test_a_compiled_trunk_cannot_be_computed_twice(images, tmp_path):
    with pytest.raises(InputError, match="leave out compile or activation_checkpointing"):
        train(images, tmp_path / "run", engine__compile=True, engine__activation_checkpointing=True)


def test_memory_that_runs_out_says_what_to_change():
    _, batch = batch_of(0)
    with (
        pytest.raises(RunError, match=r"8 images \(24 of 2 px") as caught,
        explained_memory(batch, torch.device("cpu")),
    ):
        torch.empty(2**60)
    assert "engine.accumulate" in caught.value.fix
    with pytest.raises(ZeroDivisionError), explained_memory(batch, torch.device("cpu")):
        1 / 0  # noqa: B018


class Greedy(Callback):
    """Wants all memory when the gradients are there: an optimizer makes its moments then."""

    def on_gradients(self, loop: Loop) -> None:
        torch.empty(2**60)


def test_memory_that_runs_out_after_the_gradients_is_explained_too(images, tmp_path):
    with pytest.raises(RunError, match="Memory ran out on cpu in a step of 8 images"):
        train(images, tmp_path / "run", callbacks=(Greedy(),))


@pytest.mark.parametrize("parts", [3, 8])  # no equal parts, and parts of one image
def test_a_batch_that_cannot_be_shared_is_refused(images, tmp_path, parts):
    with pytest.raises(InputError, match="can't be shared equally by 1 process") as caught:
        train(images, tmp_path / "run", engine__accumulate=parts)
    assert "two images or more each" in caught.value.what
    assert f"multiple of {parts}" in caught.value.fix
    assert not (tmp_path / "run").exists()
