"""Blocking calls beside an event loop, which nobody has to wait for to the end.

Python waits for threads in three places: `asyncio.run` for those of its executor, `concurrent.futures` for those of its
pools, and the interpreter for all that are no daemons. One call that never returns there keeps a process for ever, past
every deadline. Calls made here run in daemon threads, so that whoever stops waiting leaves them behind, and `leave`
ends the program without them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from stretto.errors import RolloutError

P = ParamSpec("P")
T = TypeVar("T")

MOST = 32
"""Calls of `asyncio.to_thread` and the like that run at once in `run`."""

NICE = 10
"""How far a call that gives way stands back: beside a thread that computes it gets a tenth of a core."""

LAST = 3.0
"""Seconds for Python to end after a failure; by then everything is said and closed."""

LAST_OF_GOOD = 30.0
"""The same after a success, where a library may have something to finish."""


class Daemon(threading.Thread):
    """A thread that the interpreter does not wait for."""

    def __init__(self, serve: Callable[[Daemon], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.serve = serve
        self.busy = False

    def run(self) -> None:
        """Until there is nothing more to do."""
        self.serve(self)


class Daemons(ThreadPoolExecutor):
    """The standard pool of threads, but neither `shutdown` nor the end of the program waits for its calls.

    A kind of the standard one only because asyncio insists on that; nothing of how it works is used.
    """

    def __init__(self, most: int = MOST, name: str = "beside") -> None:
        super().__init__(most, thread_name_prefix=name)
        self._most, self._name = most, name
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._changing = threading.Lock()
        # Calls that wait or run, and threads that serve them.
        self._open, self._serving, self._closed = 0, 0, False

    def submit(self, function: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> Future[T]:
        """Runs the function as soon as a thread is free."""
        future: Future[T] = Future()
        with self._changing:
            if self._closed:
                raise RuntimeError("this pool of threads is shut down")
            self._open += 1
            self._calls.put((future, partial(function, *arguments, **named)))
            if self._serving < min(self._open, self._most):
                self._serving += 1
                Daemon(self._serve, f"{self._name}-{self._serving}").start()
        return future

    def _serve(self, thread: Daemon) -> None:
        while (asked := self._calls.get()) is not None:
            future, call = asked
            thread.busy = True
            if future.set_running_or_notify_cancel():
                try:
                    answer = call()
                except BaseException as error:
                    self._done(thread)
                    future.set_exception(error)
                else:
                    self._done(thread)
                    future.set_result(answer)
                    del answer
            else:
                self._done(thread)
            del asked, future, call  # an idle thread keeps nothing alive

    def _done(self, thread: Daemon) -> None:
        thread.busy = False
        with self._changing:
            self._open -= 1

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no more calls, and waits for none, whatever `wait` says."""
        with self._changing:
            closing, self._closed = not self._closed, True
        if cancel_futures:
            while not self._calls.empty():
                with suppress(Exception):
                    asked = self._calls.get_nowait()
                    if asked is not None and asked[0].cancel():
                        asked[0].set_running_or_notify_cancel()
        if closing or cancel_futures:
            for _ in range(self._serving):
                self._calls.put(None)


