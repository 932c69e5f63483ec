"""Two machines, each with an agent of torchrun's: network namespaces where they may be made, else two addresses."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tiny import ROOT, StopAfter, assert_same_state, go_on, trace, train
from zoo.engine import world
from zoo.pretrain.rundir import RunFolder

from .training import PAIR, STEPS, environment, images_of, pair, steps_of, wait_until, words


@dataclass(frozen=True)
class Host:
    """What starts a command on it, its address, and the network that gloo must use."""

    address: str
    network: str
    start: list[str] = field(default_factory=list)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    name = f"zoo{os.getpid()}"
    made = [f"{name}{side}" for side in "ab"]
    try:
        yield _namespaces(made)
    except (OSError, subprocess.CalledProcessError):  # no rights, or no such thing here
        yield [Host("127.0.0.1", "lo"), Host("127.0.0.2", "lo")]
    finally:
        for host in made:
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "delete", host], capture_output=True, check=False)


def _namespaces(names: list[str]) -> list[Host]:
    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    for name in names:
        ip("netns", "add", name)
    one, other = (f"v{name}" for name in names)
    ip("link", "add", one, "netns", names[0], "type", "veth", "peer", "name", other, "netns", names[1])
    hosts = []
    for number, (name, network) in enumerate(zip(names, (one, other), strict=True), 1):
        ip("-n", name, "address", "add", f"10.213.7.{number}/24", "dev", network)
        for device in ("lo", network):
            ip("-n", name, "link", "set", device, "up")
        subprocess.run(["ip", "netns", "exec", name, "true"], check=True, capture_output=True)
        hosts.append(Host(f"10.213.7.{number}", network, ["ip", "netns", "exec", name]))
    return hosts


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def agents(hosts: list[Host], restarts: int, command: list[str], logs: Path) -> list[subprocess.Popen[bytes]]:
    """An agent on each host; they meet on the first one."""
    port, launch = free_port(), uuid.uuid4().hex
    started = []
    for number, host in enumerate(hosts):
        options = {
            "nnodes": len(hosts),
            "nproc-per-node": 1,
            "max-restarts": restarts,
            "monitor-interval": 0.1,
            "rdzv-backend": "c10d",
            "rdzv-id": launch,
            "rdzv-endpoint": f"{hosts[0].address}:{port}",
            "rdzv-conf": f"is_host={number == 0}",
            "local-addr": host.address,
        }
        agent = [sys.executable, "-m", "torch.distributed.run", *(f"--{k}={v}" for k, v in options.items())]
        with open(logs / f"host{number}.log", "wb") as log:
            given = environment(GLOO_SOCKET_IFNAME=host.network)
            whole = [*host.start, *agent, "-m", "_zoo_entry", *command]
            started.append(subprocess.Popen(whole, cwd=ROOT, env=given, stdout=log, stderr=log))
    return started


def worker(agent: int) -> int:
    """The process that an agent has started (``ip netns exec`` becomes the agent itself)."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == agent and b"\0RANK=" in b"\0" + (entry / "environ").read_bytes():
                return int(entry.name)
    pytest.fail("the agent has no process")


def ended(started: list[subprocess.Popen[bytes]]) -> list[int]:
    """The agents' exit codes; none of them is left behind."""
    try:
        return [agent.wait(240) for agent in started]
    finally:
        for agent in started:
            agent.kill()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes as Linux shows them")
def test_a_process_killed_on_one_of_two_machines(
    hosts: list[Host], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    out, logs = tmp_path / "run", [tmp_path / "host0.log", tmp_path / "host1.log"]
    started = agents(hosts, 1, words(images_of(tmp_path_factory), out), tmp_path)
    try:
        wait_until(lambda: steps_of(out) > 7, started[0], *logs)
        os.kill(worker(started[1].pid), signal.SIGKILL)
    finally:
        codes = ended(started)
    said = "".join(log.read_text("utf-8") for log in logs)
    assert codes == [0, 0], said
    assert "going on with" in said
    (resumed,) = RunFolder(out).read()["resumed"]
    assert resumed["step"] in range(3, STEPS, 3)
    undisturbed = pair(tmp_path_factory)
    assert trace(out) == trace(undisturbed)
    assert_same_state(out, undisturbed)


def test_a_new_start_knows_nothing_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agents' store outlives the processes; in it are the addresses of dead ones."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    places = [world._Place(rank, 3, 0, "here", timedelta(seconds=30)) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            server.set("zoo/call/1", "one that called and was killed before it was answered")
            late = pool.submit(world._own_corner, places[1])
            time.sleep(0.05)
            others = [pool.submit(world._own_corner, place) for place in (places[0], places[2])]
            corners = [corner.result(60) for corner in (late, *others)]
            assert [corner.check(["address"]) for corner in corners] == [False] * 3
            corners[0].set("address", "mine")
            assert [corner.get("address") for corner in corners] == [b"mine"] * 3
    alone = replace(places[0], timeout=timedelta(seconds=0.2))
    with pytest.raises(RuntimeError, match="2 of the others did not come"):
        world._own_corner(alone)


def by_hand(command: list[str], restarts: tuple[int, int]) -> tuple[list[int], str]:
    """Two processes that were restarted so often: their exit codes and what they said."""
    port = str(free_port())
    started = []
    for rank, count in enumerate(restarts):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": port}
        given = environment(**place, MASTER_ADDR="127.0.0.1", TORCHELASTIC_RESTART_COUNT=str(count))
        whole = [sys.executable, "-m", "_zoo_entry", *command]
        started.append(
            subprocess.Popen(
                whole, cwd=ROOT, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        said = "".join(process.communicate(timeout=240)[0] for process in started)
    finally:
        for process in started:
            process.kill()
    return [process.returncode for process in started], said


def test_a_restart_that_only_one_machine_counted(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, out = images_of(tmp_path_factory), tmp_path / "run"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert train(images, out, callbacks=(StopAfter(4),), **PAIR).exit_code == 75
    assert RunFolder(out).read()["stopped"] == 75
    asked_to_stop = tmp_path / "stopped"
    shutil.copytree(out, asked_to_stop)

    # After a stop that was asked for, torchrun may start as often as it likes: nothing is trained.
    codes, said = by_hand(words(images, asked_to_stop), (0, 1))
    assert codes == [75, 75], said
    assert f"--resume {asked_to_stop}" in said
    assert steps_of(asked_to_stop) == 4
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    assert go_on(asked_to_stop, epochs=2).step == 6
    assert "stopped" not in RunFolder(asked_to_stop).read()

    info: dict[str, Any] = RunFolder(out).read()
    del info["stopped"]  # as if it had been killed
    RunFolder(out).write_info(info)
    codes, said = by_hand(words(images, out), (0, 1))
    assert codes == [0, 0], said
    assert steps_of(out) == STEPS
