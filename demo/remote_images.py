"""Pictures that a request names: data URIs always, web addresses only from hosts that the operator allows.

A name is resolved once and the connection goes to that address, which must be a public one; every redirect is a new
address and is checked like the first. So neither a redirect nor a name that changes its address leads inside.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin

from trimode_vlm.vision.images import image_size, open_image

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_REDIRECTS = 3
# Pixels of all pictures of a request, in largest pictures: a header of a few bytes can stand for a GiB of pixels.
MAX_LARGEST = 4
TIMEOUT_SEC = 10.0
PORTS = {"http": 80, "https": 443}
# IPv6 addresses whose last four bytes are one of IPv4: compatible ones, and those of NAT64.
LOCAL_NAT64 = ipaddress.IPv6Network("64:ff9b:1::/48")  # private by RFC 8215, which Python 3.11 does not know yet
CARRIES_IPV4 = [ipaddress.IPv6Network("::/96"), ipaddress.IPv6Network("64:ff9b::/96")]
# What browsers show, and TIFF. Pillow reads more, EPS with the help of Ghostscript, which strangers should not reach.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")


def read_images(
    sources: Mapping[str, Any], *, max_pixels: int, max_bytes: int, allowed_hosts: Sequence[str] = ()
) -> list[Image]:
    """Open the pictures of image_url parts, given by name; none before all of them are known to be small enough.

    Raises:
        ValueError: neither a data URI nor an address that may be fetched; not an image; too large, alone or together
            (MAX_LARGEST x `max_pixels`). One line.
    """
    found = {name: _find(source, max_bytes, allowed_hosts, name) for name, source in sources.items()}
    limit, total = MAX_LARGEST * max_pixels, 0
    for name, content in found.items():
        height, width = image_size(content, max_pixels=max_pixels, name=name, formats=FORMATS)
        total += height * width
        if total > limit:
            raise ValueError(
                f"{name}: the pictures of this request have {total} pixels up to here, more than the {limit} in all "
                "that this server takes"
            )
    return [open_image(content, max_pixels=max_pixels, name=name, formats=FORMATS) for name, content in found.items()]


def _find(source: Any, max_bytes: int, allowed_hosts: Sequence[str], name: str) -> str | bytes:
    """The data URI itself, or what lies behind an address."""
    if not isinstance(source, str) or not source:
        raise ValueError(f"{name}: expected a data URI, got {type(source).__name__}")
    if source[:5].lower() == "data:":
        return source
    if not source.lower().startswith(("http://", "https://")):
        raise ValueError(f"{name}: only data URIs (data:image/png;base64,...) are read here, no paths or other schemes")
    if not allowed_hosts:
        raise ValueError(f"{name}: this server fetches no pictures from the web; send a data URI")
    return fetch(source, allowed_hosts, max_bytes, name)


def fetch(url: str, allowed_hosts: Sequence[str], max_bytes: int, name: str) -> bytes:
    """The bytes behind an allowed address, read up to a limit. Not for a thread that runs an event loop.

    Raises:
        ValueError: a host that is not allowed, an address that is not public, too many redirects; a fetch that fails
            or takes too long.
    """
    try:
        # Over all: a server that sends a byte now and then never runs into the time-outs of its single reads.
        return asyncio.run(asyncio.wait_for(_fetch(url, allowed_hosts, max_bytes, name), TIMEOUT_SEC))
    except TimeoutError:
        raise ValueError(f"{name}: no picture within {TIMEOUT_SEC:g} s") from None


async def _fetch(url: str, allowed_hosts: Sequence[str], max_bytes: int, name: str) -> bytes:
    import httpx

    # trust_env=False: a proxy of the environment would resolve the name again.
    async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_SEC, follow_redirects=False) as client:
        for _ in range(MAX_REDIRECTS + 1):
            try:
                parsed = httpx.URL(url)
            except (httpx.InvalidURL, UnicodeEncodeError):  # JSON can spell half a character
                raise ValueError(f"{name}: not an address that can be read") from None
            if not is_allowed(parsed.scheme, parsed.host, parsed.port, allowed_hosts):
                raise ValueError(f"{name}: this server does not fetch from {parsed.netloc.decode('ascii') or url!r}")
            host = parsed.raw_host.decode("ascii")
            address = await asyncio.to_thread(public_address, host, name)
            # What could be unpacked without end is not asked for, and not taken.
            headers = {"Host": parsed.netloc.decode("ascii"), "Accept-Encoding": "identity"}
            extensions = {"sni_hostname": host} if parsed.scheme == "https" else {}
            pinned = parsed.copy_with(host=address, username=None, password=None)
            try:
                async with client.stream("GET", pinned, headers=headers, extensions=extensions) as response:
                    if response.is_redirect and "location" in response.headers:
                        url = urljoin(url, response.headers["location"])
                        continue
                    response.raise_for_status()
                    return await _read(response, max_bytes, name)
            except httpx.HTTPError as error:
                reason = getattr(getattr(error, "response", None), "status_code", type(error).__name__)
                raise ValueError(f"{name}: could not fetch from {parsed.host}: {reason}") from None
    raise ValueError(f"{name}: more than {MAX_REDIRECTS} redirects")


def is_allowed(scheme: str, host: str, port: int | None, allowed_hosts: Sequence[str]) -> bool:
    """Whether an entry names the host; its port too, but where that is the scheme's own (`port` None)."""
    allowed, host = {entry.lower() for entry in allowed_hosts}, host.lower()
    if scheme not in PORTS or not host:
        return False
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{port or PORTS[scheme]}" in allowed or (port is None and host in allowed)


def can_be_fetched_from(entry: str) -> bool:
    """Whether some address matches an entry of `allowed_hosts`, as far as can be told without looking it up."""
    import httpx

    if "*" in entry:
        return False
    try:
        urls = [httpx.URL(f"{scheme}://{entry}/") for scheme in PORTS]
        if not any(is_allowed(url.scheme, url.host, url.port, [entry]) for url in urls):
            return False
        return is_public(urls[0].host)
    except httpx.InvalidURL:
        return False
    except ValueError:  # a name, not an address
        return True


def public_address(host: str, name: str) -> str:
    """One address of the host, all of which must be public.

    Raises:
        ValueError: the host is unknown, or some address of it is private, local or reserved.
    """
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        raise ValueError(f"{name}: the host {host!r} is not known") from None
    if not all(map(is_public, found)):
        raise ValueError(f"{name}: {host!r} is not a public address")
    return min(found)


def is_public(text: str) -> bool:
    """Whether an address is reached through the public net, and any IPv4 address inside of it as well."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if not address.is_global or address.is_multicast or address in LOCAL_NAT64:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return True
    inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if any(address in network for network in CARRIES_IPV4):
        inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return all(each is None or each.is_global for each in inner)


async def _read(response: Any, max_bytes: int, name: str) -> bytes:
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise ValueError(f"{name}: sent as {response.headers['content-encoding']}, which was not asked for")
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > max_bytes:
            raise ValueError(f"{name}: larger than {max_bytes} bytes")
    return bytes(body)
