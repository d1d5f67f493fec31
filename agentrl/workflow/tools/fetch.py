"""fetch: the text of a web page on a host in AGENTRL_FETCH_HOSTS. If the variable names no host, the tool is off.

The variable lists host names and addresses, each with `:PORT` unless the port is 80 or 443. `*.example.org` allows every host
below example.org. A redirect is followed only to a host on the list. A name that resolves to a private address is refused,
unless the address itself is on the list. The request goes to exactly the address that was checked. No proxies, credentials or
cookies are used.
"""

import codecs
import ipaddress
import re
import socket
import time
from collections.abc import Callable, Sequence

import httpx2

from agentrl.workflow.errors import ConfigError, ToolFailure
from agentrl.workflow.runtime.html_text import PageTooLong, text_of
from agentrl.workflow.runtime.time_limit import within
from agentrl.workflow.settings import settings
from agentrl.workflow.tools import Tool

SECONDS = 10.0
MAX_BYTES = 1_000_000
MAX_CHARACTERS = 8000
MAX_REDIRECTS = 3
CHARSETS = re.compile(r"ascii|utf-(?:8|16|32)|iso8859|cp[0-9]|mac|koi8|gb|big5|shift|euc|hz|johab|tis|kz1048|ptcp154|iso2022")
PORTS = {"http": 80, "https": 443}
TEXTS = ("text/", "application/json", "application/xml", "application/xhtml", "application/rss", "application/atom")
ENTRY = re.compile(r"(?P<name>\[[0-9a-f:]+\]|(?:\*\.)?[\w.-]+)(?::(?P<port>[0-9]{1,5}))?")
HINT = "Set hosts: AGENTRL_FETCH_HOSTS=docs.python.org,*.example.org"


def fetch_from(hosts: Sequence[str]) -> Tool:
    """Create a fetch tool for these hosts."""
    return _tool(lambda: hosts)


def _tool(allowed: Callable[[], Sequence[str]], variables: tuple[str, ...] = ()) -> Tool:
    def fetch(url: str) -> str:
        """Fetches a web page by its http:// or https:// URL and returns its text."""
        return get(url, allowed())

    limits = (SECONDS + 5.0, MAX_CHARACTERS)
    return Tool(fetch, "repeatable", *limits, needs=lambda: check(allowed()), variables=variables)


def check(hosts: Sequence[str]) -> None:
    """Check that the list of hosts is valid and not empty.

    Raises:
        ConfigError: the list has no host, or an entry is not a host.
    """
    if not hosts:
        raise ConfigError("The tool fetch is off: no host is allowed.", HINT)
    for host in hosts:
        _is_allowed(host, "", 0)


def get(url: str, hosts: Sequence[str]) -> str:
    """Return the text of the page at a URL.

    Raises:
        ToolFailure: the URL's host is not among `hosts`, or the page is too slow, too large, or not text.
    """
    check(hosts)
    end = time.monotonic() + SECONDS
    for _ in range(MAX_REDIRECTS + 1):
        result = _fetch_once(_url(url), hosts, end)
        if isinstance(result, str):
            return result
        url = str(result)
    raise ToolFailure(f"{url[:200]} was redirected more than {MAX_REDIRECTS} times")


def _url(text: str) -> httpx2.URL:
    try:
        url = httpx2.URL(text)
    except (httpx2.InvalidURL, ValueError) as error:
        raise ToolFailure(f"{text[:200]!r} is not a URL: {error}") from error
    if url.scheme not in PORTS or not url.host:
        raise ToolFailure(f"{text[:200]!r} is not an http:// or https:// URL")
    if url.userinfo:
        raise ToolFailure("a URL with a password in it is not fetched")
    return url


