"""Messages between ranks: in order, of any size, from those who know the token, and nobody waits for a reader."""

import socket
import time
from collections.abc import Callable

import pytest

from rltrain.errors import StallError
from rltrain.runtime.messages import Connection, Message, MessageServer, PeerLost, connect

LIMIT_S = 20.0


@pytest.fixture
def server():
    server = MessageServer("127.0.0.1", "secret")
    yield server
    server.close()


def received(
    server: MessageServer, is_enough: Callable[[list[tuple[int, Message]]], bool]
) -> list[tuple[int, Message]]:
    got: list[tuple[int, Message]] = []
    end = time.monotonic() + LIMIT_S
    while not is_enough(got):
        assert time.monotonic() < end, got
        got += server.receive(0.05)
    return got


def answer_to(client: Connection) -> Message:
    """The next message, of which there is one."""
    end = time.monotonic() + LIMIT_S
    while not (messages := client.receive()):
        assert time.monotonic() < end
        time.sleep(0.002)
    (message,) = messages
    return message


def test_messages_come_in_order_and_answers_go_to_whoever_asked(server):
    first, second = (connect("127.0.0.1", server.port, "secret") for _ in range(2))
    for number in range(3):
        first.send({"number": number})
    second.send({"text": "déjà vu\n"})
    got = received(server, lambda got: len(got) == 4)
    by_peer = {peer: [message for who, message in got if who == peer] for peer, _ in got}
    assert sorted(map(str, by_peer.values())) == sorted(
        map(str, [[{"number": 0}, {"number": 1}, {"number": 2}], [{"text": "déjà vu\n"}]])
    )
    for who in by_peer:
        server.send(who, {"you": who})
    assert answer_to(first)["you"] != answer_to(second)["you"]


def test_nobody_waits_for_a_peer_that_does_not_read(server):
    slow = connect("127.0.0.1", server.port, "secret")
    slow.send({"hello": 1})
    ((peer, _),) = received(server, lambda got: len(got) == 1)
    text = "x" * 1_000_000
    for number in range(30):  # more than the system's buffers hold
        server.send(peer, {"number": number, "text": text})
    got: list[Message] = []
    end = time.monotonic() + LIMIT_S
    while len(got) < 30:
        assert time.monotonic() < end
        got += slow.receive()
        server.receive(0.001)
    assert [message["number"] for message in got] == [*range(30)]


@pytest.mark.parametrize(
    "sent",
    [b'{"token":"guess"}\n{"row":{}}\n', b"no json\n", b"[1]\n", b'{"row":{}}\n'],
    ids=["wrong token", "no JSON", "no object", "no token"],
)
def test_who_does_not_know_the_token_is_dropped(server, sent, caplog):
    caplog.set_level("DEBUG")
    stranger = socket.create_connection(("127.0.0.1", server.port))
    stranger.settimeout(LIMIT_S)
    stranger.sendall(sent)
    end = time.monotonic() + LIMIT_S
    stranger.setblocking(False)
    while time.monotonic() < end:
        assert server.receive(0.01) == []
        try:
            closed = stranger.recv(1) == b""
        except BlockingIOError:
            continue
        except ConnectionError:
            closed = True
        assert closed
        break
    assert not caplog.records


def test_both_sides_notice_that_the_other_has_gone(server, caplog):
    caplog.set_level("DEBUG")
    client = connect("127.0.0.1", server.port, "secret")
    client.send({"hello": 1})
    ((peer, _),) = received(server, lambda got: len(got) == 1)
    client.close()
    end = time.monotonic() + LIMIT_S
    while "a connection was lost" not in caplog.text:
        assert time.monotonic() < end
        server.receive(0.05)
    server.send(peer, {"late": 1})
    port, other = server.port, connect("127.0.0.1", server.port, "secret")
    other.send({"hello": 2})
    received(server, lambda got: len(got) == 1)
    server.close()
    with pytest.raises(PeerLost):
        answer_to(other)
    with pytest.raises(StallError, match=f"nobody answers at 127.0.0.1:{port}"):
        connect("127.0.0.1", port, "secret")
