"""Ctrl-C is answered once and then does what it did before."""

import asyncio
import signal
import subprocess
import sys
import threading

import pytest

from stretto.runtime.interrupt import HEARD, TOLD, StopRequest, interrupt_answered, stop_if_interrupted, unbroken


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


def test_a_second_press_while_what_runs_is_finished_leaves_no_handler_behind(capfd):
    async def busy():
        with interrupt_answered():
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(busy())
    assert capfd.readouterr().err == HEARD.decode()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_that_end_a_process_do_what_the_key_does_and_any_second_one_stops_at_once(number, capfd):
    reached, request = [], StopRequest()

    async def busy():
        with interrupt_answered(request):
            signal.raise_signal(number)
            reached.append("went on")
            assert asyncio.current_task().cancelling()
            signal.raise_signal(signal.SIGINT if number == signal.SIGHUP else number)
            reached.append("too far")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(busy())
    assert reached == ["went on"]
    assert (request.why, request.exit_code, request.at_once) == (number.name, 128 + number, True)
    assert capfd.readouterr().err == TOLD.format(number.name)
    assert signal.getsignal(number) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_was_ignored_or_is_handled_by_others_stays_so(capfd):
    heard = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.signal(signal.SIGTERM, lambda *_: heard.append(1))

    async def busy():
        with interrupt_answered():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
            stop_if_interrupted()

    try:
        asyncio.run(busy())
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for number, handler in zip((signal.SIGHUP, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
    assert (heard, capfd.readouterr().err) == ([1], "")


def test_where_ctrl_c_is_ignored_sigterm_still_ends_in_good_order(ignored):
    async def busy():
        with interrupt_answered():
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(60)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(busy())


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


@pytest.fixture
def ignored():
    """A process that was told not to listen to Ctrl-C, as `nohup COMMAND &` and background jobs of scripts are."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


def test_what_was_told_to_ignore_the_key_ignores_it(ignored, capfd):
    reached = []

    async def busy():
        with interrupt_answered():
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0)
            stop_if_interrupted()
            reached.append("the end")

    asyncio.run(busy())
    assert reached == ["the end"]
    assert capfd.readouterr().err == ""
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_program_that_is_started_with_the_key_ignored_goes_on_ignoring_it(ignored):
    program = (
        "import asyncio, signal\n"
        "from stretto.runtime.interrupt import interrupt_answered\n"
        "async def busy():\n"
        "    with interrupt_answered():\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "        await asyncio.sleep(0)\n"
        "    print(signal.getsignal(signal.SIGINT).name)\n"
        "asyncio.run(busy())\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (told.stdout, told.stderr) == ("SIG_IGN\n", "")


@pytest.mark.parametrize("begun", [False, True])
def test_what_must_not_be_left_half_done_is_finished_first(begun):
    done = []

    async def work():
        await asyncio.sleep(0.01)
        done.append("all of it")
        return len(done)

    async def busy():
        asyncio.get_running_loop().call_later(0.001, signal.raise_signal, signal.SIGINT)
        assert await unbroken(work(), once=lambda: begun) == 1
        await asyncio.sleep(0)
        stop_if_interrupted()
        done.append("too far")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(busy())
    assert done == (["all of it"] if begun else [])


def test_what_is_done_when_the_key_is_pressed_is_not_thrown_away():
    async def work():
        asyncio.get_running_loop().call_soon(outer.cancel)
        return "done"

    async def busy():
        told.append(await unbroken(work(), once=lambda: False))

    told = []

    async def main():
        nonlocal outer
        outer = asyncio.ensure_future(busy())
        await outer

    outer = None
    asyncio.run(main())
    assert told == ["done"]
