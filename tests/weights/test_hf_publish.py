"""``zoo publish REF --to hf:org/name``: one commit, checked before and after, whatever the hub and the network do."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import yaml

import zoo
from zoo.errors import InputError, RunError
from zoo.files import sha256_of
from zoo.pretrain.publish import newest_run, read_run
from zoo.publishing import Plan
from zoo.weights.bundle import SUMS, read_bundle, weights_digest
from zoo.weights.hubs.hf_download import fetch_model

from .hub_server import PAGE, TOKEN, Fault, Repo, serving
from .hub_world import HF, NAME, ONCE, forget, model, send, settle, weights
from .published import assert_clear, command  # noqa: F401

FILES = {
    ".gitattributes", "README.md", SUMS, "config.json", "model.safetensors", "zoo.json",
    "transformers/config.json", "transformers/model.safetensors", "transformers/preprocessor_config.json",
}  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with serving() as hub:
        yield hub


@pytest.fixture
def hub(server, monkeypatch, tmp_path):
    settle(monkeypatch, server, tmp_path)
    yield server
    # Whatever a test did: nobody ever sees a card whose weights aren't there, or weights without a card.
    for repo in server.repos.values():
        for files in repo.commits.values():
            assert ("model.safetensors" in files) == ("README.md" in files)


@pytest.fixture
def local(hub):
    return model()


def assert_published(hub, sha256=None):
    """What a stranger gets is what was to be published."""
    forget()
    bundle = fetch_model(NAME, progress=False)
    bundle.verify(full=True)
    assert bundle.weights_sha256 == (sha256 or weights())
    assert set(hub.repos[NAME].files) == FILES


# --- the plain course ---


def test_publishing_makes_one_commit_and_a_tag(hub, local, command):  # noqa: F811
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


def test_a_second_time_nothing_is_sent(hub, local, command):  # noqa: F811
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


def test_a_dry_run_sends_nothing(hub, local, command):  # noqa: F811
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


def test_a_run_is_published_with_its_lineage_and_results(hub, run, command, monkeypatch, tmp_path):  # noqa: F811
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
def test_permission_is_tested_first(hub, local, may, monkeypatch, command):  # noqa: F811
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


def test_no_permission_to_make_one(hub, local, command):  # noqa: F811
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
def test_an_address_that_is_none(hub, local, to, words, command):  # noqa: F811
    assert_clear(command("publish", local, "--to", to), words)
    assert hub.steps() == []


def test_options_that_don_t_go_together(hub, local, command):  # noqa: F811
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


# --- faults ---

STEPS = [
    "whoami", "info", "create", "preupload", "tree", "yaml", "batch", "put", "verify", "commit", "refs", "tag",
]  # fmt: skip


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        *((step, "500") for step in STEPS),
        *((step, fault) for step in ("create", "put", "commit", "tag") for fault in ("before", "after")),
    ],
)
def test_one_fault_at_any_step_is_got_over(hub, local, step, fault):
    hub.faults = [Fault(step, 500 if fault == "500" else 0, "" if fault == "500" else fault)]
    done = send(tag="v1")
    assert hub.faults[0].times == 0
    assert hub.repos[NAME].tags == {"v1": done.commit} and hub.repos[NAME].head == done.commit
    assert len(hub.repos[NAME].history) == 2, "a commit was made twice"
    assert_published(hub)


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_keeps_failing_is_told_and_the_next_try_goes_on(hub, local, step):
    hub.faults = [Fault(step, 500, times=99)]
    with pytest.raises(RunError) as caught:
        send(tag="v1", patience=ONCE)
    assert "the hub has a problem (it answers 500)" in str(caught.value) and HF in caught.value.where
    assert len(hub.repos.get(NAME, Repo()).history) < (3 if step in ("refs", "tag", "tree") else 2)
    hub.faults = []
    tried = hub.steps().count("put")
    send(tag="v1")
    assert hub.steps().count("put") - (tried if step == "put" else 0) == 2, "a file was sent twice"
    assert_published(hub)


@pytest.mark.parametrize(
    ("step", "status", "words"),
    [
        ("whoami", 401, "doesn't accept your token"),
        ("preupload", 403, "Your token doesn't allow that"),
        ("commit", 403, "Your token doesn't allow that"),
        ("commit", 409, "is doing something else"),
        ("put", 403, "storage refused a file"),
        ("preupload", 429, "asks to wait 3 s"),
        ("commit", 429, "asks to wait 3 s"),
        ("tag", 403, "published, but has no tag v1 yet"),
    ],
)
def test_each_refusal_has_its_line(hub, local, step, status, words):
    hub.faults = [Fault(step, status, times=99, headers={"Retry-After": "3"}, message=f"no, {TOKEN}")]
    with pytest.raises((InputError, RunError)) as caught:
        send(tag="v1", patience=ONCE)
    assert words in str(caught.value) and caught.value.fix
    assert TOKEN not in str(caught.value)
    hub.faults = []
    send(tag="v1")
    assert_published(hub)


@pytest.mark.parametrize("step", ["whoami", "info", "tree", "batch", "commit"])
def test_a_page_where_the_hub_should_answer(hub, local, step):
    assert PAGE
    hub.faults = [Fault(step, kind="page", times=99)]
    with pytest.raises(RunError, match="doesn't answer as a hub does") as caught:
        send(patience=ONCE)
    assert "proxy" in caught.value.fix
    hub.faults = []
    send()
    assert_published(hub)


def test_a_commit_is_cut_while_it_is_read(hub, local):
    hub.faults = [Fault("commit", kind="during")]
    send()
    assert len(hub.repos[NAME].history) == 2
    assert_published(hub)


def test_a_commit_whose_answer_is_lost_is_not_made_twice(hub, local):
    hub.faults = [Fault("commit", kind="after")]
    done = send(patience=ONCE)
    assert done.commit == hub.repos[NAME].head and len(hub.repos[NAME].history) == 2


def test_somebody_else_publishes_meanwhile(hub, local):
    send()
    model(1)

    def other(repo):
        hub.on_commit = None
        repo.add({**repo.files, "README.md": b"---\nlicense: mit\n---\ntheirs"})

    hub.on_commit = other
    with pytest.raises(RunError, match="Somebody else published meanwhile"):
        send()
    assert hub.repos[NAME].files["README.md"].endswith(b"theirs")
    send()
    assert_published(hub)


def test_of_two_publishers_one_wins_and_nothing_is_mixed(hub, local):
    """Both have looked at the same head before either commits."""
    send()
    models = [model(seed) for seed in (1, 2)]
    both, outcomes = threading.Barrier(2), []
    hub.on_commit = lambda repo: both.wait(60)

    def race(reference):
        try:
            outcomes.append((reference, send(reference).commit))
        except RunError as error:
            outcomes.append((reference, error))

    threads = [threading.Thread(target=race, args=(reference,)) for reference in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hub.on_commit = None
    won = [reference for reference, outcome in outcomes if isinstance(outcome, str)]
    lost = [outcome for _, outcome in outcomes if isinstance(outcome, RunError)]
    assert len(won) == len(lost) == 1 and "Somebody else" in str(lost[0])
    assert_published(hub, read_bundle(Path(won[0])).weights_sha256)


def test_a_hub_that_stored_something_else_is_caught(hub, local):
    hub.hashes = False
    try:
        repo_of = hub.commit

        def garble(asked, name, revision):
            done = repo_of(asked, name, revision)
            files = hub.repos[name].files
            files["model.safetensors"] = files["model.safetensors"][:-1] + b"?"
            return done

        hub.commit = garble
        with pytest.raises(RunError, match=r"doesn't hold what was sent: model\.safetensors"):
            send(tag="v1")
        assert hub.repos[NAME].tags == {}
    finally:
        del hub.commit
        hub.hashes = True
    send(tag="v1")
    assert_published(hub)


def test_a_slow_hub_is_waited_for_and_not_for_ever(hub, local):
    hub.faults = [Fault("commit", kind="slow", seconds=0.4)]
    send()
    model(1)
    hub.faults = [Fault("whoami", kind="slow", seconds=5.0, times=9)]
    with pytest.raises(RunError, match="nothing came for too long"):
        send(patience=ONCE._replace(timeout=0.2))


def test_a_hub_with_another_storage_sees_no_token_there(hub, local):
    hub.verify_at = hub.storage  # even where the hub itself names the address
    send()
    forget()
    fetch_model(NAME, progress=False)
    assert {host for _, _, host, _ in hub.log} == {f"127.0.0.1:{hub.port}", f"localhost:{hub.port}"}
    assert hub.leaks() == []


def test_a_hub_without_xet(hub, local, monkeypatch):
    """The client would send by Xet; for other hubs than the public one it is told not to."""
    from huggingface_hub import constants

    send()
    assert constants.HF_HUB_DISABLE_XET is False, "other users of the client in this process keep Xet"
    model(1)
    monkeypatch.setattr("zoo.weights.hubs.hf_client._PUBLIC", hub.endpoint)
    with pytest.raises(RunError, match="doesn't speak Xet") as caught:
        send(patience=ONCE)
    assert "HF_HUB_DISABLE_XET=1" in caught.value.fix
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    assert send().new


def test_a_clock_that_is_wrong(hub, local):
    from zoo.weights.hubs.hf_refused import Refused, classified, hub_httpx

    with pytest.raises(Refused, match="clock"), classified(None):
        raise hub_httpx().ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate is not yet valid")
    hub.faults = [Fault("put", 403, message="RequestTimeTooSkewed", times=9)]
    with pytest.raises(RunError, match="RequestTimeTooSkewed") as caught:
        send(patience=ONCE)
    assert "clock" in caught.value.fix


def test_publishing_where_the_network_is_forbidden(hub, local, monkeypatch):
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    with pytest.raises(InputError, match="ZOO_OFFLINE forbids it"):
        send()
    assert hub.steps() == []


def test_publishing_over_plain_http_to_another_machine(hub, local, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.example.org")
    with pytest.raises(InputError, match="not sent over plain http") as caught:
        send()
    assert "ZOO_TOKEN_OVER_HTTP=1" in caught.value.fix and TOKEN not in str(caught.value)


def test_a_full_disk_here(hub, local, monkeypatch, tmp_path):
    import errno
    import os

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("zoo.publishing.write_json", full)
    with pytest.raises(RunError, match="No space left"):
        send()
    assert hub.steps() == [] and list((tmp_path / "cache" / "publishing").iterdir()) == []


def test_the_token_is_written_nowhere(hub, local, command, tmp_path):  # noqa: F811
    said = "".join(map(str, command("publish", local, "--to", HF, "--tag", "v1")))
    hub.faults = [Fault("commit", 403, message=f"no {TOKEN}", times=9)]
    model(1)
    said += "".join(map(str, command("--debug", "publish", local, "--to", HF)))
    hub.faults = []
    said += "".join(map(str, command("pull", HF)))
    assert TOKEN not in said
    held = [path for path in tmp_path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert held == []
    assert not any(TOKEN.encode() in content for content in hub.stored.values())
    for files in hub.repos[NAME].commits.values():
        assert not any(TOKEN.encode() in content for content in files.values())


def test_publishing_leaves_nothing_in_the_cache(hub, local, tmp_path):
    send()
    hub.faults = [Fault("commit", 403, times=9)]
    model(1)
    with pytest.raises(InputError):
        send()
    assert list((tmp_path / "cache" / "publishing").iterdir()) == []
