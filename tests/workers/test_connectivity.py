"""Processes ask whether they reach each other."""

import socket
import threading

from stretto.workers.connectivity import LOOPBACK, ProbeServer, own_address, unreachable


def test_a_door_answers_whoever_knocks_until_it_is_closed():
    door = ProbeServer(LOOPBACK)
    try:
        assert unreachable({"a": door.place, "b": door.place}) == {}
    finally:
        door.close()
    assert unreachable({"a": door.place}) == {"a": f"{LOOPBACK} port {door.place[1]}: Connection refused"}


def test_somebody_else_behind_a_port_is_not_taken_for_one_of_ours():
    with socket.create_server((LOOPBACK, 0)) as server:
        thread = threading.Thread(target=lambda: server.accept()[0].close())
        thread.start()
        address, port = server.getsockname()
        assert unreachable({"a": (address, port)}) == {"a": f"{LOOPBACK} port {port}: something else answers"}
        thread.join()


def test_a_host_reaches_itself_from_its_own_address():
    assert own_address(LOOPBACK) == LOOPBACK
