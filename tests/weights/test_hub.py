"""The local hub: whole or not at all, whoever else is publishing and whatever kills us."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import random
import signal
import time

import pytest
import torch

import zoo
from zoo.errors import InputError, RunError
from zoo.pretrain.publish import newest_run, publish_run
from zoo.weights.bundle import write_bundle
from zoo.weights.card import model_card
from zoo.weights.hubs.local import LocalHub
from zoo.weights.reference import parse_reference

from .published import describe, flip, in_fresh_process, publish, weights_of

BAD_NAMES = ["../../x", "/etc/x", "a", "a/b/c", "a/..", "../b", "a/.hidden", "", "a/", "a b/c", "a/b\n"]


def leftovers(hub):
    return sorted(
        str(path.relative_to(hub.home))
        for path in hub.home.rglob("*")
        if path.name.endswith(".tmp") or path.name == "incoming"
    )


def assert_sound(hub):
    """Every model of the hub is listed, and every revision that anything points at is whole."""
    for name in hub.names():
        for revision in {*hub.refs(name).values(), *hub.revisions(name)}:
            hub.resolve(name, revision).verify(full=True)


# --- names ---


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_can_not_lead_out_of_the_hub(name, tmp_path):
    hub = LocalHub()
    with pytest.raises(InputError, match="org/name") as caught:
        publish(name)
    assert "me/" in caught.value.fix
    for use in (hub.resolve, hub.remove, hub.refs, hub.revisions, lambda n: hub.tag(n, None, "v1")):
        with pytest.raises(InputError):
            use(name)
    with pytest.raises(InputError):
        hub.pull(name, None, tmp_path / "out")
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("name", [name for name in BAD_NAMES if name])
def test_a_reference_can_not_lead_out_of_the_hub(name):
    publish()
    with pytest.raises(InputError):
        zoo.load(f"local:{name}", progress=False)


def test_an_unknown_model_gets_the_nearest_names():
    publish("me/swav_tiny")
    publish("you/other")
    with pytest.raises(InputError, match="neither a path that exists, nor a model") as caught:
        zoo.load("me/swav_tyni")
    assert "me/swav_tiny" in caught.value.fix and "you/other" not in caught.value.fix
    with pytest.raises(InputError) as caught:
        zoo.load("local:me/swav_tyni")
    assert "me/swav_tiny" in caught.value.fix


def test_an_unknown_kind_gets_the_nearest_one():
    with pytest.raises(InputError, match="no kind of model called 'radnom'") as caught:
        zoo.load("radnom:resnet18")
    assert "did you mean random" in caught.value.fix
    with pytest.raises(InputError, match="names no model"):
        zoo.load("local:")


def test_a_path_that_exists_wins(tmp_path, monkeypatch):
    publish("me/small", seed=1)
    monkeypatch.chdir(tmp_path)
    LocalHub().pull("me/small", None, tmp_path / "me" / "small")
    assert parse_reference("me/small").kind == "path"
    assert parse_reference("local:me/small").kind == "local"


@pytest.mark.parametrize("text", ["x" * 5000, "a\0b", "me/" + "x" * 300])
def test_an_odd_reference_is_an_error_in_words(text):
    with pytest.raises(InputError):
        parse_reference(text)


def test_a_path_that_is_no_model_says_what_is_expected(tmp_path):
    with pytest.raises(InputError, match="not a published model"):
        zoo.load(f"path:{tmp_path}")
    with pytest.raises(InputError, match="no such folder"):
        zoo.load(f"path:{tmp_path / 'no'}")
    with pytest.raises(InputError):
        zoo.load(str(tmp_path))


# --- tags and revisions ---


def test_latest_moves_and_other_tags_stay():
    hub = LocalHub()
    first = publish(seed=0, tag="v1")
    second = publish(seed=1)
    assert first.new and second.new and first.revision != second.revision
    assert hub.refs("me/small") == {"latest": second.revision, "v1": first.revision}
    assert hub.revisions("me/small") == [first.revision, second.revision]
    for wanted, found in (
        (None, second),
        ("v1", first),
        (first.revision, first),
        (first.revision[:6], first),
    ):
        assert hub.resolve("me/small", wanted).path == found.path
    assert zoo.load(f"me/small@{first.revision[:8]}", progress=False).zoo_info["revision"] == first.revision


def test_a_taken_tag_needs_force():
    hub = LocalHub()
    first = publish(seed=0, tag="v1")
    with pytest.raises(InputError, match="tags don't move") as caught:
        publish(seed=1, tag="v1")
    assert "--force" in caught.value.fix
    assert hub.refs("me/small") == {"latest": first.revision, "v1": first.revision}
    assert hub.revisions("me/small") == [first.revision]
    assert leftovers(hub) == []
    second = publish(seed=1, tag="v1", force=True)
    assert hub.refs("me/small")["v1"] == second.revision
    with pytest.raises(InputError, match="tags don't move"):
        hub.tag("me/small", first.revision, "v1")
    assert hub.tag("me/small", "v1", "v1") == second.revision
    hub.tag("me/small", first.revision, "v1", force=True)
    assert hub.refs("me/small")["v1"] == first.revision
    assert hub.refs("me/small")["latest"] == second.revision


@pytest.mark.parametrize("tag", ["latest", "0123456789abcdef", "a/b", "", "../x", "-x"])
def test_a_tag_must_be_a_short_word(tag):
    with pytest.raises(InputError, match="A tag is"):
        publish(tag=tag)
    publish()
    with pytest.raises(InputError, match="A tag is"):
        LocalHub().tag("me/small", None, tag)


@pytest.mark.parametrize("revision", ["v9", "abc", "../..", "0" * 16])
def test_an_unknown_revision_names_those_that_exist(revision):
    done = publish(tag="v1")
    with pytest.raises(InputError, match="no such revision") as caught:
        LocalHub().resolve("me/small", revision)
    assert "v1" in caught.value.fix and done.revision in caught.value.fix


def test_publishing_the_same_again_changes_nothing():
    hub = LocalHub()
    first = publish(tag="v1")
    before = {path: path.stat().st_mtime_ns for path in hub.home.rglob("*") if path.is_file()}
    again = publish(tag="v1")
    assert not again.new and again.revision == first.revision
    after = {path: path.stat().st_mtime_ns for path in hub.home.rglob("*") if path.is_file()}
    assert {p: t for p, t in after.items() if p.name != ".lock"} == {
        p: t for p, t in before.items() if p.name != ".lock"
    }


def test_new_results_make_a_new_revision_of_the_same_weights(run):
    result = {"recipe": "knn", "dataset": "d", "metrics": {"top1": 0.5}, "seeds": [0]}
    first = publish_run(run)
    second = publish_run(run, results=[result])
    hub = LocalHub()
    assert first.revision != second.revision
    digests = {hub.resolve(first.name, done.revision).weights_sha256 for done in (first, second)}
    assert len(digests) == 1


def test_the_newest_run_is_published_without_arguments(run, tmp_path):
    with pytest.raises(InputError, match="no run with a checkpoint") as caught:
        publish_run()
    assert "zoo pretrain" in caught.value.fix
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / run.name).symlink_to(run)
    assert newest_run().name == run.name
    assert publish_run().name == "me/swav_tiny"


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(InputError):
        publish_run(tmp_path)
    assert LocalHub().names() == []


def test_a_run_is_named_though_it_is_reached_as_a_dot(run, monkeypatch):
    monkeypatch.chdir(run)
    done = publish_run(".")
    assert json.loads((done.path / "zoo.json").read_text())["lineage"]["run"] == run.name


def test_pull_copies_a_verified_revision(tmp_path):
    done = publish(tag="v1")
    publish(seed=1)
    bundle = LocalHub().pull("me/small", "v1", tmp_path / "deep" / "copy")
    assert bundle.verify(full=True) == "full"
    for file in done.path.iterdir():
        assert (bundle.path / file.name).read_bytes() == file.read_bytes()
    with pytest.raises(InputError, match="exists already"):
        LocalHub().pull("me/small", "v1", tmp_path / "deep" / "copy")
    flip(done.path / "model.safetensors")
    with pytest.raises(InputError, match="SHA-256 differs"):
        LocalHub().pull("me/small", "v1", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_removing_takes_everything():
    hub = LocalHub()
    publish("me/one")
    publish("me/two")
    hub.remove("me/one")
    assert hub.names() == ["me/two"]
    assert not (hub.home / "me" / "one").exists()
    hub.remove("me/two")
    assert list(hub.home.iterdir()) == []
    with pytest.raises(InputError, match="no such model"):
        hub.remove("me/two")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 1}', '{"schema": 1, "tags": 3}', "\xff"])
def test_damaged_references_are_named(content):
    publish()
    file = LocalHub().home / "me" / "small" / "refs.json"
    file.write_bytes(content.encode("latin-1"))
    for use in (lambda: LocalHub().resolve("me/small"), lambda: LocalHub().refs("me/small")):
        with pytest.raises(InputError) as caught:
            use()
        assert caught.value.where == str(file)


# --- a disk that is full or read-only ---


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize(
    "broken",
    ["zoo.tensors.write_safetensors", "zoo.weights.bundle.write_json", "zoo.files.fsync_path"],
)
def test_a_full_disk_leaves_the_old_revision_whole(monkeypatch, broken, number):
    old = publish(seed=0, tag="v1")
    calls = []

    def fail(*args):
        calls.append(args)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(broken, fail)
        with pytest.raises(RunError, match=r"^Publishing failed: ") as caught:
            publish(seed=1)
    assert calls and "ZOO_HOME" in caught.value.fix
    assert caught.value.exit_code == 1
    hub = LocalHub()
    assert hub.refs("me/small") == {"latest": old.revision, "v1": old.revision}
    assert hub.revisions("me/small") == [old.revision]
    assert leftovers(hub) == []
    assert_sound(hub)
    publish(seed=1)


def test_a_disk_that_fills_up_while_the_tags_are_written(monkeypatch):
    old = publish(seed=0)

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("zoo.weights.hubs.local.write_json", fail)
        with pytest.raises(RunError):
            publish(seed=1)
    hub = LocalHub()
    assert hub.refs("me/small") == {"latest": old.revision}
    assert_sound(hub)
    assert not publish(seed=1).new  # the revision was there already; now it is the latest
    assert hub.refs("me/small")["latest"] != old.revision


def test_a_file_that_the_system_refuses_to_write(tmp_path):
    """The real thing: the kernel stops the write of the weights half-way."""
    old = publish(seed=0)
    code = """
        import resource, sys
        sys.path.insert(0, sys.argv[1])
        from weights.published import publish
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            publish(seed=1)
        except Exception as error:
            print(type(error).__name__, error)
    """
    from tiny import TESTS

    out = in_fresh_process(code, TESTS).stdout
    assert out.startswith("RunError Publishing failed: "), out
    hub = LocalHub()
    assert hub.refs("me/small") == {"latest": old.revision}
    assert leftovers(hub) == []
    assert_sound(hub)


# --- two at once, and kill -9 ---


def publish_several(start, seeds):
    start.wait()
    for seed in seeds:
        publish(seed=seed, what=describe(lineage={"run": "r", "step": seed, "total_steps": 9}))


def test_two_publishers_at_once(tmp_path):
    hub = LocalHub()
    old = publish(seed=99, tag="v1")
    fork = multiprocessing.get_context("fork")
    start = fork.Barrier(2)
    writers = [fork.Process(target=publish_several, args=(start, seeds)) for seeds in ([0, 1, 2], [2, 0, 3])]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        hub.resolve("me/small").verify(full=True)  # a reader never meets half a model
        assert hub.names() == ["me/small"]
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert len(hub.revisions("me/small")) == 5
    assert hub.refs("me/small")["v1"] == old.revision
    assert leftovers(hub) == []
    assert_sound(hub)


def large():
    """About 5 MB, so that a kill has something to hit."""
    return {**weights_of(describe()), **{f"x{i}": torch.full((256, 512), float(i)) for i in range(8)}}


def publish_large(step):
    what = describe(lineage={"run": "r", "step": step, "total_steps": 9})
    card = model_card("me/small", what)
    LocalHub().publish("me/small", lambda folder: write_bundle(folder, what, large(), {}, card))


def test_a_publisher_may_be_killed_at_any_moment():
    hub = LocalHub()
    old = publish(seed=0, tag="v1")
    began = time.monotonic()
    publish_large(100)
    takes = time.monotonic() - began
    fork = multiprocessing.get_context("fork")
    moments = random.Random(0)
    killed = 0
    for step in range(20):
        child = fork.Process(target=publish_large, args=(step,))
        child.start()
        time.sleep(takes * moments.uniform(0.05, 1.1))
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        child.join()
        killed += child.exitcode == -signal.SIGKILL
        assert hub.names() == ["me/small"]
        assert hub.resolve("me/small", "v1").path == old.path
        assert_sound(hub)
    assert killed >= 3  # the others were faster than the signal
    publish_large(200)  # the lock is free, and what was left half-written goes
    assert leftovers(hub) == []
    assert_sound(hub)


def test_a_killed_publishers_half_written_tags_are_swept(tmp_path):
    publish(seed=0)
    (LocalHub().home / "me" / "small" / ".refs.json.0123.tmp").write_text("{")
    publish(seed=1)
    assert leftovers(LocalHub()) == []
