"""Pictures from the web: what an operator allows and no more, whatever names, redirects and servers try."""

from __future__ import annotations

import base64
import io
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote

import pytest
from PIL import Image
from serving import need

need("httpx")

from trimode_vlm.demo import remote_images  # noqa: E402
from trimode_vlm.demo.remote_images import can_be_fetched_from, is_allowed, is_public, read_images  # noqa: E402

resolve = socket.getaddrinfo


def read_image(source: Any, name: str = "image", **options: Any) -> Image.Image:
    [image] = read_images({name: source}, **options)
    return image


def png(color: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 6), color).save(file, "PNG")
    return file.getvalue()


RED = png("red")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.seen.append((self.path, dict(self.headers)))  # type: ignore[attr-defined]
        what, _, rest = self.path[1:].partition("/")
        if what == "to":
            self.send_response(302)
            self.send_header("Location", self.server.targets[int(rest)])  # type: ignore[attr-defined]
            self.end_headers()
            return
        if what in ("404", "500"):
            self.send_error(int(what))
            return
        self.send_response(200)
        if what == "gzip":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        try:
            if what == "drip":
                while True:
                    self.wfile.write(b"x")
                    time.sleep(0.05)
            if what == "endless":
                while True:
                    self.wfile.write(b"x" * 65536)
            self.wfile.write({"text": b"hello", "empty": b""}.get(what, RED))
        except OSError:
            pass

    def log_message(self, *_: Any) -> None:
        pass


class Site:
    """Two servers on one port: 127.0.0.1 stands for a public address, 127.0.0.2 for one inside."""

    def __init__(self) -> None:
        self.public = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.public.server_address[1]
        self.inside = ThreadingHTTPServer(("127.0.0.2", self.port), Handler)
        self.targets: list[str] = []
        self.names: dict[str, list[str]] = {"img.test": ["127.0.0.1"]}
        self.lookups: list[str] = []
        for server in (self.public, self.inside):
            server.seen, server.targets = [], self.targets  # type: ignore[attr-defined]
            threading.Thread(target=server.serve_forever, daemon=True).start()

    def getaddrinfo(self, host: Any, port: Any, *args: Any, **options: Any) -> Any:
        """Names get their addresses in turn, the last one from then on; numbers what they are."""
        name = host.decode() if isinstance(host, bytes) else str(host)
        if name not in self.names:
            return resolve(host, port, *args, **(options | {"flags": socket.AI_NUMERICHOST}))
        self.lookups.append(name)
        known = self.names[name]
        address = known.pop(0) if len(known) > 1 else known[0]
        return [i for each in address.split() for i in resolve(each, port, type=socket.SOCK_STREAM)]

    def read(self, path: str, host: str = "img.test", **options: Any) -> Image.Image:
        allowed = [f"img.test:{self.port}", f"other.test:{self.port}"]
        chosen: dict[str, Any] = {"max_pixels": 10_000, "max_bytes": 10_000, "allowed_hosts": allowed} | options
        return read_image(f"http://{host}:{self.port}{path}", **chosen)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    site = Site()
    monkeypatch.setattr(socket, "getaddrinfo", site.getaddrinfo)
    monkeypatch.setattr(remote_images, "is_public", lambda text: text == "127.0.0.1" or is_public(text))
    monkeypatch.setattr(remote_images, "TIMEOUT_SEC", 60.0)
    yield site
    for server in (site.public, site.inside):
        server.shutdown()
        server.server_close()
    assert site.inside.seen == []  # type: ignore[attr-defined]


def test_an_allowed_picture_is_read(site: Site) -> None:
    assert site.read("/a.png").getpixel((0, 0)) == (255, 0, 0)
    [(path, headers)] = site.public.seen  # type: ignore[attr-defined]
    assert path == "/a.png" and headers["Host"] == f"img.test:{site.port}" and "Authorization" not in headers
    assert site.lookups == ["img.test"]


