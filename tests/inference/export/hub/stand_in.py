"""A small stand-in for the Hugging Face Hub on loopback: what huggingface_hub asks of it to create
a repository and commit.

It can be told to fail: a transfer that is cut off, an error status for a path, an answer that is no
JSON, a file that was swapped.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import huggingface_hub
import pytest
from huggingface_hub.utils import _http

from tests.loopback import http_server

GOOD_TOKEN = "hf_" + "g" * 34
CUT = 3000
COMMIT = "c0ffee" + "0" * 34
READ_TOKEN = "hf_" + "r" * 34
"""A token that may not write."""


class HubStandIn:
    """State and switches of the stand-in; `url` is its HF_ENDPOINT."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.visibility: dict[str, str] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.uploads_started = 0
        self.cut_uploads = False
        """Close the connection in the middle of every large file."""
        self.failures: dict[str, int] = {}
        """Part of a path -> status to answer with."""
        self.cut_download = ""
        """The file whose connection is closed behind its first `CUT` bytes, however often it is
        asked for."""
        self.public = False
        """Reading needs no token."""
        self.sent: dict[str, int] = {}
        """File -> bytes of it that went out."""
        self.collections: dict[str, dict[str, Any]] = {}
        """Slug -> title, owner, private and items."""
        self.no_json = False
        self.url = ""


