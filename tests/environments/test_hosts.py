"""Environments in processes of their own: the same outcomes, and a death or a loop costs its own trajectories only."""

import asyncio
import os

import pytest

from stretto.environments import hosts as module
from stretto.environments.base import Reply, ToolCall
from stretto.environments.hosts import EnvironmentHosts
from stretto.errors import EngineError, RecipeError, RolloutError
from stretto.types import Outcome, Prompt

CODE = """
import asyncio, os, time
from stretto import Outcome

async def play(prompt, model):
    messages = list(prompt.messages)
    first = await model.chat(messages, max_new_tokens=3)
    second = await model.chat([*messages, first, {"role": "user", "content": prompt.tags["more"]}], stop=".")
    return Outcome(answer=second.text, signals={"tokens": len(second.tokens), "pid": os.getpid()})

async def act(prompt, model):
    what = prompt.reference
    if what == "die": os._exit(3)
    if what == "loop":
        while True: pass
    if what == "wait": await asyncio.sleep(60)
    if what == "raise": raise KeyError("mine")
    if what == "exit": raise SystemExit(2)
    if what == "wrong": return 3
    if what == "caught":
        try: await model.chat([{"role": "user", "content": "too long"}])
        except ValueError as error: return Outcome(answer=f"caught {error}")
    if what == "patient":
        try:
            async with asyncio.timeout(0.01): await model.chat([{"role": "user", "content": "never"}])
        except TimeoutError: pass
    reply = await model.chat(prompt.messages)
    return Outcome(answer=reply.text)
"""


class Scripted:
    """A model that knows its own replies by identity, like the real one."""

    def __init__(self):
        self.given, self.cancelled = [], False

    async def chat(self, messages, *, max_new_tokens=None, tools=(), stop=()):
        text = messages[-1]["content"]
        if text == "too long":
            raise ValueError("no room")
        if text == "engine":
            raise EngineError("the engine broke")
        if text == "never":
            try:
                await asyncio.sleep(60)
            finally:
                self.cancelled = True
        again = [message for message in messages if any(message is reply for reply in self.given)]
        reply = Reply(text="/".join([f"{text}/{len(again)}/{max_new_tokens}", *stop]), tokens=(1, 2), stop="stop")
        self.given.append(reply)
        return reply


def asked(what="", text="hello"):
    return Prompt(id=what, messages=({"role": "user", "content": text},), reference=what, tags={"more": "more"})


TOOLS = """
import os, time

class Acts:
    def reset(self, more): self.more = more
    def act(self, text: str) -> str:
        '''Acts.

        Args:
            text: How.
        '''
        while text == "block": time.sleep(0.01)
        return text + self.more
    def get_reward(self): return os.getpid()
"""


