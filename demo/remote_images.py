"""Pictures that a request names: data URIs always, web addresses only from hosts that the operator allows.

A name is resolved once and the connection goes to that address, which must be a public one; every redirect is a new
address and is checked like the first. So neither a redirect nor a name that changes its address leads inside.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin

from trimode_vlm.vision.images import open_image

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_REDIRECTS = 3
TIMEOUT_SEC = 10.0
# What browsers show, and TIFF. Pillow reads more, EPS with the help of Ghostscript, which strangers should not reach.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")


def read_image(
    source: Any, *, max_pixels: int, max_bytes: int, allowed_hosts: Sequence[str] = (), name: str = "image"
) -> Image:
    """Open the picture of an image_url part.

    Raises:
        ValueError: neither a data URI nor an address that may be fetched; not an image; too large. One line.
    """
    if not isinstance(source, str) or not source:
        raise ValueError(f"{name}: expected a data URI, got {type(source).__name__}")
    if source[:5].lower() == "data:":
        return open_image(source, max_pixels=max_pixels, name=name, formats=FORMATS)
    if not source.lower().startswith(("http://", "https://")):
        raise ValueError(f"{name}: only data URIs (data:image/png;base64,...) are read here, no paths or other schemes")
    if not allowed_hosts:
        raise ValueError(f"{name}: this server fetches no pictures from the web; send a data URI")
    content = fetch(source, allowed_hosts, max_bytes, name)
    return open_image(content, max_pixels=max_pixels, name=name, formats=FORMATS)


def fetch(url: str, allowed_hosts: Sequence[str], max_bytes: int, name: str) -> bytes:
    """The bytes behind an allowed address, read up to a limit.

    Raises:
        ValueError: a host that is not allowed, an address that is not public, too many redirects, a failed fetch.
    """
    import httpx

    for _ in range(MAX_REDIRECTS + 1):
        parsed = httpx.URL(url)
        if parsed.scheme not in ("http", "https") or parsed.host.lower() not in {h.lower() for h in allowed_hosts}:
            raise ValueError(f"{name}: this server does not fetch from {parsed.host or url!r}")
        address = public_address(parsed.host, name)
        pinned = parsed.copy_with(host=address)
        headers = {"Host": parsed.netloc.decode("ascii").rpartition("@")[2]}
        extensions = {"sni_hostname": parsed.host} if parsed.scheme == "https" else {}
        try:
            # trust_env=False: a proxy of the environment would resolve the name again.
            with (
                httpx.Client(trust_env=False, timeout=TIMEOUT_SEC, follow_redirects=False) as client,
                client.stream("GET", pinned, headers=headers, extensions=extensions) as response,
            ):
                if response.is_redirect and "location" in response.headers:
                    url = urljoin(url, response.headers["location"])
                    continue
                response.raise_for_status()
                return _read(response, max_bytes, name)
        except httpx.HTTPError as error:
            raise ValueError(f"{name}: could not fetch {parsed.host}: {error or type(error).__name__}") from None
    raise ValueError(f"{name}: more than {MAX_REDIRECTS} redirects")


def public_address(host: str, name: str) -> str:
    """One address of the host, all of which must be public.

    Raises:
        ValueError: the host is unknown, or some address of it is private, local or reserved.
    """
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        raise ValueError(f"{name}: the host {host!r} is not known") from None
    for text in found:
        address = ipaddress.ip_address(text.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None) or getattr(address, "sixtofour", None)
        if not address.is_global or address.is_multicast or (mapped is not None and not mapped.is_global):
            raise ValueError(f"{name}: {host!r} is not a public address")
    return min(found)


def _read(response: Any, max_bytes: int, name: str) -> bytes:
    body = bytearray()
    for chunk in response.iter_bytes():
        body += chunk
        if len(body) > max_bytes:
            raise ValueError(f"{name}: larger than {max_bytes} bytes")
    return bytes(body)
