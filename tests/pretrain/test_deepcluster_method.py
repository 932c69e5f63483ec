"""DeepCluster-v2 and SeLa-v2, one mechanism at a time, around a small network."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from distributed.deepcluster_world import (
    BATCH,
    KINDS,
    SAMPLES,
    STEPS,
    VIEWS,
    begin,
    epoch_batches,
    method_of,
    one_step,
    shape_of,
)
from zoo.errors import InputError
from zoo.pretrain.losses.deepcluster import UNSEEN, spherical_kmeans
from zoo.pretrain.losses.sinkhorn import sinkhorn
from zoo.pretrain.methods import deepcluster_v2_config
from zoo.pretrain.methods.deepcluster_v2 import DeepClusterV2
from zoo.pretrain.methods.deepcluster_v2_config import DeepClusterV2Config
from zoo.pretrain.methods.sela_v2_config import SeLaV2Config

CROPS = (2, 0)


class ByImage:
    """The same bookkeeping by image: what each crop's embedding was when the image was last visited."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.seen: dict[int, torch.Tensor] = {}
        self.targets: list[dict[int, Any]] = []

    def look(self, method, batch) -> dict[int, torch.Tensor]:
        with torch.no_grad():
            embeddings, _ = method(batch.views)
        by_view = embeddings.unflatten(0, (VIEWS, BATCH))
        return {int(image): by_view[list(CROPS), row] for row, image in enumerate(batch.ids)}

    def begin(self, method, epoch: int) -> None:
        images = list(self.seen)  # in the order of visits
        self.targets = []
        for head, prototypes in enumerate(method.heads()):
            rows = torch.stack([self.seen[image][head % 2] for image in images])
            if self.kind == "deepcluster":
                centroids, labels = spherical_kmeans(rows, rows[method.first_rows(epoch, head)], 10)
                torch.testing.assert_close(prototypes.weight, centroids)
                self.targets.append(dict(zip(images, labels.tolist(), strict=True)))
            else:
                weight = F.normalize(prototypes.weight.detach(), dim=1)
                codes = sinkhorn(rows @ weight.T, 0.05, 10)
                found = codes if self.kind == "soft" else codes.argmax(dim=1).tolist()
                self.targets.append(dict(zip(images, found, strict=True)))

    def loss(self, method, batch) -> float:
        _, scores = method(batch.views)
        losses = []
        for of_head, targets in zip(scores, self.targets, strict=True):
            terms = []
            for row, prediction in enumerate(F.log_softmax(of_head / 0.1, dim=1)):
                target = targets.get(int(batch.ids[row % BATCH]))
                if target is not None:
                    terms.append(
                        -prediction[target] if isinstance(target, int) else -(prediction * target).sum()
                    )
            losses.append(torch.stack(terms).mean())
        return torch.stack(losses).mean().item()


@pytest.mark.parametrize("kind", KINDS)
def test_four_epochs_are_those_of_a_plain_bookkeeping(kind):
    method, plain = method_of(kind, crops_for_assign=CROPS), ByImage(kind)
    step = unseen = 0
    for epoch in range(4):
        batches = epoch_batches(epoch)
        if epoch == 0:
            for batch in batches:
                plain.seen |= plain.look(method, batch)
        begin(method, epoch)
        plain.begin(method, epoch)
        plain.seen = {}
        for batch in batches:
            method.before_step(step, epoch)  # brings learned prototypes to unit length
            want, new = plain.loss(method, batch), plain.look(method, batch)
            bank = method.bank.clone()

            def untouched(bank=bank):
                assert torch.equal(method.bank, bank)  # the loss doesn't change it, the end of a step does

            assert one_step(method, batch, step, before_update=untouched) == pytest.approx(want, rel=1e-10)
            plain.seen |= new
            unseen += sum(image not in plain.targets[0] for image in batch.ids.tolist())
            step += 1
        assert list(plain.seen) == method.index.tolist()
        rows = torch.stack(list(plain.seen.values()), dim=1)
        torch.testing.assert_close(method.bank, rows, rtol=1e-12, atol=1e-14)
    assert unseen > 0


