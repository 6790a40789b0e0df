"""Ctrl-C is answered once and then does what it did before."""

import asyncio
import signal
import threading

import pytest

from stretto.run.interrupt import HEARD, interrupt_answered


def test_the_first_press_is_answered_and_cancels_and_the_second_interrupts_at_once(capfd):
    reached = []

    async def busy():
        with interrupt_answered():
            signal.raise_signal(signal.SIGINT)
            reached.append("went on")
            signal.raise_signal(signal.SIGINT)
            reached.append("too far")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(busy())
    assert reached == ["went on"]
    assert capfd.readouterr().err == HEARD.decode()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_a_press_nothing_is_said_and_the_handler_is_as_before(capfd):
    async def calm():
        before = signal.getsignal(signal.SIGINT)
        with interrupt_answered():
            await asyncio.sleep(0)
        assert signal.getsignal(signal.SIGINT) is before

    asyncio.run(calm())
    assert capfd.readouterr().err == ""


def test_a_thread_that_gets_no_signals_is_left_alone():
    seen = []

    def elsewhere():
        with interrupt_answered():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
