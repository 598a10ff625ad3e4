"""A small stand-in for the Hugging Face Hub on loopback: what huggingface_hub asks of it to create a repository and commit.

It can be told to fail: an upload that is cut off, an error status for a path, an answer that is no JSON.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GOOD_TOKEN = "hf_" + "g" * 34
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
        self.no_json = False
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: HubStandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Stay silent."""

    def do_GET(self) -> None:
        if self.admitted(self.path):
            self.model_info(self.path.removeprefix("/api/models/"))

    def do_PUT(self) -> None:
        """A large file; its address carries no token, like the signed addresses of the Hub's storage."""
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
            self.preupload(path.removeprefix("/api/models/").split("/preupload/")[0], json.loads(body))
        elif path.endswith("/info/lfs/objects/batch"):
            self.lfs_batch(json.loads(body))
        elif "/commit/" in path:
            self.commit(path.removeprefix("/api/models/").split("/commit/")[0], body)
        else:
            self.answer(404, {"error": f"the stand-in does not know {path}"})

    # ---- what the Hub does ---------------------------------------------------------------------------------

    def admitted(self, path: str) -> bool:
        """Check the token and the planted failures; answers and returns False when there is nothing more to do."""
        self.hub.requests.append(f"{self.command} {path}")
        token = (self.headers.get("authorization") or "").removeprefix("Bearer ")
        if self.hub.no_json:
            self.send(200, b"<html>a proxy's login page</html>", "text/html")
            return False
        if token not in (GOOD_TOKEN, READ_TOKEN):
            self.answer(401, {"error": "Invalid username or password."})
            return False
        for part, status in self.hub.failures.items():
            if part in path:
                self.answer(status, {"error": "planted"})
                return False
        if token == READ_TOKEN and path != "/api/validate-yaml" and self.command == "POST":
            self.answer(403, {"error": "You don't have the rights to create a model under this namespace"})
            return False
        return True

    def create(self, request: dict[str, Any]) -> None:
        repo = f"{request['organization']}/{request['name']}"
        if repo in self.hub.repos:
            self.answer(
                409, {"error": "You already created this model repo", "url": f"{self.hub.url}/{repo}"}
            )
            return
        self.hub.repos[repo] = {}
        self.hub.visibility[repo] = request.get("visibility", "public")
        self.answer(200, {"url": f"{self.hub.url}/{repo}"})

    def model_info(self, repo: str) -> None:
        if repo in self.hub.repos:
            self.answer(200, {"id": repo, "sha": "0" * 40})
        else:
            self.answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})

    def validate_card(self, card: str) -> None:
        wrong = (
            [{"message": '"license" must be one of the known ones'}] if "license: nonsense" in card else []
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
                entry["actions"] = {"upload": {"href": f"{self.hub.url}/storage/{item['oid']}", "header": {}}}
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
        self.hub.repos[repo] = files
        oid = hashlib.sha1(body).hexdigest()
        self.answer(
            200, {"commitUrl": f"{self.hub.url}/{repo}/commit/{oid}", "commitOid": oid, "hookOutput": ""}
        )

    # ---- HTTP ----------------------------------------------------------------------------------------------

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

    def answer(self, status: int, content: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self.send(status, json.dumps(content).encode(), "application/json", headers)

    def send(self, status: int, content: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {
            **(headers or {}),
            "content-type": kind,
            "content-length": str(len(content)),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
