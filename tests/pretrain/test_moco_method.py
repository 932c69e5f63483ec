"""MoCo's mechanisms, one at a time, around a trunk without norms or with one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from zoo.data.loader import Batch
from zoo.engine.collectives import WorldOfOne
from zoo.errors import InputError
from zoo.pretrain.losses.info_nce import info_nce, info_nce_in_batch
from zoo.pretrain.methods import moco_config
from zoo.pretrain.methods.config_base import RunShape
from zoo.pretrain.methods.moco import MoCo
from zoo.pretrain.methods.moco_config import MoCoConfig

BATCH = 8
DICTIONARIES = ["queue", "batch", "memory_bank"]


class Trunk(nn.Module):
    """Rows know nothing of one another, unless there is a norm; views may be of any size."""

    num_features = 6

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 2)
        self.bn = nn.BatchNorm2d(6) if norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.bn(self.conv(x))).mean(dim=(2, 3))


def shape_of(views: int = 2, **sizes: int | bool) -> RunShape:
    given = {"batch_size": BATCH, "world_size": 1, "steps_per_epoch": 4, "epochs": 1, "samples": 12}
    return RunShape(views=views, **{**given, **sizes})  # type: ignore[arg-type]


def moco(views: int = 2, norm: bool = False, accumulate: int = 1, **settings: object) -> MoCo:
    torch.manual_seed(0)
    config = MoCoConfig(**{"negatives": 16, "dim": 4, "temperature": 0.2, "momentum": 0.9, **settings})
    shape = shape_of(views, accumulate=accumulate)
    return MoCo(Trunk(norm), config, shape, WorldOfOne()).double()


@pytest.mark.parametrize("apart", [False, True])
def test_queries_of_one_size_meet_in_batchnorm_unless_views_are_apart(apart):
    torch.manual_seed(0)
    config = MoCoConfig(negatives=16, dim=4)
    method = MoCo(Trunk(norm=True), config, shape_of(3, views_apart=apart), WorldOfOne()).double()
    assert len(method._query_views) == 2
    images = list(batch_of(0, views=3).views[0].split(BATCH))
    queries = method.queries(images)
    images[method._query_views[1]] = 5 + 2 * images[method._query_views[1]]
    changed = method.queries(images)
    assert torch.equal(queries[0], changed[0]) is apart


def batch_of(seed: int, views: int = 2, small: int = 0) -> Batch:
    """``views`` of 4 x 4 pixels and ``small`` of 3 x 3, of ``BATCH`` images."""
    generator = torch.Generator().manual_seed(seed)
    groups = [
        torch.randn(count * BATCH, 3, size, size, generator=generator, dtype=torch.float64)
        for count, size in ((views, 4), (small, 3))
        if count
    ]
    ids = torch.randperm(12, generator=generator)[:BATCH]
    return Batch(groups, ids, torch.full((BATCH,), -1), 0)


def one_step(method: MoCo, batch: Batch, step: int) -> float:
    """A step of the loop, with plain SGD; the loss."""
    method.zero_grad()
    method.before_step(step, 0)
    loss, _ = method.step(batch.views, batch)
    loss.backward()
    update(method, step)
    return loss.item()


def steps_in_parts(method: MoCo, batch: Batch, step: int, count: int) -> float:
    """The same in parts, as ``zoo.engine.loop`` does it."""
    method.zero_grad()
    method.before_step(step, 0)
    parts = batch.split(count)
    with torch.no_grad():
        given = method.first_pass([(lambda p=part: p.views, part) for part in parts])
    total = 0.0
    for part, known in zip(parts, given, strict=True):
        loss, _ = method.step(part.views, part, known)
        (loss / count).backward()
        total += loss.item() / count
    update(method, step)
    return total


def update(method: MoCo, step: int) -> None:
    method.before_update(step)
    with torch.no_grad():
        for group in method.param_groups(exclude_one_dimensional=False):
            for p in group["params"]:
                p.sub_(0.1 * p.grad)
    method.after_step(step)


def assert_same(one: MoCo, other: MoCo, **tolerance: float) -> None:
    a, b = one.state_dict(), other.state_dict()
    assert a.keys() == b.keys()
    for key, value in a.items():
        torch.testing.assert_close(value, b[key], msg=lambda text, key=key: f"{key}: {text}", **tolerance)


@pytest.mark.parametrize("dictionary", DICTIONARIES)
@pytest.mark.parametrize("key_views", [(1,), (0, 1)])
def test_parts_give_what_the_whole_batch_gives(dictionary, key_views):
    settings = {"dictionary": dictionary, "key_views": key_views, "negatives": 20}
    whole, parted = moco(3, **settings), moco(3, accumulate=4, **settings)
    for step in range(4):
        batch = batch_of(step, 2, 1)
        assert steps_in_parts(parted, batch, step, 4) == pytest.approx(
            one_step(whole, batch, step), rel=1e-12
        )
        assert_same(whole, parted, rtol=1e-9, atol=1e-12)


def test_a_part_of_a_batch_end_to_end_is_not_a_batch_of_its_own():
    method = moco(dictionary="batch")
    batch = batch_of(0)
    method.before_step(0, 0)
    first = batch.split(4)[0]
    with torch.no_grad():
        given = method.first_pass([(lambda p=part: p.views, part) for part in batch.split(4)])
    alone = method.step(first.views, first)[0].item()
    assert alone != pytest.approx(method.step(first.views, first, given[0])[0].item(), rel=1e-3)


def test_the_queue_wraps_and_keeps_the_newest():
    method = moco(negatives=10, dim=4)
    start = method.queue.clone()
    keys = torch.arange(13.0, dtype=torch.float64)[:, None].expand(13, 4)
    method.enqueue(keys[:4])
    method.enqueue(keys[4:8])
    assert torch.equal(method.queue[:, 8:], start[:, 8:])
    method.enqueue(keys[8:12])
    assert method.queue[0].tolist() == [10, 11, 2, 3, 4, 5, 6, 7, 8, 9]
    assert method.queue_ptr.tolist() == [2]
    method.enqueue(keys)  # more than the queue holds: as one after the other
    assert method.queue_ptr.tolist() == [5]
    assert method.queue[0].tolist() == [8, 9, 10, 11, 12, 3, 4, 5, 6, 7]


def test_a_batch_is_compared_with_the_queue_before_it_joins():
    method = moco(negatives=12)
    for step in range(3):
        batch = batch_of(step)
        before = method.queue.clone()
        method.before_step(step, 0)
        loss, _ = method.step(batch.views, batch)
        images = list(batch.views[0].split(BATCH))
        queries, keys = method.queries(images)[0], method.keys(images, 0)[0]
        assert loss.item() == pytest.approx(info_nce(queries, keys, before, 0.2).item(), rel=1e-12)
        assert torch.equal(method.queue, before)
        method.after_step(step)
        places = (torch.arange(BATCH) + step * BATCH) % 12
        torch.testing.assert_close(method.queue[:, places], keys.T)


def test_the_momentum_encoder_follows_before_it_encodes():
    method = moco(norm=True, momentum=0.9)
    assert not any(p.requires_grad for p in method.momentum_encoder.parameters())
    one_step(method, batch_of(0), 0)
    weight = method.trunk.conv.weight.detach().clone()
    old = method.momentum_encoder.conv.weight.clone()
    assert not torch.equal(weight, old)
    statistics = method.momentum_encoder.bn.running_mean.clone()
    method.before_step(1, 0)
    torch.testing.assert_close(method.momentum_encoder.conv.weight, 0.9 * old + 0.1 * weight)
    assert torch.equal(method.momentum_encoder.bn.running_mean, statistics)
    assert not torch.equal(statistics, method.trunk.bn.running_mean)  # its own batches' statistics


@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("dictionary", DICTIONARIES)
def test_only_the_query_encoder_is_optimised(dictionary, exclude):
    method = moco(norm=True, dictionary=dictionary)
    groups = method.param_groups(exclude)
    found = {id(p) for group in groups for p in group["params"]}
    encoder = [*method.trunk.parameters(), *method.projection_head.parameters()]
    assert found == {id(p) for p in encoder}
    if exclude:
        assert [group.get("weight_decay") for group in groups] == [None, 0.0]


def test_another_trunk_is_copied_into_the_momentum_encoder():
    method, other = moco(norm=True), moco(norm=True)
    for tensor in other.trunk.state_dict().values():
        tensor.add_(1)
    method.trunk.load_state_dict(other.trunk.state_dict())
    method.on_trunk_replaced()
    state = method.momentum_encoder.state_dict()
    for key, value in other.trunk.state_dict().items():
        assert torch.equal(state[key], value), key
    assert torch.equal(state["projection_head.weight"], method.projection_head.weight)
    moco(dictionary="batch").on_trunk_replaced()  # nothing to copy into


@pytest.mark.parametrize("groups", [2, 4])
def test_keys_depend_on_who_shares_their_group(groups):
    """With the same images, another order within the groups changes nothing, one across them does."""

    class Ordered(MoCo):
        order: torch.Tensor

        def shuffled(self, count: int, part: int, view: int) -> torch.Tensor:
            return self.order

    method = moco(norm=True, shuffle_groups=groups)
    method.__class__ = Ordered
    images = list(batch_of(0).views[0].split(BATCH))

    def keys(order: list[int]) -> torch.Tensor:
        method.order = torch.tensor(order)
        return method.keys(images, 0)[0]

    plain = list(range(BATCH))
    size = BATCH // groups
    within = [*reversed(plain[:size]), *plain[size:]]
    across = [plain[size], *plain[1:size], plain[0], *plain[size + 1 :]]
    torch.testing.assert_close(keys(within), keys(plain), rtol=1e-12, atol=1e-12)
    assert (keys(across) - keys(plain)).abs().max() > 1e-3
    # Each key is that of its own image, normalised among those of its group.
    method.eval()
    torch.testing.assert_close(keys(across), keys(plain))


def test_shuffling_is_drawn_anew_for_each_step_and_view():
    method = moco(shuffle_groups=2)
    method.before_step(3, 0)
    drawn = [method.shuffled(64, part, view).tolist() for part, view in ((0, 1), (1, 1), (0, 0))]
    again = method.shuffled(64, 0, 1).tolist()
    method.before_step(4, 0)
    drawn.append(method.shuffled(64, 0, 1).tolist())
    assert again == drawn[0]
    assert all(sorted(order) == list(range(64)) for order in drawn)
    assert len({tuple(order) for order in drawn}) == 4


def test_queries_are_normalised_in_groups_too_and_stay_in_order():
    method = moco(3, norm=True, shuffle_groups=2)
    images = [view for group in batch_of(0, 2, 1).views for view in group.split(BATCH)]
    queries = method.queries(images)  # view 0 and the small one
    halves = [method.queries([image[rows] for image in images]) for rows in (slice(0, 4), slice(4, 8))]
    assert queries.shape == (2, BATCH, 4)
    method._passes = 1
    for place, rows in enumerate((slice(0, 4), slice(4, 8))):
        alone = method.queries([image[rows] for image in images])
        torch.testing.assert_close(queries[:, rows], alone)
        assert not torch.allclose(halves[place], alone, atol=1e-3)
    assert not torch.allclose(queries, method.queries(images), atol=1e-3)


def test_small_crops_are_queries_alone():
    method = moco(5)
    batch = batch_of(0, 2, 3)
    method.before_step(0, 0)
    loss, _ = method.step(batch.views, batch)
    images = [view for group in batch.views for view in group.split(BATCH)]
    key = method.keys(images, 0)[0]
    queries = method.queries(images)
    assert len(queries) == 4
    each = [info_nce(query, key, method.queue, 0.2) for query in queries]
    assert loss.item() == pytest.approx(torch.stack(each).mean().item(), rel=1e-12)
    wanted = F.normalize(method.projection_head(method.trunk(images[3])), dim=1)
    torch.testing.assert_close(queries[2], wanted)


def test_two_key_views_are_compared_with_one_another_and_both_enqueued():
    method = moco(3, key_views=(0, 1), negatives=32)
    batch = batch_of(0, 2, 1)
    method.before_step(0, 0)
    before = method.queue.clone()
    loss, _ = method.step(batch.views, batch)
    images = [view for group in batch.views for view in group.split(BATCH)]
    queries, keys = method.queries(images), method.keys(images, 0)
    pairs = [(1, 0), (2, 0), (0, 1), (2, 1)]
    each = [info_nce(queries[query], keys[key], before, 0.2) for query, key in pairs]
    assert loss.item() == pytest.approx(torch.stack(each).mean().item(), rel=1e-12)
    method.after_step(0)
    torch.testing.assert_close(method.queue[:, :16], keys.flatten(0, 1).T)
    assert torch.equal(method.queue[:, 16:], before[:, 16:])


def test_end_to_end_both_sides_learn():
    method = moco(dictionary="batch")
    batch = batch_of(0)
    loss = one_step(method, batch, 0)
    found = method.trunk.conv.weight.grad
    fresh = moco(dictionary="batch")
    images = list(batch.views[0].split(BATCH))

    def encode(image: torch.Tensor) -> torch.Tensor:
        return F.normalize(fresh.projection_head(fresh.trunk(image)), dim=1)

    want = info_nce_in_batch(encode(images[0]), encode(images[1]), torch.arange(BATCH), 0.2)
    want.backward()
    assert loss == pytest.approx(want.item(), rel=1e-12)
    torch.testing.assert_close(found, fresh.trunk.conv.weight.grad)
    one_side = copy.deepcopy(fresh)
    one_side.zero_grad()
    keys = encode(images[1]).detach()
    query = F.normalize(one_side.projection_head(one_side.trunk(images[0])), dim=1)
    info_nce_in_batch(query, keys, torch.arange(BATCH), 0.2).backward()
    assert not torch.allclose(one_side.trunk.conv.weight.grad, found, rtol=0.1)
    assert not any("momentum" in key or "queue" in key for key in method.state_dict())


@pytest.mark.parametrize("dictionary", DICTIONARIES)
def test_half_precision_gives_a_loss_in_single(dictionary):
    method = moco(dictionary=dictionary).float()
    batch = batch_of(0)
    batch.views = [view.float() for view in batch.views]
    method.before_step(0, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = method.step(batch.views, batch)
    loss.backward()
    method.after_step(0)
    assert loss.dtype == torch.float32
    assert all(value.dtype != torch.bfloat16 for value in method.state_dict().values())
    if dictionary == "queue":
        torch.testing.assert_close(method.queue.norm(dim=0), torch.ones(16), rtol=0, atol=1e-6)


def warnings(shape: RunShape | None = None, **settings: object) -> list[str]:
    settings = {"negatives": 16, "shuffle_groups": 2, **settings}
    return list(MoCoConfig(**settings).check(shape or shape_of()))


def test_fitting_settings_are_quiet():
    assert warnings() == []
    assert warnings(dictionary="batch") == []
    assert warnings(shape_of(1), dictionary="memory_bank") == []
    assert warnings(shape_of(world_size=2, accumulate=2), shuffle_groups=4) == []
    assert warnings(shape_of(sync_batchnorm=True)) == []  # of one process there is nothing to share


@pytest.mark.parametrize(
    ("shape", "settings", "words"),
    [
        ({}, {"shuffle_groups": 1}, ["not shuffled", "8 groups of 32"]),
        ({"world_size": 2, "sync_batchnorm": True}, {}, ["engine.sync_batchnorm", "shuffle_groups"]),
        ({}, {"negatives": 7}, ["7", "8 keys"]),
        ({"views": 3}, {"key_views": (0, 1), "negatives": 15}, ["15", "16 keys"]),
    ],
)
def test_doubtful_settings_are_said(shape, settings, words):
    (text,) = warnings(shape_of(**shape), **settings)
    assert all(word in text for word in words)


@pytest.mark.parametrize(
    ("shape", "settings", "where", "words"),
    [
        ({"views": 1}, {}, "key_views", ["view 1", "1 view"]),
        ({"views": 1}, {"key_views": (0,)}, "views.count", ["two views"]),
        ({}, {"key_views": (0, 2)}, "key_views", ["view 2", "2 view"]),
        ({}, {"shuffle_groups": 3}, "shuffle_groups", ["8 images", "3 equal"]),
        ({}, {"shuffle_groups": 8}, "shuffle_groups", ["two or"]),
        ({"world_size": 4}, {"shuffle_groups": 2}, "shuffle_groups", ["4 process"]),
        ({"world_size": 2, "accumulate": 2}, {}, "shuffle_groups", ["2 process", "2 part"]),
        ({"accumulate": 2}, {}, "shuffle_groups", ["accumulate 2", "nothing would be shuffled"]),
    ],
)
def test_settings_that_cannot_work_are_refused(shape, settings, where, words):
    with pytest.raises(InputError) as caught:
        warnings(shape_of(**shape), **settings)
    assert where in caught.value.where
    assert all(word in caught.value.what for word in words)
    assert caught.value.fix


def test_a_dictionary_larger_than_the_memory_names_its_bytes(monkeypatch):
    monkeypatch.setattr(moco_config, "machine_memory", lambda: 1000)
    with pytest.raises(InputError, match="6144 bytes") as caught:
        warnings(dictionary="memory_bank")  # 12 images of 128 numbers of 4 bytes
    assert "memory_bank" in caught.value.where or "dictionary" in caught.value.where
    with pytest.raises(InputError, match="8192 bytes"):
        warnings()
    assert warnings(dictionary="batch") == []
    monkeypatch.undo()
    with pytest.raises(InputError, match="bytes") as caught:
        warnings(shape_of(samples=10**12), dictionary="memory_bank")
    assert "queue" in caught.value.fix


@pytest.mark.parametrize(
    "settings", [{"key_views": (1, 1)}, {"key_views": (-1,)}, {"momentum": 1.1}, {"temperature": 0}]
)
def test_values_out_of_range(settings):
    with pytest.raises(ValueError, match=r"key_views|momentum|temperature"):
        MoCoConfig(**settings)


@pytest.mark.parametrize("dictionary", DICTIONARIES)
def test_a_norm_in_the_head_sees_all_queries_of_the_step(dictionary):
    method = moco(3, dictionary=dictionary, hidden=5, head_norm=True)
    assert isinstance(method.projection_head[1], nn.BatchNorm1d)
    seen = []
    method.projection_head[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    assert one_step(method, batch_of(1, 3), 0) > 0
    # End to end the same head also encodes the keys.
    views = 2 if dictionary != "memory_bank" else 3
    assert seen == [(views * BATCH, 5), *([(BATCH, 5)] if dictionary == "batch" else [])]
