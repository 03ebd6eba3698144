"""Sockets for addresses of either kind."""

import socket


def family_of(host: str) -> socket.AddressFamily:
    """Of an address as text."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