class Caller(Scripted):
    """Calls the tool with what it is asked, then repeats what it was told."""

    async def chat(self, messages, *, max_new_tokens=None, tools=(), stop=()):
        text = messages[-1]["content"]
        call = ToolCall(name=tools[0]["function"]["name"], arguments={"text": text})
        calls = () if messages[-1]["role"] == "tool" else (call,)
        return Reply(text=text, tokens=(1,), stop="stop", tool_calls=calls, turn=len(messages) // 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("hosts")
    (root / "acts.py").write_text(CODE)
    (root / "tools.py").write_text(TOOLS)
    (root / "absent.py").write_text("import nothing_of_that_name\nasync def play(prompt, model): ...\n")
    (root / "slow.py").write_text(
        "import os, time\nfrom stretto import Outcome\n"
        "if os.path.exists(os.path.join(os.path.dirname(__file__), 'marker')): time.sleep(60)\n"
        "async def act(prompt, model):\n"
        "    if prompt.reference == 'die': os._exit(3)\n"
        "    return Outcome(answer='here')\n"
    )
    (root / "deadly.py").write_text("import os\nos._exit(4)\nasync def play(prompt, model): ...\n")
    return root


def with_hosts(folder, do, kind="acts:act", number=1):
    """What `do` does with some hosts, which are gone afterwards."""

    async def all_of_it():
        made = EnvironmentHosts(kind, number=number, folders=[str(folder)], start_deadline=60.0)
        await made.start()
        try:
            return await do(made)
        finally:
            await made.close()
            assert not any(os.path.exists(f"/proc/{host.process.pid}") for host in made.hosts)

    return asyncio.run(all_of_it())


def test_calls_and_replies_go_through_the_pipe_and_replies_are_known_again(folder):
    async def do(hosts):
        return await asyncio.gather(*(hosts(asked(str(n)), Scripted()) for n in range(6)))

    outcomes = with_hosts(folder, do, "acts:play", number=2)
    assert {outcome.answer for outcome in outcomes} == {"more/1/None/."}
    assert [outcome.signals["tokens"] for outcome in outcomes] == [2.0] * 6
    assert len({outcome.signals["pid"] for outcome in outcomes}) == 2, "they are shared out"


@pytest.mark.slow
def test_a_class_of_tools_runs_in_a_host_and_a_method_that_blocks_is_killed_with_it(folder, monkeypatch):
    monkeypatch.setattr(module, "GRACE", 0.2)

    async def do(hosts):
        outcome = await hosts(asked(text="hello"), Caller())
        assert outcome.answer == "hellomore"
        assert outcome.signals["reward"] == hosts.hosts[0].process.pid
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await hosts(asked(text="block"), Caller())
        while hosts.hosts[0].alive:
            await asyncio.sleep(0.01)
        again = await hosts(asked(text="again"), Caller())
        assert (again.answer, again.signals["turns"]) == ("againmore", 2.0)

    with_hosts(folder, do, "tools:Acts")


def test_what_goes_wrong_in_a_host_costs_its_own_trajectories(folder, monkeypatch):
    monkeypatch.setattr(module, "GRACE", 0.1)
    model = Scripted()

    async def said(hosts, *names, text="hello", seconds=60.0):
        async def one(name):
            async with asyncio.timeout(seconds):
                return (await hosts(asked(name, text), model)).answer

        found = await asyncio.gather(*map(one, names), return_exceptions=True)
        told = [f"{type(each).__name__}: {each}" if isinstance(each, Exception) else each for each in found]
        return [each.partition("\n")[0] for each in told]

    async def do(hosts):
        assert await said(hosts, "raise", "exit", "wrong", "caught", "patient", "fine") == [
            "RolloutError: KeyError: 'mine'",
            "RolloutError: SystemExit: 2",
            "RolloutError: it returned int, which is no stretto.Outcome",
            "caught no room",
            "hello/0/None",
            "hello/0/None",
        ]
        async with asyncio.timeout(30):  # the host tells of it when it comes to that
            while not model.cancelled:
                await asyncio.sleep(0.01)
        assert await said(hosts, "fine", text="engine") == ["EngineError: the engine broke"]
        first = hosts.hosts[0].process.pid
        assert await said(hosts, "wait", seconds=0.02) == ["TimeoutError: "]
        assert await said(hosts, "fine") == ["hello/0/None"]
        assert hosts.hosts[0].process.pid == first, "a trajectory that only waits is cancelled where it is"
        died = "RolloutError: its host process exited with code 3"
        assert await said(hosts, "wait", "die") == [died, died]
        assert await said(hosts, "fine") == ["hello/0/None"], "it was started again"
        looped = asyncio.ensure_future(said(hosts, "loop", seconds=0.1))
        waits = asyncio.ensure_future(said(hosts, "wait"))
        assert await looped == ["TimeoutError: "]
        killed = "RolloutError: its host process was killed, because acts:act blocked it past its deadline"
        assert await waits == [killed]
        assert await said(hosts, "fine") == ["hello/0/None"]

    with_hosts(folder, do)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("absent:play", "absent:play cannot be imported.*nothing_of_that_name"),
        ("deadly:play", "deadly:play cannot be imported: its host process exited with code 4"),
        ("acts:gone", "defines no 'gone'"),
        ("acts:CODE", "defines no"),
    ],
)
def test_an_environment_that_a_host_cannot_import_is_told_before_anything_else(kind, says, folder):
    with pytest.raises(RecipeError, match=f"environment.kind: .*{says}"):
        with_hosts(folder, lambda hosts: None, kind)


def test_a_restart_that_nobody_waits_for_is_made_anew(folder):
    marker = folder / "marker"

    async def do(hosts):
        with pytest.raises(RolloutError):
            await hosts(asked("die"), Scripted())
        marker.touch()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await hosts(asked(), Scripted())
        marker.unlink()
        async with asyncio.timeout(30):
            return await hosts(asked(), Scripted())

    try:
        assert with_hosts(folder, do, "slow:act").answer == "here"
    finally:
        marker.unlink(missing_ok=True)


def test_an_outcome_is_as_it_was(folder):
    async def do(hosts):
        return await hosts(asked("fine"), Scripted())

    assert with_hosts(folder, do) == Outcome(answer="hello/0/None", signals={})
