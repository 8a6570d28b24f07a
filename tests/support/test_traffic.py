from __future__ import annotations

import socket
import sys

import pytest

from tests.support.ranks import run_ranks
from tests.support.traffic import bytes_sent


def _into_a_full_pipe() -> tuple[int, int]:
    """Write until the peer, which reads nothing, takes no more; say what was written, and what was counted."""
    written = 0

    def fill() -> None:
        nonlocal written
        sender.setblocking(False)
        try:
            while True:
                written += sender.send(bytes(1 << 16))
        except BlockingIOError:
            pass

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        peer, _ = server.accept()
        with peer:
            counted = bytes_sent(fill)
    return written, counted


@pytest.mark.dist
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's tcp_info")
def test_bytes_count_when_they_are_written_not_when_the_peer_acknowledges_them():
    for written, counted in run_ranks(_into_a_full_pipe, 2):
        assert written > 1 << 16
        assert written <= counted < written + 10_000
