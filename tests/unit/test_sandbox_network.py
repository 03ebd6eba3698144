"""A program that may reach one port of the machine reaches it, and nothing else."""

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from rltrain.runtime.machine import JobThread
from rltrain.sandbox.limits import Limits
from tests.unit.sandboxes import PROTECTING, sandbox_by


@pytest.fixture
def echo_port() -> Iterator[int]:
    """Of a server that answers each connection with all that it was sent, once the other side has sent it."""
    server = socket.create_server(("127.0.0.1", 0), backlog=100)
    thread = JobThread(target=echo, args=(server,))
    thread.start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)  # which ends its accept
    server.close()
    thread.join(timeout=60)


def echo(server: socket.socket) -> None:
    while True:
        try:
            connected, _ = server.accept()
        except OSError:
            return
        with connected:
            connected.sendall(connected.makefile("rb").read())


ASK = """
import socket, sys
connections = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(int(sys.argv[2]))]
for number, connection in enumerate(connections):
    connection.sendall(bytes([number]) * int(sys.argv[3]))
    connection.shutdown(socket.SHUT_WR)
for number, connection in enumerate(connections):
    received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert received == bytes([number]) * int(sys.argv[3]), len(received)
print("equal")
"""


@pytest.mark.parametrize(("num_connections", "num_bytes"), [(1, 2_000_000), (40, 1000)])
@pytest.mark.parametrize("means", [*PROTECTING, "none"])
def test_the_port_is_reached(echo_port: int, means: str, num_connections: int, num_bytes: int) -> None:
    sandbox = sandbox_by(means)
    command = [sandbox.python, "-c", ASK, str(echo_port), str(num_connections), str(num_bytes)]
    outcome = sandbox.run(command, host_port=echo_port, limits=Limits(wall_s=60))
    assert outcome.stdout == b"equal\n", outcome


@pytest.mark.parametrize("means", PROTECTING)
def test_nothing_else_is_reached(echo_port: int, means: str) -> None:
    program = """
import socket, sys
other_port = int(sys.argv[1])
for address in [("127.0.0.1", other_port), ("127.0.0.2", other_port), ("192.0.2.1", 80)]:
    try:
        socket.create_connection(address, timeout=5)
    except OSError as error:
        print(error.strerror)
names = open("/proc/net/dev").read().split("\\n")[2:-1]
print(*(name.split(":")[0].strip() for name in names))
"""
    sandbox = sandbox_by(means)
    with socket.create_server(("127.0.0.1", 0)) as other:
        command = [sandbox.python, "-c", program, str(other.getsockname()[1])]
        outcome = sandbox.run(command, host_port=echo_port)
    refused = ["Connection refused"] * 2 + ["Network is unreachable"]
    assert outcome.stdout.decode().splitlines() == [*refused, "lo"], outcome


def test_where_nobody_listens_the_connection_ends() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    program = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=30) as connection:
    try:
        print(connection.recv(1))
    except ConnectionResetError:
        print(b"")
"""
    sandbox = sandbox_by("kernel")
    assert sandbox.run([sandbox.python, "-c", program, str(port)], host_port=port).stdout == b"b''\n"