def begun(function: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> Future[T]:
    """A call in a thread of its own, which ends with it, as do processes that it starts to die with their parent."""
    pool = Daemons(1, getattr(function, "__name__", "beside"))
    future = pool.submit(function, *arguments, **named)
    pool.shutdown()
    return future


async def beside(function: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> T:
    """What a blocking call returns; who is cancelled while waiting for it leaves it behind."""
    return await asyncio.wrap_future(begun(function, *arguments, **named))


def give_way() -> None:
    """Lets the call of this thread take what cores are idle, and little of those that compute; it ends with the call.

    Threads that compute together wait for the slowest of them, so one that is held up by as much as a tenth of a step
    costs all of them that. Only Linux knows of a thread's own priority; elsewhere nothing is changed.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def within(seconds: float, function: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> T:
    """The same without an event loop; TimeoutError if it takes longer, and it is left behind."""
    return begun(function, *arguments, **named).result(timeout=seconds)


def run(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, but its end waits for no thread in which something blocks, ours or one of `asyncio.to_thread`."""

    def loop() -> asyncio.AbstractEventLoop:
        made = asyncio.new_event_loop()
        made.set_default_executor(Daemons())
        return made

    async def noted() -> T:
        task = asyncio.current_task()
        assert task is not None
        _TASKS[threading.get_ident()] = (asyncio.get_running_loop(), task)
        try:
            return await work
        finally:
            del _TASKS[threading.get_ident()]

    if interrupted():  # the import of a library may have swallowed what Ctrl-C raised
        work.close()
        raise KeyboardInterrupt
    with _handled_by_loops(), asyncio.Runner(loop_factory=loop) as runner:
        try:
            return runner.run(noted())
        except asyncio.CancelledError:  # who cancels the whole of it wants what Ctrl-C does
            raise KeyboardInterrupt from None
        except RuntimeError as error:
            if str(error) != "Event loop stopped before Future completed.":
                raise
            fix = "remove loop.stop() from your environment, tool or callback, then `stretto resume` the run"
            raise RolloutError(f"code of yours stopped the event loop of the run\n    fix: {fix}") from error


_PRESSED = threading.Event()
"""Set once Ctrl-C was pressed within `interrupts_noted`, whatever became of what it raised."""


@contextmanager
def interrupts_noted() -> Iterator[None]:
    """Within it, outside of event loops, Ctrl-C is remembered next to raising KeyboardInterrupt.

    Libraries that are being imported may catch that, and fail later of the half module that is left.
    """
    _PRESSED.clear()
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _note_interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _note_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupted() -> bool:
    """True if Ctrl-C was pressed and nothing has answered it."""
    return _PRESSED.is_set()


def forget_interrupt() -> None:
    """For callers that answer a Ctrl-C and continue."""
    _PRESSED.clear()


def _note_interrupt(number: int, frame: Any) -> None:
    _PRESSED.set()
    signal.default_int_handler(number, frame)


@contextmanager
def _handled_by_loops() -> Iterator[None]:
    """Within it, Python's own handler stands in the place of ours: asyncio takes over from no other."""
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not _note_interrupt:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _note_interrupt)


_TASKS: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = {}
"""Thread -> what `run` runs in it."""


def outside_loops(function: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> T:
    """A call that begins an event loop of its own: here, or beside a loop that runs in this thread, as in a notebook.

    Ctrl-C reaches what runs there as it would here: once to finish in good order, twice to be left behind.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function(*arguments, **named)
    there = SimpleQueue[int]()

    def called() -> T:
        there.put(threading.get_ident())
        return function(*arguments, **named)

    call, pressed = begun(called), False
    thread = there.get()
    while True:
        try:
            return call.result()
        except KeyboardInterrupt:
            if call.done() or pressed or thread not in _TASKS:
                raise
            pressed = True
            loop, task = _TASKS[thread]
            loop.call_soon_threadsafe(task.cancel)


def left_behind() -> list[str]:
    """Names of our threads in which a call still blocks."""
    return [thread.name for thread in threading.enumerate() if isinstance(thread, Daemon) and thread.busy]


def leave(code: int) -> None:
    """The last act of the program, after all is printed and closed: nothing that blocks may keep it.

    Where a call of ours still blocks, inside a library perhaps, the interpreter is not taken down around it. Otherwise
    Python ends as usual, and if other threads or the handlers of libraries do not let it, it ends without them.
    """
    if left_behind():
        end(code)
    limit = LAST if code else LAST_OF_GOOD
    timer = threading.Timer(limit, end, [code])
    timer.daemon = True
    timer.name = "leave"
    timer.start()


def end(code: int) -> None:
    """Ends the process now, with what was printed."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a stream may be closed, or its device full
            within(1.0, stream.flush)  # or held by what blocks
    os._exit(code)
