"""Stopping: which exit code a signal gives, and when Ctrl-C ends at once."""

from __future__ import annotations

import signal

import pytest

from zoo.engine.signals import StopRequest
from zoo.errors import EXIT_INTERRUPTED, EXIT_SAVED


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ([signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1], EXIT_SAVED),
        ([signal.SIGTERM, signal.SIGINT], EXIT_INTERRUPTED),
        ([signal.SIGINT, signal.SIGTERM], EXIT_SAVED),
    ],
)
def test_signals_ask_for_a_stop(numbers, code):
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        for number in numbers:
            signal.raise_signal(number)
        assert stop.exit_code == code
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_ctrl_c_ends_at_once_whatever_came_in_between():
    with pytest.raises(KeyboardInterrupt), StopRequest():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it should have ended")
