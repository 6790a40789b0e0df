"""Two hosts, each a network namespace with an address and a `ray start` of its own: a run across them ends as on one.

The second host has a mount namespace too, in which the run folder is empty: only the driver's host may need it.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from running import tensors, written
from stretto.workers.orphans import MARK, end_marked, marked

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),  # two hosts and three runs
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces are made by root"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="network namespaces are made by `ip` of iproute2"),
]

PLAIN = "import sys; from stretto.cli.main import main; sys.exit(main())"


def sh(*words):
    subprocess.run(words, check=True, timeout=60, capture_output=True)


class Hosts:
    """Two network namespaces, joined by a cable."""

    def __init__(self):
        self.tag = uuid.uuid4().hex[:6]
        self.names = [f"stretto-{self.tag}-{index}" for index in range(2)]
        self.addresses = ["10.213.7.1", "10.213.7.2"]
        self.address = f"{self.addresses[0]}:6399"
        self.folder = Path(tempfile.mkdtemp(prefix="sr", dir="/tmp"))  # Ray's sockets have short names
        self.environment = {
            **os.environ,
            MARK: f"hosts-{self.tag}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": uuid.uuid4().hex,
        }
        self.environment.pop("RAY_ADDRESS", None)

    def __enter__(self):
        ends = [f"sv{self.tag}{index}" for index in range(2)]
        for name in self.names:
            sh("ip", "netns", "add", name)
        sh("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(self.names, ends, self.addresses, strict=True):
            sh("ip", "link", "set", end, "netns", name)
            sh("ip", "-n", name, "addr", "add", f"{address}/24", "dev", end)
            sh("ip", "-n", name, "link", "set", end, "up")
            sh("ip", "-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *error):
        end_marked(self.environment[MARK])
        for name in self.names:
            with suppress(subprocess.CalledProcessError):
                sh("ip", "netns", "del", name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def ray(self, index, *words, hide=()):
        """A node of the cluster on a host; `hide` are folders that are empty there."""
        hidden = "".join(f"mount -t tmpfs none {folder} && " for folder in hide)
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1", "--disable-usage-stats"]
        start += [f"--node-ip-address={self.addresses[index]}", *words]
        inside = ["sh", "-c", f'{hidden}exec "$@"', "sh", *start]
        with (self.folder.parent / f"{self.folder.name}-{index}.log").open("w") as log:
            done = subprocess.run(
                ["ip", "netns", "exec", self.names[index], *inside],
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=90,
                check=False,
            )
        text = Path(log.name).read_text()
        Path(log.name).unlink()
        assert done.returncode == 0, text

    def train(self, index, recipe, **environment):
        """`stretto train` there: its exit code and what it said."""
        done = subprocess.run(
            ["ip", "netns", "exec", self.names[index], sys.executable, "-c", PLAIN, "train", str(recipe)],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr


def recipe_on(folder, cluster):
    """Two steps of the tiny recipe on a cluster, in float64 and with the strategy that sends weights."""
    return written(
        folder,
        name=f"on{cluster}",
        model__dtype="float64",
        placement={"cluster": cluster, "strategy": "auto" if cluster == "1xcpu" else "separate"},
        run={"steps": 2, "folder": str(folder / f"run-{cluster}")},
        evaluate={"every": 0},
    )


def test_a_run_across_two_hosts_ends_with_the_weights_of_one(tmp_path):
    both, one = recipe_on(tmp_path, "2x1xcpu"), recipe_on(tmp_path, "1xcpu")
    with Hosts() as hosts:
        port = hosts.address.rpartition(":")[2]
        hosts.ray(0, "--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={hosts.folder}")
        hosts.ray(1, f"--address={hosts.address}", hide=[hosts.folder, tmp_path])
        code, said = hosts.train(0, both, RAY_ADDRESS=hosts.address)
        assert code == 0, said
        code, said = hosts.train(0, one)
        assert code == 0, said
    assert marked(hosts.environment[MARK]) == []
    events = json.loads((tmp_path / "run-2x1xcpu/timeline.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["name"] in ("generate", "train")} == {"host0", "host1"}
    ours, theirs = (tensors(tmp_path / f"run-{cluster}/checkpoints/step-000002") for cluster in ("2x1xcpu", "1xcpu"))
    weights = [key for key in theirs if key[0].endswith("model.safetensors")]
    assert weights
    for key in weights:
        assert torch.allclose(ours[key], theirs[key], rtol=0, atol=1e-10), key