def _fetch_once(url: httpx2.URL, hosts: Sequence[str], end: float) -> str | httpx2.URL:
    """Send one request. Return the text of the page, or the URL of a redirect."""
    address = _address(url, hosts)
    try:
        response, read = within(max(0.1, end - time.monotonic()), _request(url, address))
        if response.has_redirect_location:
            return url.join(response.headers["Location"])
        return _text(response, read)
    except TimeoutError as error:
        raise ToolFailure(f"the page took longer than {SECONDS:g} s") from error
    except (httpx2.TransportError, httpx2.InvalidURL, httpx2.DecodingError) as error:
        raise ToolFailure(f"{url.host} does not answer: {type(error).__name__}: {str(error)[:300]}") from error


async def _request(url: httpx2.URL, address: str) -> tuple[httpx2.Response, bytes]:
    headers = {"Host": url.netloc.decode("ascii"), "Accept": "text/*, application/json", "Accept-Encoding": "identity"}
    # The request goes to the address, so that a second lookup of the name cannot lead elsewhere; certificates name the host.
    where, name = url.copy_with(host=address), {"sni_hostname": url.host}
    async with (
        httpx2.AsyncClient(trust_env=False, follow_redirects=False, timeout=None) as client,
        client.stream("GET", where, headers=headers, extensions=name) as response,
    ):
        return response, b"" if response.has_redirect_location else await _read(response)


def _address(url: httpx2.URL, hosts: Sequence[str]) -> str:
    """Return an address of the URL's host, after checking that requests to it are allowed."""
    port = url.port or PORTS[url.scheme]
    if not any(_is_allowed(host, url.host, port) for host in hosts):
        raise ToolFailure(f"{url.host}:{port} may not be fetched; allowed: {', '.join(hosts)}")
    try:
        infos = socket.getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ToolFailure(f"there is no host {url.host!r}") from error
    addresses = [str(item[4][0]) for item in infos]
    for address in addresses:
        # An address that is itself on the list is intended, private or not.
        if url.host != address and not _is_public(address):
            raise ToolFailure(f"{url.host} is at a private address and is not fetched")
    return addresses[0]


def _is_allowed(allowed: str, host: str, port: int) -> bool:
    entry = ENTRY.fullmatch(allowed.strip().lower())
    if entry is None:
        raise ConfigError(f"{allowed!r} is not a host, so the tool fetch cannot access it.", HINT)
    ports = (int(entry["port"]),) if entry["port"] else tuple(PORTS.values())
    name = entry["name"].strip("[]")
    return port in ports and (host.lower().endswith(name[1:]) if name.startswith("*.") else host.lower() == name)


def _is_public(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(ip, "ipv4_mapped", None)
    return (mapped or ip).is_global and not (mapped or ip).is_multicast


async def _read(response: httpx2.Response) -> bytes:
    kind = _content_type(response)
    if response.status_code >= 300:
        raise ToolFailure(f"the page answers {response.status_code} {response.reason_phrase}")
    if not kind.startswith(TEXTS):
        raise ToolFailure(f"the page is {kind[:100]}, not text")
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise ToolFailure("the page is compressed, which was not asked for")  # it might decompress to any size
    read = bytearray()
    async for part in response.aiter_raw():
        read += part
        if len(read) > MAX_BYTES:
            raise ToolFailure(f"the page is longer than {MAX_BYTES} bytes")
    return bytes(read)


def _text(response: httpx2.Response, read: bytes) -> str:
    text = read.decode(_charset(response), errors="replace")
    try:
        return text_of(text) if "html" in _content_type(response) else text
    except PageTooLong as error:
        raise ToolFailure("finding the text in the page takes too long") from error


def _content_type(response: httpx2.Response) -> str:
    return str(response.headers.get("Content-Type", "text/plain")).lower()


def _charset(response: httpx2.Response) -> str:
    """Return the character encoding of the page. If it names another codec of Python, such as punycode, return UTF-8, because
    these codecs are slow.
    """
    try:
        name = codecs.lookup(response.charset_encoding or "utf-8").name
    except (LookupError, ValueError):
        return "utf-8"
    return name if CHARSETS.match(name) else "utf-8"


def _allowed_hosts() -> list[str]:
    return [host.strip() for host in settings().fetch_hosts.split(",") if host.strip()]


fetch = _tool(_allowed_hosts, ("AGENTRL_FETCH_HOSTS",))
