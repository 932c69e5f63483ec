"""``zoo publish REF --to hf:org/name``: one commit, checked before and after; permissions, names and tags."""

from __future__ import annotations

import json

import pytest
import yaml

import zoo
from zoo.errors import InputError
from zoo.files import sha256_of
from zoo.pretrain.publish import newest_run, read_run
from zoo.publishing import Plan
from zoo.weights.bundle import SUMS, weights_digest
from zoo.weights.hubs.hf_download import fetch_model

from .hub_state import TOKEN, Fault, Repo
from .hub_world import FILES, HF, NAME, assert_published, model, send
from .published import assert_clear

# --- the plain course ---


def test_publishing_makes_one_commit_and_a_tag(hub, local, command):
    code, out, err = command("publish", local, "--to", HF, "--tag", "v1")
    assert code == 0, err
    repo = hub.repos[NAME]
    assert f"published {HF}@{repo.head} as v1" in out and f'zoo.load("{HF}@v1")' in out
    assert repo.tags == {"v1": repo.head}
    assert hub.steps().count("commit") == 1 and len(repo.history) == 2
    assert not repo.private
    assert_published(hub)
    steps = [step for step in hub.steps() if step]
    assert steps.index("whoami") < steps.index("preupload") < steps.index("put") < steps.index("commit")
    assert steps.index("commit") < steps.index("tag")


def test_a_second_time_nothing_is_sent(hub, local, command):
    done = send(tag="v1")
    hub.received = 0
    again = send(tag="v1")
    assert (again.commit, again.new, again.plan.send) == (done.commit, False, [])
    assert hub.received < 2000 and len(hub.repos[NAME].history) == 2
    code, out, _ = command("publish", local, "--to", HF, "--json")
    assert code == 0 and json.loads(out)["commit"] == done.commit


def test_only_what_changed_is_sent(hub, local):
    send()
    hub.received = 0
    done = send(licence="apache-2.0")
    assert set(done.plan.send) == {"README.md", "zoo.json", SUMS}
    assert hub.received < 20_000
    assert fetch_model(NAME, progress=False).info["licence"] == "apache-2.0"


def test_stale_files_go_and_files_of_others_stay(hub, local):
    send()
    repo = hub.repos[NAME]
    repo.add({**repo.files, "heads.safetensors": b"x", "transformers/old.json": b"{}", "LICENSE": b"L"})
    done = send()
    assert sorted(done.plan.drop) == ["heads.safetensors", "transformers/old.json"]
    assert "LICENSE" in done.plan.kept
    assert set(repo.files) == FILES | {"LICENSE"}


def test_a_dry_run_sends_nothing(hub, local, command):
    code, out, err = command("publish", local, "--to", HF, "--dry-run")
    assert code == 0, err
    assert "nothing was sent" in out and "would be made" in out
    assert hub.repos == {} and not {"create", "put", "commit"} & set(hub.steps())
    send()
    model(1)
    plan = send(dry_run=True, force=True)
    assert isinstance(plan, Plan) and "model.safetensors" in plan.send and plan.exists
    assert len(hub.repos[NAME].history) == 2
    with pytest.raises(InputError, match="needs a licence"):
        send(model(2, "unspecified"), dry_run=True)


def test_a_private_repository_is_made_and_a_public_one_is_not_used_for_it(hub, local):
    send(private=True)
    assert hub.repos[NAME].private
    send(private=True)
    hub.repos[NAME].private = False
    before = len(hub.repos[NAME].history)
    model(1)
    with pytest.raises(InputError, match="is public"):
        send(private=True)
    assert len(hub.repos[NAME].history) == before


