"""The runs of a sweep while they are trained: here one after the other, or each in a process with its share of the
machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from stretto.api.calls import resume, train
from stretto.api.run import Run
from stretto.errors import RecipeError, RunStopped, StrettoError
from stretto.recipe.load import RecipeSource, plain
from stretto.recipe.time_limit import UNTIL, counts_from_the_start
from stretto.report.read_run import RunRecord
from stretto.storage.lock import is_held
from stretto.storage.run_folder import forget_unbegun


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRun:
    """One of the runs."""

    name: str
    """What it and its folder are called."""
    folder: Path
    """Where it is, or will be."""
    setting: Mapping[str, Any]
    """Its values, by key."""

    @property
    def finished(self) -> bool:
        """True if nothing of it is left to do."""
        with suppress(RecipeError):
            record = RunRecord(self.folder)
            last = self.folder / "checkpoints" / f"step-{record.steps:06d}" / "state" / "manifest.json"
            return record.finished and last.is_file()
        return False

    @property
    def begun(self) -> bool:
        """True if there is something to go on with."""
        return (self.folder / "recipe.yaml").is_file()

    @property
    def until(self) -> str | None:
        """When it is to end, as its recipe says; none where nothing was begun."""
        return Run(self.folder).recipe.run.until if self.begun else None


@dataclass(slots=True, kw_only=True)
class SweepWork:
    """What trains them, and how it went."""

    recipe: RecipeSource
    """Their recipe."""
    changes: Sequence[Any]
    """Changes to it, for all of them."""
    given: Mapping[str, Any]
    """Functions that were given as objects."""
    at_once: int
    """How many are trained beside each other, in processes if more than one."""
    quiet: bool
    """Whether a run that is trained here shows nothing."""
    told: Callable[[str], None]
    """Is told which run begins, goes on or has ended."""
    failures: dict[str, str] = field(default_factory=dict)
    """Name of a run -> why it failed."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """Those that were started."""

    def through(self, runs: Sequence[GridRun]) -> None:
        """Trains what is not finished: one after the other, or each as soon as one before it has ended. Ctrl-C is
        passed on to processes."""
        waiting = [(run, f"{number} of {len(runs)}") for number, run in enumerate(runs, 1) if not run.finished]
        shares: SimpleQueue[dict[str, str]] = SimpleQueue()
        for share in shares_of_machine(self.at_once) if self.at_once > 1 else [{}]:
            shares.put(share)

        def one(run: GridRun, place: str) -> None:
            share = shares.get()
            try:
                self._train(run, place, share)
            finally:
                shares.put(share)

        if self.at_once <= 1:
            for run, place in waiting:
                one(run, place)
            return
        with ThreadPoolExecutor(self.at_once) as pool:
            try:
                for done in [pool.submit(one, *item) for item in waiting]:
                    done.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in self.processes:
                    process.send_signal(signal.SIGINT)  # does nothing to one that has ended
                raise

    def _train(self, run: GridRun, place: str, share: Mapping[str, str]) -> None:
        """Trains one of them, and notes if it fails. One that its own time has ended stays as it is."""
        self._wait_for_another(run)
        if run.finished:
            return
        self.told(f"{run.name}: {'goes on' if run.begun else 'begins'} ({place})")
        if not run.begun and run.folder.is_dir():
            forget_unbegun(run.folder)
        try:
            if self.at_once > 1:
                self._process(run, share)
            elif run.begun:
                resume(run.folder, quiet=self.quiet, **self.given)
            else:
                changes = [*self.changes, dict(run.setting)]
                train(self.recipe, changes=changes, folder=run.folder, quiet=self.quiet, **self.given)
        except RunStopped as stop:
            if stop.why != UNTIL or not counts_from_the_start(run.until):
                raise
            self.told(f"{run.name}: its time is over ({UNTIL}): {stop}")
        except StrettoError as error:
            self.failures[run.name] = str(error)
            self.told(f"{run.name} failed: {error}")

    def _wait_for_another(self, run: GridRun) -> None:
        """Returns when no other process trains the run, which a sweep that was killed may have left."""
        if is_held(run.folder):
            self.told(f"{run.name}: trains already, in a process of a sweep that was killed; waiting for that")
        while is_held(run.folder):
            time.sleep(1.0)

    def _process(self, run: GridRun, share: Mapping[str, str]) -> None:
        """Trains in a process of its own, whose output is kept beside the run."""
        assert isinstance(self.recipe, str | os.PathLike)  # others are refused
        if run.begun:
            arguments = ["resume", os.fspath(run.folder)]
        else:
            texts = [change for change in self.changes if isinstance(change, str)]
            pairs = [pair for change in self.changes if isinstance(change, Mapping) for pair in change.items()]
            pairs += [*run.setting.items(), ("run.folder", os.fspath(run.folder))]
            texts += [f"{key}={json.dumps(plain(value))}" for key, value in pairs]
            arguments = ["train", os.fspath(self.recipe), *texts]
        log = run.folder.with_name(f"{run.name}.log")
        with open(log, "ab") as output:
            command = [sys.executable, "-m", "stretto", *arguments]
            # In a session of its own, so that a Ctrl-C in the terminal reaches it once, from here.
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env=os.environ | dict(share), start_new_session=True
            )
            self.processes.append(process)
            code = process.wait()
        why = f"exit code {code}; {log} says why"
        if code == 128 + signal.SIGTERM and run.until is not None:
            raise RunStopped(why, exit_code=code, why=UNTIL)
        if code:
            raise StrettoError(why)


def shares_of_machine(count: int) -> list[dict[str, str]]:
    """What each of so many processes is told by its environment: its GPUs, or its number of threads."""
    from stretto.checks.machine.facts import cores, look

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",") if named else [str(index) for index in range(len(look().gpus))]
    if not gpus:
        return [{"OMP_NUM_THREADS": str(max(1, cores() // count))} for _ in range(count)]
    if len(gpus) < count:
        raise RecipeError.of("at_once", f"asks for {count} runs at once on {len(gpus)} GPUs", f"use {len(gpus)}")
    size = len(gpus) // count
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[i * size : (i + 1) * size])} for i in range(count)]
