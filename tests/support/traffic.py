"""Bytes this process sends, counted by the kernel socket by socket."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
from collections.abc import Callable

import torch.distributed as dist

__all__ = ["bytes_sent"]

_ACKNOWLEDGED = 120  # where tcpi_bytes_acked, 64 bits, lies in Linux's struct tcp_info


def bytes_sent(call: Callable[[], object]) -> int:
    """Return how many bytes this rank writes to its sockets in a collective call; all ranks count at the same time."""
    dist.barrier()
    before = _written()
    call()
    dist.barrier()
    after = _written()
    return sum(count - before.get(inode, 0) for inode, count in after.items())


def _written() -> dict[str, int]:
    """Return the bytes written to every TCP connection of this process, by the name of its inode."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{entry}")
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry))) as connection:
                    found[name] = _written_to(connection)
        except (OSError, struct.error):  # closed in the meantime, or no TCP connection
            continue
    return found


def _written_to(connection: socket.socket) -> int:
    """Add what the peer has acknowledged, which it may put off, and what waits for that."""
    while True:
        acknowledged = _acknowledged(connection)
        (waiting,) = struct.unpack("=i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
        if _acknowledged(connection) == acknowledged:  # else some were counted in neither or in both
            return acknowledged + waiting


def _acknowledged(connection: socket.socket) -> int:
    state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return struct.unpack_from("=Q", state, _ACKNOWLEDGED)[0]
