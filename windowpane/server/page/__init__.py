"""The page at `/`: plain files, served as they are. It holds no data of its own and reads /stats and /v1/…"""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, HTTPException, Response

MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
# Nothing is loaded from anywhere else, and no text that a model wrote can become a script.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def is_page(path: str) -> bool:
    """Whether a path belongs to the page. It is public: it must be there to ask for a key."""
    return path == "/" or path.startswith("/page/")


def router() -> APIRouter:
    routes = APIRouter(include_in_schema=False)
    contents = {f.name: f.read_bytes() for f in files(__name__).iterdir() if f.name.rpartition(".")[2] in MEDIA_TYPES}

    @routes.api_route("/", methods=["GET", "HEAD"])
    async def index() -> Response:
        return _file("index.html")

    @routes.get("/page/{name}")
    async def asset(name: str) -> Response:
        return _file(name)

    def _file(name: str) -> Response:
        if name not in contents:
            raise HTTPException(404, f"the page has no file {name}")
        media_type = MEDIA_TYPES[name.rpartition(".")[2]]
        return Response(contents[name], media_type=f"{media_type}; charset=utf-8", headers=HEADERS)

    return routes
