"""Which process this is: the environments of torchrun, srun and old launchers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from zoo.engine.collectives import WorldOfOne
from zoo.engine.world import open_world, slurm_environment, strip_local_rank
from zoo.errors import InputError, RunError

from .world import NAMES

CPU = torch.device("cpu")
TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def _nobody_started_us(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [*NAMES, "ZOO_TIMEOUT_S", *(name for name in os.environ if name.startswith("SLURM_"))]:
        # Set first, so that what the tested code itself puts there is undone as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield


def given(monkeypatch: pytest.MonkeyPatch, **environment: str) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "environment",
    [{}, {"WORLD_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "1"}, {"MASTER_ADDR": "x"}, {"WORLD_SIZE": ""}],
)
def test_one_process_needs_nothing(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    given(monkeypatch, **environment)
    with open_world(CPU) as world:
        assert isinstance(world, WorldOfOne)
        assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("dropped", "device", "missing"),
    [
        (["WORLD_SIZE"], "cpu", "WORLD_SIZE is missing"),
        (["RANK"], "cpu", "RANK is missing"),
        (["MASTER_ADDR", "MASTER_PORT"], "cpu", "MASTER_ADDR, MASTER_PORT are missing"),
        (["WORLD_SIZE", "LOCAL_RANK"], "cuda", "WORLD_SIZE, LOCAL_RANK are missing"),
    ],
)
def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, dropped: list[str], device: str, missing: str
) -> None:
    given(monkeypatch, **{name: value for name, value in TWO.items() if name not in dropped})
    with pytest.raises(InputError, match=f": {missing}"), open_world(torch.device(device)):
        pass
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "2", "Process number 2 .* one of 2"),
        ("WORLD_SIZE", "two", "WORLD_SIZE must be a whole number, not 'two'"),
        ("MASTER_PORT", "-1", "MASTER_PORT must be"),
        ("ZOO_TIMEOUT_S", "0", "ZOO_TIMEOUT_S must be a number of seconds above 0"),
        ("ZOO_TIMEOUT_S", "soon", "not 'soon'"),
        ("ZOO_TIMEOUT_S", "nan", "not 'nan'"),
    ],
)
def test_impossible_values(monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str) -> None:
    given(monkeypatch, **{**TWO, name: value})
    with pytest.raises(InputError, match=message), open_world(CPU):
        pass


def test_processes_that_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # taken, but nobody listens
        port = str(server.getsockname()[1])
        given(monkeypatch, **{**TWO, "RANK": "1", "MASTER_PORT": port, "ZOO_TIMEOUT_S": "0.5"})
        with (
            pytest.raises(RunError, match="The 2 processes did not find one another") as caught,
            open_world(CPU),
        ):
            pass
    assert caught.value.where == f"127.0.0.1:{port}"
    assert "GLOO_SOCKET_IFNAME" in (caught.value.fix or "")
    assert not dist.is_initialized()


def test_the_command_line_can_ask_without_torch() -> None:
    code = "import sys, zoo.engine.launch, zoo.engine.world; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "node[01-02,07]",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}


def test_srun_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, **SRUN)
    found = slurm_environment()
    port = int(found.pop("MASTER_PORT"))
    assert found == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node01"}
    assert 1024 < port < 32768
    given(monkeypatch, SLURM_PROCID="6", SLURM_LOCALID="0")
    assert slurm_environment()["MASTER_PORT"] == str(port)
    given(monkeypatch, SLURM_STEP_ID="1")
    assert slurm_environment()["MASTER_PORT"] != str(port)
    given(monkeypatch, MASTER_ADDR="10.0.0.1", MASTER_PORT="77")
    assert slurm_environment() == {
        "RANK": "6",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "77",
    }


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("alone", "alone"),
        ("node[01-04,07]", "node01"),
        ("gpu-[3,5-8],cpu1", "gpu-3"),
        ("a1,b[2-3]", "a1"),
        ("rack[1-2]n[08-16]-ib", "rack1n08-ib"),
        ("n[7].example.org", "n7.example.org"),
    ],
)
def test_first_host_of_a_node_list(monkeypatch: pytest.MonkeyPatch, nodes: str, first: str) -> None:
    given(monkeypatch, **{**SRUN, "SLURM_STEP_NODELIST": nodes})
    assert slurm_environment()["MASTER_ADDR"] == first


def test_a_batch_script_or_a_lone_task_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, **SRUN)
    given(monkeypatch, SLURM_NTASKS="1", SLURM_PROCID="0")
    assert slurm_environment() == {}
    given(monkeypatch, SLURM_NTASKS="8")
    monkeypatch.delenv("SLURM_STEP_NODELIST")
    assert slurm_environment() == {}
    with open_world(CPU) as world:
        assert world.world_size == 1


def test_torchrun_inside_slurm_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, **SRUN)
    given(monkeypatch, RANK="0", WORLD_SIZE="1")
    with open_world(CPU) as world:
        assert world.world_size == 1


def test_srun_completes_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, **{**SRUN, "SLURM_STEP_NODELIST": "127.0.0.1"}, ZOO_TIMEOUT_S="0.2")
    with pytest.raises(RunError, match="this is number 5") as caught, open_world(CPU):
        pass
    assert (caught.value.where or "").startswith("127.0.0.1:")
    assert os.environ["RANK"] == "5"


@pytest.mark.parametrize(
    ("words", "rest", "rank"),
    [
        (["pretrain", "--local-rank=3", "--seed", "1"], ["pretrain", "--seed", "1"], 3),
        (["pretrain", "--local_rank=0"], ["pretrain"], 0),
        (["--local_rank", "2", "pretrain"], ["pretrain"], 2),
        (
            ["pretrain", "--local-ranks=3", "local_rank=1"],
            ["pretrain", "--local-ranks=3", "local_rank=1"],
            None,
        ),
        ([], [], None),
    ],
)
def test_both_spellings_of_the_local_rank(words: list[str], rest: list[str], rank: int | None) -> None:
    before = list(words)
    assert strip_local_rank(words) == (rest, rank)
    assert words == before
    assert os.environ.get("LOCAL_RANK") == (None if rank is None else str(rank))


def test_the_environment_wins_over_the_word(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, LOCAL_RANK="1")
    assert strip_local_rank(["--local-rank=3"]) == ([], 3)
    assert os.environ["LOCAL_RANK"] == "1"


@pytest.mark.parametrize("words", [["--local-rank=x"], ["--local_rank"], ["--local-rank=-1"]])
def test_a_local_rank_that_is_no_number(words: list[str]) -> None:
    with pytest.raises(InputError, match="must be a whole number"):
        strip_local_rank(words)
