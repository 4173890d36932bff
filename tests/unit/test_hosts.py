"""Lists of hosts, meeting points, and messages between a launcher and an agent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unisono.errors import SettingsError
from unisono.launcher.hosts.host_list import ListedHost, assign_slots, parse_hosts
from unisono.launcher.hosts.message_stream import Message, MessageStream
from unisono.launcher.hosts.node_link import MeetingPoint
from unisono.launcher.hosts.ssh import reason_of


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:4,b:4", [("a", 4), ("b", 4)]),
        ("a,b", [("a", 0), ("b", 0)]),
        ("me@a.example.org:2", [("me@a.example.org", 2)]),
        ("[fd00::1]:3,fd00::2", [("fd00::1", 3), ("fd00::2", 0)]),
        (" a:1 , b:2 ", [("a", 1), ("b", 2)]),
    ],
)
def test_a_list_of_hosts(text: str, hosts: list[tuple[str, int]]) -> None:
    assert [host[:2] for host in parse_hosts(text)] == hosts


def test_this_host_is_recognized() -> None:
    assert [host.is_here for host in parse_hosts(f"localhost:1,{os.uname().nodename}-other,::1")] == [True, False, True]


def test_a_file_of_hosts(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# the cluster\na slots=4\nb:2   # half of it\n\nc slots = 1 max_slots=2\n")
    assert [host[:2] for host in parse_hosts(str(file))] == [("a", 4), ("b", 2), ("c", 1)]


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("a:0,b", "a has 0 slots; it needs a whole number of at least 1."),
        ("a:x", "a has x slots; it needs a whole number of at least 1."),
        ("a:", "a has no slots; it needs a whole number of at least 1."),
        ("a,b,a", "The host a is listed 2 times."),
        (",", "The list has no host."),
        ("-oProxyCommand=x", "-oProxyCommand=x is no name of a host."),
        ("a b", "a b is no name of a host."),
    ],
)
def test_a_wrong_list_is_one_message(text: str, fact: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_hosts(text)
    assert caught.value.problems[0].facts == fact


@pytest.mark.parametrize(
    ("slots", "ranks", "expected"),
    [((0, 0), 4, [2, 2]), ((0, 0, 0), 7, [2, 2, 3]), ((4, 0), 6, [4, 2]), ((4, 4), 6, [4, 4]), ((0, 0), 1, [1, 1])],
)
def test_slots_without_a_number_are_shared(slots: tuple[int, ...], ranks: int, expected: list[int]) -> None:
    hosts = [ListedHost(f"h{number}", count) for number, count in enumerate(slots)]
    assert [host.slots for host in assign_slots(hosts, ranks)] == expected


def test_more_processes_than_slots_are_refused() -> None:
    with pytest.raises(SettingsError, match="--ranks 9 is more than the hosts have room for"):
        assign_slots([ListedHost("a", 4), ListedHost("b", 4)], 9)


def test_a_meeting_point() -> None:
    assert MeetingPoint.parse("a:29500") == ("a", 29500)
    assert MeetingPoint.parse("[fd00::1]:1") == ("fd00::1", 1)
    for text in ("a", "a:", ":1", "a:0", "a:65536", "a:x"):
        with pytest.raises(SettingsError, match="Invalid value for --meet"):
            MeetingPoint.parse(text)


def test_messages_arrive_in_pieces() -> None:
    reader, writer = os.pipe()
    back, forth = os.pipe()
    sender, receiver = MessageStream(back, writer), MessageStream(reader, forth)
    sender.send(b"x" * 10, output=3)
    sender.send(ended=3, code=-9)
    whole = os.read(reader, 1 << 16)
    found: list[Message] = []
    for place in range(len(whole)):  # byte by byte
        os.write(writer, whole[place : place + 1])
        found += receiver.receive() or []
    assert found == [Message({"output": 3, "bytes": 10}, b"x" * 10), Message({"ended": 3, "code": -9}, b"")]
    os.write(writer, b"Welcome to this host!\n")
    with pytest.raises(ValueError, match="Expecting value"):
        receiver.receive()
    os.close(writer)
    assert receiver.receive() is None
    for each in (reader, back, forth):
        os.close(each)


@pytest.mark.parametrize(
    ("words", "status", "fact"),
    [
        (["ssh: Could not resolve hostname x: Name or service not known"], 255, "The name does not resolve."),
        (["Host key verification failed."], 255, "ssh does not know or does not accept its host key."),
        (["me@x: Permission denied (publickey)."], 255, "It accepts no key of this user."),
        (["bash: line 1: /opt/python: No such file or directory"], 127, "bash: line 1: /opt/python: No such file or "),
        ([], 255, "ssh ended with status 255 and no message."),
    ],
)
def test_why_a_connection_failed(words: list[str], status: int, fact: str) -> None:
    assert reason_of(words, status)[0].startswith(fact)