def test_redirects_within_the_allowed_are_followed_a_few_times(site: Site) -> None:
    site.names["other.test"] = ["127.0.0.1"]
    site.targets += [f"http://other.test:{site.port}/to/1", "/b.png", "/to/2"]
    assert site.read("/to/0").size == (8, 6)
    assert site.lookups == ["img.test", "other.test", "other.test"]
    with pytest.raises(ValueError, match="more than 3 redirects"):
        site.read("/to/2")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("http://127.0.0.2:{port}/x", "does not fetch from '127.0.0.2"),
        ("http://localhost:{port}/x", "does not fetch from 'localhost"),
        ("//evil.test/x", "does not fetch from 'evil.test"),
        ("http://img.test/x", "does not fetch from 'img.test"),  # another port
        ("http://other.test:{port}/x", "not a public address"),  # allowed, but it leads inside
        ("file:///etc/passwd", "does not fetch from"),
        ("gopher://img.test:{port}/x", "does not fetch from"),
        ("http://img.test:{port}@127.0.0.2/x", "does not fetch from '127.0.0.2"),
        ("http://[::1", "not an address|RemoteProtocolError"),
        ("http://img.test:999999/", "not an address|out of range|does not fetch"),
    ],
)
def test_a_redirect_leads_nowhere_else(site: Site, target: str, words: str) -> None:
    site.names["other.test"] = ["127.0.0.2"]
    site.targets.append(target.format(port=site.port))
    with pytest.raises(ValueError, match=words) as caught:
        site.read("/to/0")
    assert "\n" not in str(caught.value)
    assert len(site.public.seen) == 1  # type: ignore[attr-defined]


def test_a_name_that_changes_its_address_does_not_lead_inside(site: Site) -> None:
    """The address that was checked is the one that is asked: a second lookup would give 127.0.0.2."""
    site.names["img.test"] = ["127.0.0.1", "127.0.0.2"]
    assert site.read("/a.png").size == (8, 6)
    assert site.lookups == ["img.test"]
    with pytest.raises(ValueError, match="not a public address"):
        site.read("/a.png")


def test_one_private_address_among_public_ones_is_enough(site: Site) -> None:
    site.names["img.test"] = ["127.0.0.1 10.0.0.1"]
    with pytest.raises(ValueError, match="not a public address"):
        site.read("/a.png")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/endless", "larger than 10000 bytes"),
        ("/drip", "no picture within 2 s"),
        ("/text", "not an image"),
        ("/empty", "empty"),
        ("/gzip", "sent as gzip"),
        ("/404", "could not fetch from img.test: 404"),
        ("/500", "could not fetch from img.test: 500"),
    ],
)
def test_what_a_server_may_send(site: Site, path: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "/drip":
        monkeypatch.setattr(remote_images, "TIMEOUT_SEC", 2.0)
    start = time.perf_counter()
    with pytest.raises(ValueError, match=words):
        site.read(path)
    assert time.perf_counter() - start < 50  # it ends at all


def test_a_server_that_is_not_there_and_a_name_that_is_unknown(site: Site) -> None:
    site.names["gone.test"] = ["127.0.0.1"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        chosen: dict[str, Any] = {
            "max_pixels": 100,
            "max_bytes": 100,
            "allowed_hosts": [f"gone.test:{port}", "no.test"],
        }
        with pytest.raises(ValueError, match="could not fetch from gone.test: ConnectError"):
            read_image(f"http://gone.test:{port}/x", **chosen)
    with pytest.raises(ValueError, match=r"'no.test' is not known"):
        read_image("http://no.test/x", **chosen)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.2", "2130706434", "0x7f000002", "0177.0.0.2", "127.2", "0", "[::1]", "[::ffff:127.0.0.2]",
        "[::ffff:7f00:2]", "169.254.169.254", "[fe80::1%25eth0]", "localhost", "img.test@127.0.0.2", "img.test.",
        "img.test%2e", "img.test%00.evil.test", "evil.test#img.test", "evil.test?img.test", "img.test\\@127.0.0.2",
        "ｉmg.test.evil.test", "127。0。0。2",
    ],
)  # fmt: skip
def test_other_ways_to_write_an_address_are_not_allowed(site: Site, host: str) -> None:
    with pytest.raises(ValueError):
        site.read("/a.png", host=host)
    assert site.public.seen == []  # type: ignore[attr-defined]


def test_numbers_in_disguise_are_private_even_where_they_are_allowed(site: Site, monkeypatch: Any) -> None:
    monkeypatch.setattr(remote_images, "is_public", is_public)
    for host in ("127.0.0.2", "2130706434", "0x7f000002", "0177.0.0.2", "127.2"):
        with pytest.raises(ValueError, match="not a public address|not known|not an address"):
            site.read("/a.png", host=host, allowed_hosts=[f"{host}:{site.port}", f"127.0.0.2:{site.port}"])


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1",
        "255.255.255.255", "198.18.0.1", "::", "::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:10.0.0.1",
        "::127.0.0.1", "64:ff9b::127.0.0.1", "64:ff9b::a00:1", "64:ff9b:1::1", "2002:7f00:1::", "2002:a00:1::1",
        "2001:db8::1", "2001:0:a00:1::", "240.0.0.1", "192.0.2.1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(text: str) -> None:
    assert not is_public(text)