@pytest.mark.parametrize("kind", KINDS)
def test_parts_give_what_the_whole_batch_gives(kind):
    whole, parted = method_of(kind), method_of(kind)
    for epoch in range(3):
        begin(whole, epoch)
        begin(parted, epoch, parts=4)
        for position, batch in enumerate(epoch_batches(epoch)):
            step = STEPS * epoch + position
            want = one_step(whole, batch, step)
            assert one_step(parted, batch, step, parts=4) == pytest.approx(want, rel=1e-12)
            torch.testing.assert_close(parted.bank, whole.bank, rtol=1e-9, atol=1e-12)
            assert torch.equal(parted.index, whole.index)
    for (name, a), b in zip(whole.state_dict().items(), parted.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", [1, STEPS])  # in the middle of an epoch, and at its end
def test_a_state_taken_back_goes_on_alike(kind, position):
    method = method_of(kind)
    step = 0
    for epoch in range(2):
        begin(method, epoch)
        for batch in epoch_batches(epoch)[: STEPS if epoch == 0 else position]:
            one_step(method, batch, step)
            step += 1
    twin = method_of(kind)
    twin.load_state_dict(method.state_dict())
    saved = {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in method.local_state().items()
    }
    twin.load_local_state(saved)
    if position == STEPS:
        begin(method, 2)
        begin(twin, 2)
    for batch in epoch_batches(step // STEPS)[step % STEPS :]:
        assert one_step(twin, batch, step) == one_step(method, batch, step)
        step += 1
    assert torch.equal(twin.bank, method.bank) and torch.equal(twin.index, method.index)


def test_nothing_is_saved_or_dealt_out_before_the_first_epoch():
    for kind in KINDS:
        method = method_of(kind)
        assert method.local_state() == {}
        assert method.share_out([{}, {}], 0, 1) == {}
        method.load_local_state({})
        assert method.bank is None


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_dealt_out_by_their_place_in_the_batch(kind):
    """One process's rows become those of four, these those of two, and these the one's again."""
    method = method_of(kind)
    begin(method, 0)
    for step, batch in enumerate(epoch_batches(0)[:2]):
        one_step(method, batch, step)
    one = method.local_state()
    fours = [method.share_out([one], rank, 4) for rank in range(4)]
    assert fours[3]["bank"].shape == (2, STEPS * BATCH // 4, 4)
    places = torch.arange(STEPS * BATCH).view(STEPS, 4, -1)
    for rank, state in enumerate(fours):
        rows = places[:, rank].flatten()
        assert torch.equal(state["bank"], one["bank"][:, rows])
        for key in ("index", "source_index", "sources"):
            assert torch.equal(state[key], one[key][rows])
    twos = [method.share_out(fours, rank, 2) for rank in range(2)]
    again = method.share_out(twos, 0, 1)
    assert again.keys() == one.keys()
    for key in ("bank", "index", "source_index", "sources"):
        assert torch.equal(again[key], one[key])


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_pass_is_one_look_that_leaves_running_statistics_alone(kind):
    method = method_of(kind, norm=True)
    before = {key: value.clone() for key, value in method.state_dict().items() if "bn." in key}
    begin(method, 0)
    assert all(torch.equal(method.state_dict()[key], value) for key, value in before.items())
    # As in training: each batch is normalised by itself, one resolution at a time.
    batch = epoch_batches(0)[1]
    with torch.no_grad():
        embeddings, _ = method(batch.views)
    rows = slice(BATCH, 2 * BATCH)
    torch.testing.assert_close(method.bank[:, rows], embeddings.unflatten(0, (VIEWS, BATCH))[:2])
    assert method.index[rows].tolist() == batch.ids.tolist()
    method.on_epoch_start(1, lambda: pytest.fail("the bank is there"))


def test_a_pass_that_is_stopped_leaves_no_bank():
    method = method_of("deepcluster")

    def broken():
        batch = epoch_batches(0)[0]
        yield batch.views, batch
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        method.on_epoch_start(0, broken)
    assert method.bank is None and method.local_state() == {}


def test_of_an_image_with_several_rows_the_last_counts():
    method = method_of("deepcluster")
    ids = torch.tensor([3, 5, 3, 26])
    method._set_targets(ids, torch.tensor([[1, 1, 1], [2, 2, 2], [3, 3, 2], [4, 0, 0]]))
    known = torch.zeros(SAMPLES, dtype=torch.bool)
    known[ids] = True
    assert torch.equal(method._known, known)
    first, second, third = method.targets(method._table, method._known)
    assert first[[3, 5, 26]].tolist() == [3, 2, 4] and second[[3, 5, 26]].tolist() == [3, 2, 0]
    assert (first[~known] == UNSEEN).all() and (third[~known] == UNSEEN).all()


def test_centroids_start_from_other_rows_for_each_epoch_and_head():
    method = method_of("deepcluster", prototypes=(9, 9))
    drawn = {
        (epoch, head): method.first_rows(epoch, head).tolist() for epoch in range(3) for head in range(2)
    }
    assert len({tuple(rows) for rows in drawn.values()}) == 6
    assert all(len(set(rows)) == 9 and max(rows) < STEPS * BATCH for rows in drawn.values())
    assert method.first_rows(1, 1).tolist() == drawn[1, 1]


def test_centroids_start_from_the_same_images_whatever_the_number_of_processes():
    places = torch.arange(STEPS * BATCH).view(STEPS, -1)
    for world_size in (1, 2, 4):
        config = DeepClusterV2Config(prototypes=(9,), hidden=0, dim=4)
        world = dataclasses.make_dataclass("World", ["world_size"])(world_size)
        method = DeepClusterV2(method_of("deepcluster").trunk, config, shape_of(world_size), world)
        in_rank_order = places.view(STEPS, world_size, -1).transpose(0, 1).flatten()
        found = in_rank_order[method.first_rows(2, 0)].tolist()
        assert found == method_of("deepcluster", prototypes=(9,)).first_rows(2, 0).tolist()


@pytest.mark.parametrize("exclude", [False, True])
def test_centroids_are_left_alone_by_the_optimizer_and_learned_prototypes_are_not(exclude):
    for kind in KINDS:
        method = method_of(kind)
        found = {id(p) for group in method.param_groups(exclude) for p in group["params"]}
        optimised = {name for name, p in method.named_parameters() if id(p) in found}
        others = {name for name, _ in method.named_parameters()} - optimised
        prototypes = {f"prototypes.prototypes{head}.weight" for head in range(3)}
        assert others == (prototypes if kind == "deepcluster" else set())


def test_the_state_that_is_shared_is_the_references():
    assert list(method_of("deepcluster", hidden=7).state_dict())[2:] == [
        *(f"projection_head.0.{part}" for part in ("weight", "bias")),
        *(f"projection_head.1.{part}" for part in ("weight", "bias")),
        *(f"projection_head.1.{part}" for part in ("running_mean", "running_var", "num_batches_tracked")),
        *(f"projection_head.3.{part}" for part in ("weight", "bias")),
        *(f"prototypes.prototypes{head}.weight" for head in range(3)),
    ]


def checked(sizes: dict[str, Any] | None = None, sela: bool = False, **settings: Any) -> list[str]:
    given = {"prototypes": (5,), "crops_for_assign": (0,), **settings}
    config = SeLaV2Config(**given) if sela else DeepClusterV2Config(**given)
    return list(config.check(shape_of(**(sizes or {}))))


def test_settings_that_fit_are_not_warned_of():
    assert checked() == checked(prototypes=(24, 2), crops_for_assign=(0, 1)) == checked(sela=True) == []


def test_settings_that_do_little_are_warned_of():
    (text,) = checked(crops_for_assign=(0, 1, 2), prototypes=(3, 3))
    assert "3 views for 2 head" in text and "last 1 " in text
    (text,) = checked({"epochs": 1})
    assert "single epoch" in text


@pytest.mark.parametrize(
    ("settings", "where", "words"),
    [
        ({"crops_for_assign": (0, 3)}, "crops_for_assign", ["View 3", "3 view"]),
        ({"prototypes": (5, 25)}, "prototypes", ["24 images", "25 clusters"]),
    ],
)
@pytest.mark.parametrize("sela", [False, True])
def test_settings_that_cannot_work_are_refused(sela, settings, where, words):
    with pytest.raises(InputError) as caught:
        checked(sela=sela, **settings)
    assert where in caught.value.where and caught.value.fix
    assert all(word in caught.value.what for word in words)


def test_a_bank_larger_than_the_memory_is_refused_by_its_bytes(monkeypatch):
    monkeypatch.setattr(deepcluster_v2_config, "machine_memory", lambda: 24 * 128 * 4 - 1)
    with pytest.raises(InputError, match="12288 bytes") as caught:
        checked()
    assert "swav" in caught.value.fix
    assert checked({"world_size": 2}) == []  # half for each
    with pytest.raises(InputError, match="36864 bytes") as caught:  # own, its copy, all images'
        checked(sela=True, codes="soft")
    assert "codes hard" in caught.value.fix
    monkeypatch.undo()
    with pytest.raises(InputError, match="GB"):
        checked({"samples": 10**13, "steps_per_epoch": 10**13 // BATCH})


@pytest.mark.parametrize(
    "settings",
    [{"prototypes": ()}, {"prototypes": (3, 0)}, {"prototypes": 2.5}, {"crops_for_assign": (1, 1)}],
)
def test_values_out_of_range(settings):
    with pytest.raises(ValueError, match=r"prototypes|crops_for_assign"):
        DeepClusterV2Config(**settings)


def test_a_number_of_prototypes_is_a_single_head():
    assert DeepClusterV2Config(prototypes=30).prototypes == (30,)


def test_a_run_shorter_than_one_pass_is_refused():
    with pytest.raises(InputError, match="ends after 2 steps") as caught:
        checked({"steps": 2, "steps_per_epoch": 3})
    assert caught.value.where == "samples"
