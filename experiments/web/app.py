"""The page's application: the form, searches, and their files by fixed names."""

import json
import re
import secrets
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path

import jinja2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from experiments.web.guard import Guard
from experiments.web.job import FILES
from experiments.web.question import MAX_CARDS, MAX_SECONDS, NETWORKS, question_from
from experiments.web.searches import Searches
from hexiopt.errors import InputError
from hexiopt.files.shipped import shipped_names
from hexiopt.numbers.gpus import catalogue

_PAGE_POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; frame-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_REPORT_POLICY = (  # scripts of the report run without an origin, so that they can ask for nothing
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)


def application(folder: Path, port: int, ending: Callable[[], bool] = lambda: False) -> Guard:
    """The application on this `port`; searches write below `folder`, and end when the server is `ending`."""
    searches = Searches(folder)
    routes = [
        Route("/", _page),
        Route("/search", _search(searches, ending), methods=["POST"]),
        Route("/file/{key}/{name}", _file(searches)),
    ]
    return Guard(Starlette(routes=routes), port)


async def _page(request: Request) -> Response:
    nonce = secrets.token_urlsafe(16)
    here = files(__package__)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    text = environment.from_string(here.joinpath("page.html.jinja").read_text(encoding="utf-8")).render(
        nonce=nonce,
        style=here.joinpath("page.css").read_text(encoding="utf-8"),
        script=here.joinpath("page.js").read_text(encoding="utf-8"),
        cards=[name for name in catalogue() if name != "cpu"],
        models=shipped_names("model"),
        networks=NETWORKS,
        max_cards=MAX_CARDS,
        max_seconds=MAX_SECONDS,
    )
    return HTMLResponse(text, headers={"content-security-policy": _PAGE_POLICY.format(nonce=nonce)})


def _search(searches: Searches, ending: Callable[[], bool]) -> Callable[[Request], Awaitable[Response]]:
    async def search(request: Request) -> Response:
        try:
            data = json.loads(await request.body())
            question_from(data)
        except InputError as error:
            return PlainTextResponse(re.sub("^page: ", "", str(error)), 400)
        except (ValueError, RecursionError):
            return PlainTextResponse("the question is not JSON", 400)
        if not searches.take():
            return PlainTextResponse("a search is running; one at a time", 409)

        async def has_left() -> bool:
            return ending() or await request.is_disconnected()

        return StreamingResponse(searches.run(data, has_left), media_type="application/x-ndjson")

    return search


def _file(searches: Searches) -> Callable[[Request], Awaitable[Response]]:
    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        try:
            path = searches.file(request.path_params["key"], name) if name in FILES else None  # by name: no paths
        except KeyError:
            path = None
        if path is None or not path.is_file():
            return PlainTextResponse("no such file", 404)
        if name != "report.html":
            return FileResponse(path, filename=name)
        kind = "attachment" if "download" in request.query_params else "inline"
        return FileResponse(
            path, filename=name, content_disposition_type=kind, headers={"content-security-policy": _REPORT_POLICY}
        )

    return file