@pytest.mark.parametrize("text", ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "64:ff9b::808:808"])
def test_addresses_that_are_public(text: str) -> None:
    assert is_public(text)


def test_hosts_and_ports() -> None:
    entries = ["a.test", "b.test:8080", "Ünï.test"]
    assert is_allowed("https", "A.test", None, entries) and is_allowed("http", "b.test", 8080, entries)
    assert is_allowed("http", "ünï.test", None, entries)
    for scheme, host, port in (("http", "a.test", 22), ("http", "b.test", None), ("ftp", "a.test", None)):
        assert not is_allowed(scheme, host, port, entries)
    assert is_allowed("https", "c.test", None, ["c.test:443"]) and not is_allowed(
        "http", "c.test", None, ["c.test:443"]
    )
    assert is_allowed("http", "2606:4700::1111", 81, ["[2606:4700::1111]:81"])
    for host in ("", "xa.test", "a.test.evil", "test"):
        assert not is_allowed("http", host, None, entries)


@pytest.mark.parametrize(
    "entry",
    ["img.test", "IMG.test:8080", "img.test:443", "ünï.test", "1.1.1.1", "[2606:4700::1111]", "[2606:4700::1111]:81"],
)
def test_hosts_that_pictures_can_come_from(entry: str) -> None:
    assert can_be_fetched_from(entry)


@pytest.mark.parametrize(
    "entry",
    [
        "https://img.test", "img.test/pictures", "*.img.test", "*", "img.test:port", "img test", "user@img.test", ":80",
        "127.0.0.1", "10.0.0.1:80", "[::1]", "2606:4700::1111", "img.test?x", "img.test#x", "img.test:",
        "xn--nxasmq6b.test",
    ],
)  # fmt: skip
def test_hosts_that_no_picture_can_come_from(entry: str) -> None:
    assert not can_be_fetched_from(entry)


def opened(source: Any, **options: Any) -> Image.Image:
    return read_image(source, **({"max_pixels": 10_000, "max_bytes": 10_000, "name": "image 1"} | options))


def test_data_uris_in_odd_clothes() -> None:
    text = base64.b64encode(RED).decode()
    for source in (
        f"data:image/png;base64,{text}",
        f"DATA:image/png;BASE64,{text}",
        f"data:;base64,{text}",
        f"data:image/jpeg;charset=utf-8;base64,{text}",
        f"data:image/png;base64,{text.rstrip('=')}",
        f"data:image/png;base64,{text[:20]}\n {text[20:]}",
        f"data:image/png;base64,{quote(text)}",
        f"data:image/png,{quote(RED)}",
    ):
        assert opened(source).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize(
    "source",
    [
        None, 5, "", b"x", [], {}, "data:", "data:,", "data:image/png;base64", "data:image/png;base64,", "data:,hello",
        "data:image/png;base64,A", "data:image/png;base64,%%%", "data:image/png;base64,é",
        "data:,\ud800", "data:image/png;base64,\ud800",
        " data:image/png;base64,AAAA",
        "data:image/svg+xml;base64," + base64.b64encode(b"<svg xmlns='http://www.w3.org/2000/svg'/>").decode(),
        "javascript:alert(1)", "ftp://img.test/x", "file:///etc/passwd", "/etc/passwd", "../x.png", "blob:x",
        "http://img.test/x.png", "HTTPS://IMG.TEST/x.png",
    ],
)  # fmt: skip
def test_what_is_no_picture_is_refused_in_one_line(source: Any) -> None:
    with pytest.raises(ValueError, match="^image 1: ") as caught:
        opened(source)
    assert "\n" not in str(caught.value) and "hello" not in str(caught.value)


def test_a_half_character_in_an_address_names_the_picture() -> None:
    for source in ("http://img.test/\ud800", "http://\ud800.test/x", "http://img.test/x?\ud800"):
        with pytest.raises(ValueError, match="^image 1: "):
            opened(source, allowed_hosts=["img.test"])


def test_pictures_too_large_together_are_refused_before_any_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "data:image/png;base64," + base64.b64encode(RED).decode()
    size = {"max_pixels": 48, "max_bytes": 10_000}
    assert len(read_images({f"image {i}": source for i in range(4)}, **size)) == 4
    monkeypatch.setattr(remote_images, "open_image", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(ValueError, match="^image 5: the pictures of this request have 240 pixels.*the 192 in all"):
        read_images({f"image {i}": source for i in range(1, 6)}, **size)
