"""By which address, and over which network interface, other nodes reach this one."""

import fcntl
import ipaddress
import socket
import struct
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from rltrain.errors import StallError

SIOCGIFADDR = 0x8915
LONGEST_NAME_BYTES = 15
ADDRESS_IN_REPLY = slice(20, 24)
IPV6_ADDRESSES = Path("/proc/net/if_inet6")
SECOND_NODE = "second_node"


def address_among_nodes(store: dist.Store, rank: int, begins_second: bool, master: str, timeout_s: float) -> str:
    """This node's address on the route to `master`, the name of the first node.

    The first node's own route to itself is loopback, so there it is that of the route to the second one, whose first
    rank (`begins_second`) leaves its address in `store`. Collective over: all ranks of a job over several nodes.
    """
    address = own_address(master)
    if begins_second:
        store.set(SECOND_NODE, address)
    if not ipaddress.ip_address(address).is_loopback:
        return address
    try:
        store.wait([SECOND_NODE], timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        raise StallError(
            f"rank {rank} has waited {timeout_s:g} s for the address of the second node: {error}"
        ) from error
    return own_address(store.get(SECOND_NODE).decode())


def own_address(peer: str) -> str:
    """Where packets to `peer`, a name or address, come from. Sends nothing."""
    found = socket.getaddrinfo(peer, 1, type=socket.SOCK_DGRAM)
    family, _, _, _, there = min(found, key=lambda one: one[0] != socket.AF_INET)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)
        return str(probe.getsockname()[0])


def interface_with(address: str) -> str | None:
    """The name of this node's interface that has `address`; None where no interface tells."""
    if ":" in address:
        digits = ipaddress.IPv6Address(address).exploded.replace(":", "")
        lines = IPV6_ADDRESSES.read_text().splitlines() if IPV6_ADDRESSES.exists() else []
        return next((line.split()[-1] for line in lines if line.startswith(digits)), None)
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if _ipv4_address(name) == address), None)


def address_of(interface: str) -> str | None:
    """The IPv4 address of this node's interface of that name, the first of several; None where it has none."""
    return _ipv4_address(interface.split(",")[0])


def _ipv4_address(interface: str) -> str | None:
    name = struct.pack("256s", interface.encode()[:LONGEST_NAME_BYTES])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, name)[ADDRESS_IN_REPLY])
        except OSError:  # it has none
            return None
