"""How long a run takes on machines that one may not have, and what failures cost it. No torch here.

A model, not a measurement. A step is computing (operations over the share of a device's peak that training
reaches, or measured images a second) and what the exchanges between processes add to it. What is assumed is
said where it is used; reading images is in measured figures and in the paper's, not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InputError, did_you_mean

if TYPE_CHECKING:  # it imports torch
    from .costs import Exchange

__all__ = ["DEVICES", "Communication", "DeviceKind", "Failures", "communication", "device_kind", "lost_work"]

_GIGA = 2**30
_HALF_TYPES = ("bfloat16", "float16")
_PER_MACHINE = 8  # devices
# Seconds of an exchange whatever its length: to begin, and for each step to a device of the same machine and to
# another machine, in a ring and in a tree. NCCL's own figures for short messages (src/graph/tuning.cc).
_START, _HOP, _RING_HOP, _TREE_HOP = 7e-6, 0.6e-6, 2.7e-6, 5e-6
# The gradients that DDP sends last can't hide behind the backward pass.
_BUCKET = 25 * 2**20
_BACKWARD = 2 / 3  # of a step's computing


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device.

    Args:
        name: what it is called after ``--device-kind``.
        memory: bytes.
        link: bytes a second that a device sends to the others of its machine (NVLink, one direction).
        half: operations a second of its matrix units in half types, as its maker says.
        half_share: the part of it that training a ResNet reaches; assumed.
        single: the same in float32 (TF32 where convolutions use it).
        single_share: and its part.
    """

    name: str
    memory: int
    link: float
    half: float
    half_share: float
    single: float
    single_share: float

    def speed(self, precision: str) -> tuple[float, float] | None:
        """(peak, share) in a precision; None where nothing is known."""
        if precision in _HALF_TYPES:
            return self.half, self.half_share
        return (self.single, self.single_share) if precision == "float32" else None


# Peaks are the makers' (dense). The shares of the V100 are what two published runs come to by this model:
# SwAV's 100 epochs of 2x224+6x96 in 6 h 15 on 64 (table 4), and MoCo v2's 200 epochs in 53 h on 8, in float32.
# They are 0.23 and 0.61 of what NVIDIA's own ResNet-50 reaches on a V100 (DeepLearningExamples, 2021: 1,200 and
# 367 images a second, so 24 % and 57 %). For the A100 the same parts of NVIDIA's 2,470 and 938 images a second
# are taken, for the H100 and the H200 twice the A100's speed. A well tuned program is up to four times as fast.
DEVICES = {
    kind.name: kind
    for kind in (
        DeviceKind("v100", 16 * _GIGA, 150e9, 125e12, 0.0551, 15.7e12, 0.350),
        DeviceKind("v100-32gb", 32 * _GIGA, 150e9, 125e12, 0.0551, 15.7e12, 0.350),
        DeviceKind("a100", 40 * _GIGA, 300e9, 312e12, 0.0455, 156e12, 0.090),
        DeviceKind("a100-80gb", 80 * _GIGA, 300e9, 312e12, 0.0455, 156e12, 0.090),
        DeviceKind("h100", 80 * _GIGA, 450e9, 989e12, 0.0286, 494e12, 0.057),
        DeviceKind("h200", 141 * _GIGA, 450e9, 989e12, 0.0286, 494e12, 0.057),
    )
}


def device_kind(name: str) -> DeviceKind:
    """A known kind of device.

    Raises:
        InputError: an unknown one, with the nearest name.
    """
    if name not in DEVICES:
        raise InputError(
            "There is no device kind of this name.",
            where=f"--device-kind {name}",
            fix=did_you_mean(name, DEVICES)
            + f"Known: {', '.join(DEVICES)}, cpu; for any other give --img-s, the images a second of one device",
        )
    return DEVICES[name]


@dataclass(frozen=True)
class Communication:
    """What a step's exchanges take: ``seconds`` of the network, of which ``exposed`` lengthen the step.

    ``sent`` is the bytes that each process sends.
    """

    sent: float
    seconds: float
    exposed: float


def communication(
    exchanges: Iterable[Exchange], devices: int, link: float, network: float, computing: float
) -> Communication:
    """The exchanges of a step between ``devices``, in machines of eight.

    A reduction sends 2 (N - 1) / N of its bytes from each process, a gathering N - 1 times its own. A short
    reduction goes up and down a tree of machines, a gathering round a ring. Gradients travel during the backward
    pass, all but the last; everything else is waited for.

    Args:
        exchanges: of one process.
        devices: N.
        link: bytes a second between the devices of a machine.
        network: bytes a second between machines.
        computing: seconds of a step's forward and backward pass.
    """
    if devices == 1:
        return Communication(0.0, 0.0, 0.0)
    speed = link if devices <= _PER_MACHINE else min(link, network)
    machines = math.ceil(devices / _PER_MACHINE)
    outside = machines if machines > 1 else 0
    round_ring = (devices - 1 - outside) * _HOP + outside * _RING_HOP
    through_tree = 2 * ((min(devices, _PER_MACHINE) - 1) * _HOP + math.log2(machines) * _TREE_HOP)
    sent = seconds = exposed = 0.0
    for exchange in exchanges:
        if exchange.kind == "gather":
            volume, delay = 1.0 * (devices - 1) * exchange.payload, round_ring
        else:
            volume, delay = 2 * (devices - 1) / devices * exchange.payload, through_tree
        took = volume / speed + _START + delay
        sent, seconds = sent + volume, seconds + took
        if exchange.of == "gradients":
            last = took * min(1.0, _BUCKET / max(1, exchange.payload))
            took = max(took - _BACKWARD * computing, last)
        exposed += took
    return Communication(sent, seconds, exposed)


@dataclass(frozen=True)
class Failures:
    """What failures cost: shares are of all time.

    Args:
        between: seconds between two failures of any device.
        lost: work that is done again, and restarts.
        saving: waiting for checkpoints.
        best_interval: seconds between checkpoints for which ``lost`` and ``saving`` are least together.
    """

    between: float
    lost: float
    saving: float
    best_interval: float


def lost_work(devices: int, a_day: float, interval: float, restart: float, save: float) -> Failures:
    """The work that failures are expected to cost; half an interval and a restart each.

    Sources: Young 1974, Daly 2006 for the best interval, sqrt(2 x save x time between failures).

    Args:
        devices: each of which fails alone, and stops all.
        a_day: failures of a device.
        interval: seconds between two checkpoints.
        restart: seconds from a failure until the run goes on.
        save: seconds that training waits for a checkpoint.
    """
    between = 86400 / (a_day * devices) if a_day else math.inf
    lost = min(1.0, (interval / 2 + restart) / between)
    return Failures(between, lost, save / interval if interval else 0.0, math.sqrt(2 * save * between))
