"""Messages between processes: whole, in order, and at the end of the connection an end."""

from __future__ import annotations

import os
import socket
import threading

from ckptrun.launch.wire import Channel, receive_with_fds, send_with_fds


def pair() -> tuple[Channel, Channel]:
    ours, theirs = Channel.pair()
    return ours, Channel(theirs)


def test_messages_arrive_in_order_with_their_fields() -> None:
    ours, theirs = pair()
    ours.send("one", a=1, b=[None, "x\ny"])
    ours.send("two")
    ours.close()
    assert list(theirs.messages()) == [{"op": "one", "a": 1, "b": [None, "x\ny"]}, {"op": "two"}]
    assert theirs.closed
    theirs.close()


def test_a_message_in_pieces_is_one_message() -> None:
    ours, theirs = Channel.pair()
    theirs.send(b'{"op": "lo')
    assert ours.receive() == []
    theirs.send(b'ng"}\n{"op"')
    assert ours.receive() == [{"op": "long"}]
    theirs.send(b': "next"}\n')
    assert ours.receive() == [{"op": "next"}]
    theirs.close()
    assert ours.receive() == []
    assert ours.closed
    ours.close()


def test_a_large_message_comes_whole_while_many_threads_send() -> None:
    ours, theirs = pair()
    text = "x" * 300_000
    threads = [
        threading.Thread(target=ours.send, args=("big",), kwargs={"n": n, "text": text}) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    found: list[int] = []
    while len(found) < 4:
        for message in theirs.receive():
            assert message["text"] == text
            found.append(message["n"])
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1, 2, 3]
    ours.close()
    theirs.close()


def test_nobody_there() -> None:
    ours, theirs = pair()
    theirs.close()
    assert not ours.send("lost")
    ours.close()
    assert not ours.send("lost")


def test_open_files_travel_and_are_not_inherited() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read, write = os.pipe()
    send_with_fds(ours, {"op": "fork"}, b"p" * 1_000_000, [write])
    os.close(write)
    received = receive_with_fds(theirs)
    assert received is not None
    message, payload, (fd,) = received
    assert (message, len(payload)) == ({"op": "fork"}, 1_000_000)
    assert not os.get_inheritable(fd)
    os.write(fd, b"through")
    assert os.read(read, 100) == b"through"
    for each in (fd, read):
        os.close(each)
    ours.close()
    assert receive_with_fds(theirs) is None
    theirs.close()
