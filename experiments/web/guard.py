"""Who may ask: the browser that opened the address which the program printed, and no page of another site in it."""

import secrets
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOST = "127.0.0.1"
MAX_BODY_BYTES = 20_000
_HEADERS = {
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True)
class Guard:
    """An application that only answers this `port` of this machine, and who knows its secrets.

    The `token` of the printed address gives a cookie, which no script sees and no other site sends: no other page may
    ask (cross-site requests), nor a name that was made to mean this machine (DNS rebinding: `Host`). A POST also says
    where it is from (`Origin`), and has at most `MAX_BODY_BYTES`.
    """

    app: ASGIApp
    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    _session: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    @property
    def address(self) -> str:
        """The address to open, with the token."""
        return f"http://{HOST}:{self.port}/?token={self.token}"

    @property
    def _cookie(self) -> str:
        return f"hexiopt-{self.port}"  # browsers send the cookies of all ports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse, one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        request = Request(scope)
        fresh = request.url.path == "/" and _same(request.query_params.get("token", ""), self.token)
        status, why = self._refusal(request, fresh)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                if fresh and not status:
                    headers.append("set-cookie", f"{self._cookie}={self._session}; Path=/; HttpOnly; SameSite=Strict")
            await send(message)

        if status:
            await PlainTextResponse(why, status)(scope, receive, answer)
            return
        body = b""
        if scope["method"] == "POST":
            async for part in Request(scope, receive).stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    await PlainTextResponse(f"more than {MAX_BODY_BYTES:,} bytes", 413)(scope, receive, answer)
                    return
        left = [{"type": "http.request", "body": body, "more_body": False}]

        async def rest() -> Message:
            return left.pop() if left else await receive()

        await self.app(scope, rest if scope["method"] == "POST" else receive, answer)

    def _refusal(self, request: Request, fresh: bool) -> tuple[int, str]:
        """The status and the reason for which a request is refused; 0 where it is not."""
        hosts = {f"{name}:{self.port}" for name in (HOST, "localhost")}
        host = request.headers.get("host", "")
        if host not in hosts:
            return 403, "this page is for this machine alone"
        if not fresh and not _same(_cookie_of(request, self._cookie), self._session):
            return 403, "open the address that the command printed, which has a token"
        if request.method == "POST" and request.headers.get("origin", "") != f"http://{host}":
            return 403, "a POST must come from the page itself"
        if request.method == "POST" and request.headers.get("content-type", "") != "application/json":
            return 415, "send application/json"
        return 0, ""


def _cookie_of(request: Request, name: str) -> str:
    try:
        morsel = SimpleCookie(request.headers.get("cookie", "")).get(name)
    except CookieError:
        return ""
    return "" if morsel is None else morsel.value


def _same(actual: str, expected: str) -> bool:
    return secrets.compare_digest(actual.encode("utf-8", "replace"), expected.encode())
