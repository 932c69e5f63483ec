"""Starting from weights that somebody made before."""

from __future__ import annotations

import logging
import os
import pickle

import pytest
import torch
from safetensors.torch import save_file

from tiny import (
    state,
    train,
)
from zoo.engine.loop import Callback
from zoo.errors import InputError


def trunk_of(run):
    return {
        key.removeprefix("shared/learner/trunk."): value
        for key, value in state(run).items()
        if key.startswith("shared/learner/trunk.")
    }


def begun_from(images, out, source):
    """The trunk of a run started from weights, before its first update."""
    taken = {}

    class Look(Callback):
        def on_start(self, loop):
            taken.update({k: v.clone() for k, v in loop.learner.trunk.state_dict().items()})
            assert loop.step == 0
            assert not loop.optimizer.state

    train(images, out, epochs=1, seed=5, init_from=source, callbacks=(Look(),))
    return taken


def test_init_from_a_run(finished, images, tmp_path):
    taken = begun_from(images, tmp_path / "run", finished.path)
    wanted = trunk_of(finished.path)
    assert taken.keys() == wanted.keys()
    assert all(torch.equal(taken[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("prefix", ["", "module.", "module.encoder_q.", "encoder."])
@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_init_from_a_file(finished, images, tmp_path, prefix, kind, caplog):
    wanted = trunk_of(finished.path)
    tensors = {prefix + key: value for key, value in wanted.items()}
    tensors[prefix + "fc.weight"] = torch.ones(2, 64)
    file = tmp_path / f"weights.{kind}"
    if kind == "safetensors":
        save_file(tensors, file)
    else:
        torch.save({"state_dict": tensors, "epoch": 3}, file)
    with caplog.at_level(logging.INFO, logger="zoo"):
        taken = begun_from(images, tmp_path / "run", file)
    assert all(torch.equal(taken[key], wanted[key]) for key in wanted)
    assert f"{len(wanted)} of {len(wanted)} backbone tensors matched" in caplog.text
    assert "(1 tensors) left out" in caplog.text


def test_init_from_weights_of_another_shape_names_it(finished, images, tmp_path):
    with pytest.raises(InputError, match=r"conv1\.weight has shape") as caught:
        train(images, tmp_path / "run", trunk__base_planes=4, init_from=finished.path)
    assert "trunk" in caught.value.fix
    file = tmp_path / "few.safetensors"
    save_file({"conv1.weight": torch.ones(8, 3, 7, 7)}, file)
    with pytest.raises(InputError, match=r"Only 1 of the 120 tensors") as caught:
        train(images, tmp_path / "run", init_from=file)
    assert caught.value.where == str(file)
    assert not (tmp_path / "run").exists()


class Evil:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_malicious_pickle_is_refused_and_not_executed(images, tmp_path):
    for name, dump in (
        ("new.pt", torch.save),
        ("old.pt", lambda value, path: path.write_bytes(pickle.dumps(value))),
    ):
        dump({"state_dict": {"conv1.weight": Evil(tmp_path / "executed")}}, tmp_path / name)
        with pytest.raises(InputError, match="Nothing in it was run") as caught:
            train(images, tmp_path / "run", init_from=tmp_path / name)
        assert caught.value.where == str(tmp_path / name)
        assert not (tmp_path / "executed").exists()
    # The file does what it is feared to do when it is read carelessly.
    pickle.loads((tmp_path / "old.pt").read_bytes())
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
@pytest.mark.parametrize(
    "content", [b"", b"hello", b"\x80\x02}q\x00.", b"\xff\xd8\xff\xe0" * 40, b"PK\x03\x04xx"]
)
def test_what_is_no_file_of_weights_is_named(images, tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        train(images, tmp_path / "run", init_from=tmp_path / name)
    assert caught.value.where == str(tmp_path / name)
    assert not (tmp_path / "run").exists()


def test_a_missing_file_of_weights_is_named(images, tmp_path):
    with pytest.raises(InputError) as caught:
        train(images, tmp_path / "run", init_from=tmp_path / "gone.pt")
    assert "gone.pt" in str(caught.value)


def test_weights_that_are_not_finite_are_refused_before_there_is_a_run(finished, images, tmp_path):
    tensors = trunk_of(finished.path)
    tensors["conv1.weight"][0] = float("nan")
    save_file(tensors, tmp_path / "nan.safetensors")
    with pytest.raises(InputError, match="not finite") as caught:
        train(images, tmp_path / "run", init_from=tmp_path / "nan.safetensors")
    assert caught.value.where == str(tmp_path / "nan.safetensors")
    assert not (tmp_path / "run").exists()
