"""The examples run, short, and do what they say."""

from __future__ import annotations

import os
import re
import runpy
import socket
import subprocess
import sys

import pytest

from tests.conftest import ROOT

EXAMPLES = ROOT / "examples"


def example(name: str):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


def test_own_loop_learns(capsys):
    assert example("own_loop")() > 0.7
    said = capsys.readouterr().out
    assert "less_bn" in said
    assert said.count("epoch ") == 3


def test_train_step_resumes_bit_for_bit():
    assert example("train_step")()


def test_less_bn_report_counts_the_published_networks():
    pytest.importorskip("transformers", reason="needs the extra transformers: pip install '.[transformers]'")
    assert example("less_bn_report")(full=False) == {
        "ResNet-50": (53, 36, 32),
        "ResNet-18": (20, 11, 8),
        "RegNet": (71, 48, 44),
        "MobileNetV2": (52, 33, 33),
    }


@pytest.mark.dist
def test_two_nodes_learn_by_adasum():
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    environment = os.environ | {"GLOO_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    launch += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    agents = [
        subprocess.Popen(
            [*launch, "--node-rank", str(node), str((EXAMPLES / "adasum_two_nodes").with_suffix(".py"))],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    try:
        (said, faults), (silent, _) = [agent.communicate(timeout=240) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # an agent ends its ranks
            agent.wait()
    assert [agent.returncode for agent in agents] == [0, 0], faults
    assert silent == "", "only rank 0 speaks"
    agreements = [float(found) for found in re.findall(r"agreement of the nodes (-?[0-9.]+)", said)]
    assert len(agreements) == 3
    assert all(-1 < agreement < 1 for agreement in agreements)
    (right,) = re.findall(r"([0-9.]+)% of the test images right", said)
    assert float(right) > 70


def test_every_example_is_tested_and_short():
    scripts = sorted(EXAMPLES.glob("*.py"))
    text = (ROOT / "tests" / "test_examples.py").read_text(encoding="utf-8")
    assert scripts
    for script in scripts:
        assert f'"{script.stem}"' in text
        assert len(script.read_text(encoding="utf-8").splitlines()) <= 80
