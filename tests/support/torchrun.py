"""Start a script under torchrun on this machine: one agent, or several that stand for nodes.

``elastic`` starts one agent whose ranks are forked from a process that has imported torch, which is faster.
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from time import monotonic

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.conftest import ROOT
from tests.support.ranks import server_of_forks

__all__ = ["TorchrunError", "elastic", "loopback", "torchrun"]


class TorchrunError(AssertionError):
    """An agent failed or did not end in time; carries what all agents and their ranks wrote."""


def torchrun(
    script: Path,
    *arguments: object,
    ranks: int = 2,
    nodes: int = 1,
    restarts: int = 0,
    timeout: float = 300.0,
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """Run a script on ``nodes`` agents of ``ranks`` processes each and return what each agent's processes wrote.

    The agents meet at a store of this process, whose port is bound before they start.

    Args:
        script: A Python file.
        *arguments: Of the script.
        ranks: Processes per node.
        nodes: Agents; each sets ``LOCAL_WORLD_SIZE`` as on a machine of its own.
        restarts: How often the ranks are started anew when one of them dies.
        timeout: Seconds, after which agents and ranks are killed.
        environment: Variables added to those of this process.

    Raises:
        TorchrunError: An agent failed or did not end in time.
    """
    store = _store(timeout)
    options = {
        "nnodes": nodes,
        "nproc-per-node": ranks,
        "max-restarts": restarts,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": f"127.0.0.1:{store.port}",
        "rdzv-conf": "is_host=false",
        "rdzv-id": "tests",
        "local-addr": "127.0.0.1",
        "monitor-interval": 0.05,
    }
    command = [sys.executable, "-m", "torch.distributed.run", *(f"--{name}={value}" for name, value in options.items())]
    variables = {**os.environ, **_environment(), **(environment or {})}
    agents = [
        subprocess.Popen(
            [*command, str(script), *map(str, arguments)],
            env=variables,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for _ in range(nodes)
    ]
    return _finished(agents, timeout)


def elastic(script: Path, *arguments: object, written: Path, restarts: int, timeout: float = 300.0) -> str:
    """Start a script on two ranks as ``torchrun`` does, in processes that are forked, and return what they wrote.

    Args:
        script: A Python file.
        *arguments: Of the script.
        written: The file for what the agent and its ranks write.
        restarts: How often the ranks are started anew when one of them dies.
        timeout: Seconds, after which agent and ranks are killed.

    Raises:
        TorchrunError: The agent failed or did not end in time.
    """
    store = _store(timeout)
    call = (written, {**os.environ, **_environment()}, store.port, restarts, [str(script), *map(str, arguments)])
    agent = server_of_forks().Process(target=_agent, args=call)
    agent.start()
    try:
        agent.join(timeout)
    finally:
        if agent.is_alive():
            assert agent.pid is not None
            os.killpg(agent.pid, signal.SIGKILL)
            agent.join()
    if agent.exitcode:
        raise TorchrunError(f"the agent ended with {agent.exitcode}:\n{written.read_text()}")
    return written.read_text()


def _agent(written: Path, environment: Mapping[str, str], port: int, restarts: int, words: list[str]) -> None:
    os.setsid()
    gc.freeze()
    for stream in (1, 2):
        os.dup2(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.chdir(ROOT)
    os.environ.update(environment)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="tests",
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"is_host": False},
        max_restarts=restarts,
        monitor_interval=0.05,
        start_method="fork",
        local_addr="127.0.0.1",
    )
    elastic_launch(config, _script)(words)


def _script(words: list[str]) -> None:
    torch.set_num_threads(1)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def _store(timeout: float) -> dist.TCPStore:
    limit = timedelta(seconds=timeout)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)


def loopback() -> str:
    """Return the name of the loopback interface, for ``GLOO_SOCKET_IFNAME``."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": loopback(),
        "PYTHONPATH": path.rstrip(os.pathsep),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a rank that is aborted says where it was
        # With a shared store, ranks that start anew find the addresses of dead ones (pytorch#135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def _finished(agents: Sequence[subprocess.Popen[str]], timeout: float) -> list[str]:
    deadline = monotonic() + timeout
    written, late = [], False
    try:
        for agent in agents:
            try:
                written.append(agent.communicate(timeout=max(0.0, deadline - monotonic()))[0])
            except subprocess.TimeoutExpired:
                late = True
                for other in agents:
                    _end(other)
                written.append(agent.communicate()[0])
    finally:
        for agent in agents:
            _end(agent)
    codes = [agent.returncode for agent in agents]
    if late or any(codes):
        how = f"did not end within {timeout:g} s" if late else f"ended with {codes}"
        raise TorchrunError(f"torchrun {how}:\n" + "\n".join(f"agent {i}:\n{text}" for i, text in enumerate(written)))
    return written


def _end(agent: subprocess.Popen[str]) -> None:
    """Stop an agent and its ranks, which torchrun puts into sessions of their own."""
    if agent.poll() is not None:
        return
    agent.send_signal(signal.SIGTERM)  # the agent ends its ranks
    try:
        agent.wait(timeout=15)
    except subprocess.TimeoutExpired:
        os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()