class _Handler(BaseHTTPRequestHandler):
    hub: HubStandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Stay silent."""

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if not self.admitted(path):
            return
        if "/resolve/" in path:
            self.download(path)
        elif path.startswith("/api/collections"):
            slug = path.removeprefix("/api/collections").lstrip("/")
            known = self.hub.collections
            entries = [
                {k: v for k, v in shown(key, value).items() if k != "position"}
                for key, value in known.items()
            ]
            self.answer(200, shown(slug, known[slug]) if slug else entries)
        else:
            self.model_info(path.removeprefix("/api/models/").split("/revision/"))

    def do_HEAD(self) -> None:
        if self.admitted(self.path):
            self.download(self.path)

    def do_PUT(self) -> None:
        """A large file; its address carries no token, like the signed addresses of the Hub's
        storage."""
        self.hub.requests.append(f"PUT {self.path}")
        self.hub.uploads_started += 1
        if self.hub.cut_uploads:
            self.rfile.read(1000)
            self.close_connection = True
            self.connection.close()
            return
        content = self.body()
        oid = self.path.removeprefix("/storage/")
        if hashlib.sha256(content).hexdigest() != oid:
            self.answer(400, {"error": "content does not match its hash"})
            return
        self.hub.objects[oid] = content
        self.answer(200, {})

    def do_POST(self) -> None:
        path = self.path.split("?")[0]
        body = self.body()
        if not self.admitted(path):
            return
        if path == "/api/repos/create":
            self.create(json.loads(body))
        elif path == "/api/validate-yaml":
            self.validate_card(json.loads(body)["content"])
        elif "/preupload/" in path:
            self.preupload(
                path.removeprefix("/api/models/").split("/preupload/")[0], json.loads(body)
            )
        elif path.endswith("/info/lfs/objects/batch"):
            self.lfs_batch(json.loads(body))
        elif path.startswith("/api/collections"):
            self.collect(path.removeprefix("/api/collections").lstrip("/"), json.loads(body))
        elif "/commit/" in path:
            self.commit(path.removeprefix("/api/models/").split("/commit/")[0], body)
        else:
            self.answer(404, {"error": f"the stand-in does not know {path}"})

    # What the Hub does

    def admitted(self, path: str) -> bool:
        """Check the token and the planted failures; answers and returns False when there is nothing
        more to do."""
        self.hub.requests.append(f"{self.command} {path}")
        token = (self.headers.get("authorization") or "").removeprefix("Bearer ")
        if self.hub.no_json:
            self.send(200, b"<html>a proxy's login page</html>", "text/html")
            return False
        open_to_all = self.hub.public and not token and self.command in ("GET", "HEAD")
        if token not in (GOOD_TOKEN, READ_TOKEN) and not open_to_all:
            self.answer(401, {"error": "Invalid username or password."})
            return False
        for part, status in self.hub.failures.items():
            if part in path:
                self.answer(status, {"error": "planted"})
                return False
        if token == READ_TOKEN and path != "/api/validate-yaml" and self.command == "POST":
            self.answer(
                403, {"error": "You don't have the rights to create a model under this namespace"}
            )
            return False
        return True

    def create(self, request: dict[str, Any]) -> None:
        repo = f"{request['organization']}/{request['name']}"
        if repo in self.hub.repos:
            self.answer(
                409,
                {"error": "You already created this model repo", "url": f"{self.hub.url}/{repo}"},
            )
            return
        self.hub.repos[repo] = {}
        self.hub.visibility[repo] = request.get("visibility", "public")
        self.answer(200, {"url": f"{self.hub.url}/{repo}"})

    def model_info(self, asked: list[str]) -> None:
        repo, revision = asked[0], asked[1] if len(asked) > 1 else "main"
        if repo not in self.hub.repos:
            self.answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", COMMIT):
            self.answer(
                404, {"error": f"Invalid rev id: {revision}"}, {"X-Error-Code": "RevisionNotFound"}
            )
        else:
            files = [{"rfilename": name} for name in [".gitattributes", *self.hub.repos[repo]]]
            self.answer(200, {"id": repo, "sha": COMMIT, "siblings": files})

    def download(self, path: str) -> None:
        repo, name = path.lstrip("/").split(f"/resolve/{COMMIT}/")
        content = self.hub.repos[repo][unquote(name)]
        begin = int((self.headers.get("range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        headers = {
            "X-Repo-Commit": COMMIT,
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "Accept-Ranges": "bytes",
        }
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        part = content[begin:]
        if self.command == "GET" and name == self.hub.cut_download:
            kept = max(0, CUT - begin)
            self.hub.sent[name] = self.hub.sent.get(name, 0) + kept
            self.send(206 if begin else 200, part, "application/octet-stream", headers, cut=kept)
            return
        if self.command == "GET":
            self.hub.sent[name] = self.hub.sent.get(name, 0) + len(part)
        self.send(206 if begin else 200, part, "application/octet-stream", headers)

    def collect(self, slug: str, request: dict[str, Any]) -> None:
        """Create a collection, or add an item to one."""
        if not slug:
            slug = f"{request['namespace']}/{request['title'].lower().replace(' ', '-')}-{len(self.hub.collections):024x}"
            self.hub.collections[slug] = {**request, "items": []}
        else:
            slug = slug.removesuffix("/items")
            item, items = request["item"]["id"], self.hub.collections[slug]["items"]
            if item in items:
                self.answer(409, {"error": "already there"})
                return
            items.append(item)
        self.answer(200, shown(slug, self.hub.collections[slug]))

    def validate_card(self, card: str) -> None:
        wrong = (
            [{"message": '"license" must be one of the known ones'}]
            if "license: nonsense" in card
            else []
        )
        self.answer(400 if wrong else 200, {"errors": wrong, "warnings": []})

    def preupload(self, repo: str, request: dict[str, Any]) -> None:
        if repo not in self.hub.repos:
            self.answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            return
        files = []
        for file in request["files"]:
            large = file["path"].endswith((".safetensors", ".png"))
            mode = "lfs" if large else "regular"
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False})
        self.answer(200, {"files": files})

    def lfs_batch(self, request: dict[str, Any]) -> None:
        objects = []
        for item in request["objects"]:
            entry = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.hub.objects:
                entry["actions"] = {
                    "upload": {"href": f"{self.hub.url}/storage/{item['oid']}", "header": {}}
                }
            objects.append(entry)
        self.answer(200, {"transfer": "basic", "objects": objects})

    def commit(self, repo: str, body: bytes) -> None:
        files = dict(self.hub.repos[repo])
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        self.hub.repos[repo] = files
        oid = hashlib.sha1(body).hexdigest()
        self.answer(
            200,
            {
                "commitUrl": f"{self.hub.url}/{repo}/commit/{oid}",
                "commitOid": oid,
                "hookOutput": "",
            },
        )

    # HTTP

    def body(self) -> bytes:
        """The request's body, with a length or in chunks."""
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def answer(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        self.send(status, json.dumps(content).encode(), "application/json", headers)

    def send(
        self,
        status: int,
        content: bytes,
        kind: str,
        headers: dict[str, str] | None = None,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in {
            **(headers or {}),
            "content-type": kind,
            "content-length": str(len(content)),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(content[:cut])
        if cut is not None:
            self.close_connection = True
            self.connection.close()


def shown(slug: str, collection: dict[str, Any]) -> dict[str, Any]:
    """A collection as the Hub describes it."""
    items = [
        {"_id": str(i), "id": item, "type": "model", "position": i}
        for i, item in enumerate(collection["items"])
    ]
    return {
        "slug": slug,
        "title": collection["title"],
        "owner": {"name": slug.split("/")[0]},
        "items": items,
        "lastUpdated": "2026-11-21T00:00:00.000Z",
        "position": 0,
        "private": collection["private"],
        "theme": "blue",
        "upvotes": 0,
    }


def loopback_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    """A stand-in that this process takes for the Hub, with a good token. Wrap it in
    `pytest.fixture`."""
    stand_in = HubStandIn()
    monkeypatch.setenv("HF_TOKEN", GOOD_TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        _http, "time", SimpleNamespace(sleep=lambda seconds: None)
    )  # retries without their pauses
    with http_server(type("Handler", (_Handler,), {"hub": stand_in})) as stand_in.url:
        monkeypatch.setenv("HF_ENDPOINT", stand_in.url)
        huggingface_hub.close_session()
        yield stand_in
        huggingface_hub.close_session()
