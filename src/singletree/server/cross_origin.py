"""Decide which web pages may use the server: check ``Origin`` and ``Host``, and send CORS headers to allowed origins.

A browser lets any page send requests to a server on loopback or in the local network. Two checks keep such pages out:

- ``Origin`` names the page. Browsers set it on every WebSocket and on every request that is not GET or HEAD, whatever
  its content type (https://fetch.spec.whatwg.org/#origin-header). Clients that are not browsers send none.
- ``Host`` names the server as the client knows it. A page whose own name was made to resolve to this machine (DNS
  rebinding) has the same origin as the server, so only the name reveals it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from singletree.errors import BadConfiguration, ForbiddenAddress, ForbiddenHost, ForbiddenOrigin

LOCAL_NAMES = ("localhost", "*.localhost", "host.docker.internal", "host.containers.internal")
"""Names of this machine that nobody else can register: RFC 6761 reserves ``.localhost``, and ICANN reserves
``.internal``, in which containers find their host."""

_ANY = "*"
_DEFAULT_PORTS = {"http": "80", "https": "443", "ws": "80", "wss": "443"}
_PREFLIGHT_SECONDS = 600
_METHODS = "GET, POST, DELETE, HEAD, OPTIONS"
_SHOWN = 128
_OTHER_SITES = (b"cross-site", b"same-site")
_BROWSER_HEADERS = frozenset((b"origin", b"sec-fetch-site"))
"""Every request that ``check`` may refuse for its page has one of them."""
_LONGEST_HOST = 320
"""Most characters of a host name (253) with a port, or of an address with its zone; longer text is not a name."""
_HOSTS = 256
"""How many decisions about host names are kept."""

Header = tuple[bytes, bytes]
Scope = Mapping[str, Any]
"""That of ASGI, of which this module needs the type alone: commands without a server check settings by it, too."""


class Origin(NamedTuple):
    """An origin, or a pattern of origins: each field may be ``*``, and a host may begin with ``*.``.

    ``port`` is empty for the scheme's own port. The opaque origin ``null`` has the scheme ``null`` and no host.
    """

    scheme: str
    host: str = ""
    port: str = ""

    def matches(self, other: Origin) -> bool:
        if self == _ANY_ORIGIN:
            return True
        if self.host == _ANY and not self.port:
            return self.scheme == other.scheme
        return (
            self.scheme == other.scheme and _covers(self.host, other.host) and self.port in (_ANY, other.port)
        )


_ANY_ORIGIN = Origin(_ANY)


def read_origin(text: str) -> Origin | None:
    """Read an origin, or a pattern of origins; None for text that is neither."""
    if text in (_ANY, "null"):
        return Origin(text)
    scheme, found, rest = text.partition("://")
    if not found or not scheme.isascii() or any(c in rest for c in "/?#@") or not rest.isprintable():
        return None
    host, port = _split_port(rest)
    name, scheme = _plain_host(host), scheme.lower()
    if ":" in name and _address(name) is None:
        return None
    return Origin(scheme, name, "" if port == _DEFAULT_PORTS.get(scheme) else port)


@dataclass(frozen=True, eq=False)  # eq: decisions are kept for a policy, and its value takes long to hash
class CrossOriginPolicy:
    """Decides which pages may use the server, and under which names it may be reached.

    Attributes:
        origins: patterns of foreign origins that may use the server.
        hosts: patterns of its names; None where any name is allowed.
        literal_addresses: whether any IP address is allowed as a name too, as when it listens on all addresses.
    """

    origins: tuple[Origin, ...] = ()
    hosts: tuple[str, ...] | None = None
    literal_addresses: bool = False

    def check(self, scope: Scope) -> str | None:
        """Check the origin and the host name of a request, and return its foreign origin; None where it has none.

        Raises:
            ForbiddenHost: the name under which the client reached the server is not known.
            ForbiddenOrigin: the request comes from a page of another origin that is not allowed.
        """
        hosts = _values(scope, b"host")
        for host in hosts:
            if not self._knows(host):
                raise ForbiddenHost(host[:_SHOWN])
        if _BROWSER_HEADERS.isdisjoint(dict(scope["headers"])):
            return None
        return self._check_page(scope, hosts)

    def check_trusted_name(self, scope: Scope) -> None:
        """Check that no web page can have chosen the host name of a request that ``check`` has passed.

        Where any name is allowed, only those of loopback are certain: a page may have its own name resolve to here.
        Raises ForbiddenAddress for another name.
        """
        for host in _values(scope, b"host"):
            if self.hosts is None and not _LOOPBACK._knows(host):
                raise ForbiddenAddress(host[:_SHOWN])

    def _check_page(self, scope: Scope, hosts: Sequence[str]) -> str | None:
        foreign = None
        for text in _values(scope, b"origin"):
            if any(_is_same(text, host) for host in hosts):
                continue
            if not self._allows(text):
                raise ForbiddenOrigin(text[:_SHOWN])
            foreign = text
        if foreign is None and _is_hidden_page(dict(scope["headers"])):
            raise ForbiddenOrigin("")
        return foreign

    def _knows(self, host: str) -> bool:
        return self.hosts is None or (len(host) <= _LONGEST_HOST and _is_covered(self, host))

    def _allows(self, text: str) -> bool:
        origin = read_origin(text)
        return origin is not None and any(pattern.matches(origin) for pattern in self.origins)

    def headers(self, origin: str | None, answer: Iterable[Header]) -> list[Header]:
        """Return the headers that let a page of ``origin``, from ``check``, read an answer with other headers."""
        # A cache must not send an answer for one origin to another.
        varies = [(b"vary", b"Origin")] if self.origins else []
        if origin is None:
            return varies
        names = b", ".join(dict.fromkeys(name for name, _ in answer))
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", names),
            *varies,
        ]


_LOOPBACK = CrossOriginPolicy(hosts=LOCAL_NAMES)


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


@lru_cache(_HOSTS)
def _is_covered(policy: CrossOriginPolicy, host: str) -> bool:
    name = _plain_host(_split_port(host)[0])
    address = _address(name)
    if address is not None and (policy.literal_addresses or address.is_loopback):
        return True
    return any(_covers(pattern, name) for pattern in policy.hosts or ())


def policy_for(
    host: str, address: str | None, *, allowed_origins: Sequence[str] = (), allowed_hosts: Sequence[str] = ()
) -> CrossOriginPolicy:
    """Make the policy of a server that is configured to listen on ``host``.

    Where the server listens only on loopback, the names of loopback, ``host`` and ``allowed_hosts`` are allowed.
    Elsewhere the server cannot know the names that clients use, so any name is allowed unless ``allowed_hosts`` is set.

    Args:
        address: the IP address that it listens on; None where another program listens for it.

    Raises BadConfiguration where a pattern cannot be read.
    """
    origins = tuple(_origin_pattern(text) for text in allowed_origins)
    listed = tuple(_host_pattern(text) for text in allowed_hosts)
    bound = _address(_plain_host(address or ""))
    on_loopback = bound is not None and bound.is_loopback
    if _ANY in listed or not (listed or on_loopback):
        return CrossOriginPolicy(origins)
    own = tuple(_plain_host(each) for each in (host, address) if each)
    everywhere = bound is not None and bound.is_unspecified
    return CrossOriginPolicy(origins, (*LOCAL_NAMES, *own, *listed), literal_addresses=everywhere)


def is_preflight(scope: Scope) -> bool:
    """Tell whether a browser asks what a page may send (https://fetch.spec.whatwg.org/#cors-preflight-fetch)."""
    has_headers = dict(scope["headers"]).keys() >= {b"origin", b"access-control-request-method"}
    return scope["type"] == "http" and scope["method"] == "OPTIONS" and has_headers


def preflight_headers(scope: Scope) -> dict[str, str]:
    """Return what a preflight of an allowed origin is answered with: all is allowed, and the routes check it later."""
    allowed = {
        "access-control-allow-methods": _METHODS,
        "access-control-allow-headers": next(iter(_values(scope, b"access-control-request-headers")), "*"),
        "access-control-max-age": str(_PREFLIGHT_SECONDS),
        "vary": "Access-Control-Request-Headers",
    }
    if "true" in _values(scope, b"access-control-request-private-network"):
        allowed["access-control-allow-private-network"] = "true"
    return allowed


def _is_hidden_page(headers: Mapping[bytes, bytes]) -> bool:
    """Tell whether a page of another site sent a request without its origin, as for an image or a script. Following a
    link to the server is not such a request: the page cannot read the answer.
    """
    sent_by, mode = headers.get(b"sec-fetch-site"), headers.get(b"sec-fetch-mode")
    return sent_by in _OTHER_SITES and mode != b"navigate" and b"origin" not in headers


def _is_same(text: str, host: str) -> bool:
    """Tell whether an origin is the server's own. The scheme is ignored: a proxy may have removed TLS."""
    origin = read_origin(text)
    if origin is None or origin.scheme not in ("http", "https"):
        return False
    name, port = _split_port(host)
    own = "" if port == _DEFAULT_PORTS[origin.scheme] else port
    return (origin.host, origin.port) == (_plain_host(name), own)


def _origin_pattern(text: str) -> Origin:
    trimmed = text.strip()
    origin = read_origin(trimmed.removesuffix("/") if trimmed.count("/") == 3 else trimmed)
    if origin is None or (
        origin.host.count(_ANY) and origin.host != _ANY and not origin.host.startswith("*.")
    ):
        raise BadConfiguration(
            f"--allowed-origins {text!r} is not an origin; write SCHEME://HOST:PORT such as http://localhost:3000, "
            "with * for the host or the port, null, or * for any"
        )
    return origin


def _host_pattern(text: str) -> str:
    name = _plain_host(_split_port(text.strip())[0])
    bare = name.removeprefix("*.")
    if name != _ANY and (
        not bare or any(c in bare for c in "*/@ ") or (":" in bare and _address(bare) is None)
    ):
        raise BadConfiguration(
            f"--allowed-hosts {text!r} is not a host name; write one such as models.example.com, *.example.com for "
            "all below it, or * for any"
        )
    return name


def _covers(pattern: str, host: str) -> bool:
    if pattern.startswith("*."):
        return host.endswith(pattern[1:]) and len(host) > len(pattern) - 1
    return pattern in (_ANY, host)


def _split_port(text: str) -> tuple[str, str]:
    """Split ``HOST:PORT``. An IPv6 address keeps its brackets; without brackets it has no port."""
    host, _, port = text.rpartition(":")
    is_port = not port or port == _ANY or (port.isascii() and port.isdecimal())
    if not host or not is_port or (":" in host and not host.endswith("]")):
        return text, ""
    return host, port


def _plain_host(host: str) -> str:
    """Return the normal form of a host name: lower case, no brackets, no zone, no dot at the end."""
    name = host.strip().lower().rstrip(".")
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    return name.partition("%")[0]


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