def test_a_run_is_published_with_its_lineage_and_results(hub, run, command, monkeypatch, tmp_path):
    monkeypatch.setenv("ZOO_RUNS", str(run.parent))
    assert newest_run() == run
    code, _, err = command("publish", run, "--to", HF)
    assert_clear((code, "", err), "licence", "--licence")
    assert hub.repos == {} and hub.steps() == []
    monkeypatch.setenv("ZOO_RESULTS", str(tmp_path / "results"))
    result = {
        "schema": 1, "recipe": "knn", "dataset": "photos", "metrics": {"top1": 61.5}, "protocol": {"k": 20},
        "model": f"run:{run}", "weights_sha256": weights_digest(read_run(run)[1]), "created": "2026",
    }  # fmt: skip
    (tmp_path / "results" / "one").mkdir(parents=True)
    (tmp_path / "results" / "one" / "result.json").write_text(json.dumps(result))
    code, _, err = command("publish", run, "--to", HF, "--licence", "mit", "--with-results")
    assert code == 0, err
    card = hub.repos[NAME].files["README.md"].decode()
    assert "## Lineage" in card and f"- run: {run.name}" in card
    index = yaml.safe_load(card.split("---\n")[1])["model-index"][0]["results"]
    assert [(row["dataset"]["config"], row["metrics"][0]["value"]) for row in index] == [("knn", 61.5)]
    assert not [path for path in run.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    zoo.load(HF, progress=False)


def test_somebody_elses_weights_are_converted_first(hub, tmp_path):
    from safetensors.torch import save_file

    from .published import describe, weights_of

    save_file(weights_of(describe()), tmp_path / "theirs.safetensors")
    send(str(tmp_path / "theirs.safetensors"), licence="mit")
    lineage = json.loads(hub.repos[NAME].files["zoo.json"])["lineage"]
    assert lineage["converted_from"]["sha256"] == sha256_of(tmp_path / "theirs.safetensors")


def test_large_files_in_parts(hub, local):
    hub.chunk = 200_000
    send()
    assert hub.steps().count("part") > 4
    assert_published(hub)


# --- permissions, names, tags ---


def test_a_repository_that_one_may_write_but_not_make_is_fine(hub, local):  # case 46
    send()
    hub.creators = set()
    model(1)
    hub.log.clear()
    assert send().new
    assert "create" not in hub.steps()
    # Even where reading what is there is not allowed.
    del hub.repos[NAME]
    hub.repos[NAME] = Repo()
    hub.repos[NAME].add({})
    hub.faults = [Fault("info", 404, code="RepoNotFound")]
    assert send().new


@pytest.mark.parametrize("may", ["nothing", "read", "write"])
def test_permission_is_tested_first(hub, local, may, monkeypatch, command):
    if may == "nothing":
        monkeypatch.delenv("HF_TOKEN")
        answer = command("publish", local, "--to", HF)
        assert_clear(answer, "needs a token", "hf auth login")
        assert hub.steps() == []
        return
    hub.repos[NAME] = Repo()
    hub.repos[NAME].add({})
    hub.writers = {}
    hub.readers = {TOKEN} if may == "read" else set()
    words = "Your token doesn't allow that" if may == "read" else "doesn't accept your token"
    assert_clear(command("publish", local, "--to", HF), words)
    assert not {"batch", "put", "commit"} & set(hub.steps())


def test_no_permission_to_make_one(hub, local, command):
    hub.creators = set()
    assert_clear(command("publish", local, "--to", HF), "Your token doesn't allow that", "namespace", NAME)
    hub.writers, hub.readers = {}, {TOKEN}
    words = ("Your token doesn't allow that", "reading only")
    assert_clear(command("publish", local, "--to", HF, "--dry-run"), *words)
    assert hub.repos == {}


@pytest.mark.parametrize(
    ("to", "words"),
    [
        ("me/small", "--to hf:me/small"),
        ("/tmp/x/me/small", "--to hf:org/name; for a folder --to file:///tmp/x/me/small"),
        ("hf:./folder", "This is a path"),
        ("hf:/tmp/x", "This is a path"),
        ("hf:small", "org/name"),
        ("hf:me/a--b", "'--'"),
        ("hf:me/x.git", ".git"),
        ("hf:me/x@v1", "--tag"),
        ("hg:me/x", "no address to publish to"),
    ],
)
def test_an_address_that_is_none(hub, local, to, words, command):
    assert_clear(command("publish", local, "--to", to), words)
    assert hub.steps() == []


def test_options_that_don_t_go_together(hub, local, command):
    assert_clear(command("publish", local, "--to", HF, "--name", "a/b"), "--name")
    assert_clear(command("publish", local, "--private"), "--private")
    assert_clear(command("publish", local, "--dry-run"), "--dry-run")


def test_a_tag_doesn_t_move_unless_forced(hub, local):
    first = send(tag="v1").commit
    model(1)
    with pytest.raises(InputError, match="names another model already"):
        send(tag="v1")
    assert hub.repos[NAME].head == first  # found out before anything was sent
    done = send(tag="v1", force=True)
    assert hub.repos[NAME].tags == {"v1": done.commit} and done.commit != first
    for tag in ("main", "latest", "a b", "../x", "0" * 40, ""):
        with pytest.raises(InputError, match="A tag is"):
            send(tag=tag)


def test_another_libraries_repository_is_not_overwritten(hub, local):
    hub.repos[NAME] = Repo()
    hub.repos[NAME].add({"pytorch_model.bin": b"x", "config.json": b"{}"})
    with pytest.raises(InputError, match="wasn't published by this toolkit"):
        send()
    send(force=True)
    assert "pytorch_model.bin" not in hub.repos[NAME].files
