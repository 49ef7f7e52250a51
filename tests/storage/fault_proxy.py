"""A proxy before an S3 service that counts requests and makes chosen ones fail.

It forwards a request whole, with its Host header, so that signatures hold.
"""

import contextlib
import http.client
import http.server
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Request:
    """One request as it came in."""

    number: int
    method: str
    path: str
    headers: Mapping[str, str]

    @property
    def puts_object(self) -> bool:
        return self.method == "PUT" and "/objects/" in self.path

    @property
    def gets_object(self) -> bool:
        return self.method == "GET" and "/objects/" in self.path


@dataclass(frozen=True)
class Refusal:
    """An S3 error instead of the service's answer."""

    status: int
    code: str


@dataclass(frozen=True)
class Reset:
    """The connection is reset: before the request is forwarded, or amid the answer's body."""

    in_answer: bool = False


@dataclass(frozen=True)
class Stall:
    """Nothing is answered for as long as the proxy lives."""


@dataclass(frozen=True)
class Slow:
    """The answer comes at so many bytes a second."""

    bytes_per_second: int


Fault = Refusal | Reset | Stall | Slow


class FaultProxy(http.server.ThreadingHTTPServer):
    """`fault` decides on each request; None passes it on."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        parts = urlsplit(upstream)
        self.upstream = (str(parts.hostname), int(parts.port or 80))
        self.fault: Callable[[Request], Fault | None] = lambda request: None
        self.requests: list[Request] = []
        self.ended = threading.Event()
        self.lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def take(self) -> list[Request]:
        """Give the requests since the last call."""
        with self.lock:
            taken, self.requests = self.requests, []
        return taken

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away, and a service that is down, are what the tests are about."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultProxy

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.server.lock:
            number = len(self.server.requests)
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Request(number, self.command, self.path, headers)
            self.server.requests.append(request)
        match self.server.fault(request):
            case Refusal(status, code):
                text = f"<Error><Code>{code}</Code></Error>".encode()
                self._answer(status, {"Content-Type": "application/xml"}, text)
            case Reset(in_answer=False):
                self._reset()
            case Stall():
                self.server.ended.wait()
                self.close_connection = True
            case fault:
                self._forward(body, fault)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle  # noqa: N815

    def _forward(self, body: bytes, fault: Fault | None) -> None:
        upstream = http.client.HTTPConnection(*self.server.upstream, timeout=30)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                upstream.putheader(name, value)
            upstream.endheaders(body)
            answer = upstream.getresponse()
            content = answer.read()
        except OSError:
            self._reset()
            return
        finally:
            upstream.close()
        self._answer(answer.status, dict(answer.getheaders()), content, fault)

    def _answer(
        self, status: int, headers: Mapping[str, str], content: bytes, fault: Fault | None = None
    ) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        length = headers.get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        if isinstance(fault, Reset):
            self.wfile.write(content[: len(content) // 2])
            self._reset()
        elif isinstance(fault, Slow):
            step = max(1, fault.bytes_per_second // 20)
            for start in range(0, len(content), step):
                self.wfile.write(content[start : start + step])
                time.sleep(0.05)
        else:
            self.wfile.write(content)

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def fault_proxy(upstream: str) -> Iterator[FaultProxy]:
    """Run a proxy before the service at this URL."""
    with FaultProxy(upstream) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield proxy
        finally:
            proxy.ended.set()
            proxy.shutdown()
            thread.join()
