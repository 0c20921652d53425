"""Tell public addresses from those that a server must not be sent to."""

from __future__ import annotations

import ipaddress

# What ipaddress calls global but is not to be reached for a stranger.
_REFUSED = [
    ipaddress.ip_network(text)
    for text in (
        "192.0.0.0/24",  # for protocols and clouds; older Pythons know only parts of it
        "192.88.99.0/24",  # relays from IPv6 to IPv4 (RFC 7526)
        "168.63.129.16/32",  # a cloud's own services, seen from its machines
        "3fff::/20",  # documentation (RFC 9637), unknown to older Pythons
    )
]
_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Return whether ``address`` (numeric, IPv4 or IPv6) is one that anybody may ask for.

    IPv4 addresses inside of IPv6 ones (mapped, 6to4, Teredo, NAT64) count as what they lead to.
    ``ipaddress.is_global`` alone lets loopback pass in three of these forms, and multicast.
    """
    try:
        return _is_public(ipaddress.ip_address(address))
    except ValueError:
        return False


def _is_public(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.scope_id is not None:
            return False
        inner = _inside(ip)
        if inner is not None:
            return all(_is_public(one) for one in inner)
        if ip not in _UNICAST:  # among others 64:ff9b:1::/48, and IPv4 in the last bits of ::/96
            return False
    if ip.is_multicast or ip.is_reserved or not ip.is_global:
        return False
    return not any(ip in network for network in _REFUSED if network.version == ip.version)


def _inside(ip: ipaddress.IPv6Address) -> list[ipaddress.IPv4Address] | None:
    """Return the IPv4 addresses that an IPv6 address leads to, None where it is one of its own."""
    if ip.ipv4_mapped is not None:
        return [ip.ipv4_mapped]
    if ip.sixtofour is not None:
        return [ip.sixtofour]
    if ip.teredo is not None:
        return list(ip.teredo)
    if ip in _NAT64:
        return [ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)]
    return None
