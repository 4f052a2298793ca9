"""The part of the Hub's HTTP interface that huggingface_hub calls to publish a model and to load it, in memory.

Made from the requests that huggingface_hub 2.4 sends; no more than the tests need: models only, no xet, every file of
more than 10 MB or with a binary suffix by Git LFS.

>>> with HubServer(token="hf_secret") as hub:                                    # doctest: +SKIP
...     os.environ["HF_ENDPOINT"] = hub.url
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml
from huggingface_hub import constants

TOKEN = "hf_" + "Qw3rTy" * 6
LFS_SUFFIXES = (".safetensors", ".pt", ".bin", ".png")


@dataclass
class Repo:
    """Commits are whole trees: path -> content."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, tree: dict[str, bytes], message: str) -> str:
        text = message + str(len(self.commits)) + "".join(sorted(tree))
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.commits[sha], self.branches[branch] = tree, sha
        self.messages.append(message)
        return sha

    def sha(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.branches.get(revision)


def etag(path: str, content: bytes) -> str:
    if is_lfs(path, len(content)):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_lfs(path: str, size: int) -> bool:
    return size > 0 and (path.endswith(LFS_SUFFIXES) or size > 10_000_000)


class HubServer:
    """A Hub on loopback, as a context manager.

    Attributes:
        url: what HF_ENDPOINT must be.
        repos: name -> `Repo`.
        stored: SHA-256 -> content of what was uploaded by LFS, committed or not.
        requests: `(method, path)` of every request so far.
        refuse: patterns of "METHOD path"; a request that one of them matches is answered with 403, and the pattern is
            then taken out.
    """

    def __init__(self, token: str):
        self.token = token
        self.repos: dict[str, Repo] = {}
        self.stored: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.refuse: list[str] = []
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error) -> None:
        self.server.shutdown()
        self.server.server_close()

    def serve(self, monkeypatch, cache) -> None:
        """Let this process talk to this Hub, with a token to write there and its cache in the folder `cache`."""
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", self.url)
        settings = {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True, "HF_HUB_CACHE": str(cache)}
        settings |= {"ENDPOINT": self.url, "HUGGINGFACE_CO_URL_TEMPLATE": template}
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # made once, for the Hub of that moment
        monkeypatch.setenv("HF_TOKEN", self.token)

    def put(self, repo_id: str, files: dict[str, bytes]) -> str:
        """Make a repository that holds `files`; return the commit."""
        repo = self.repos.setdefault(repo_id, Repo())
        return repo.commit("main", dict(files), "by hand")

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        repo = self.repos[repo_id]
        return repo.commits[repo.sha(revision)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub: HubServer

    def log_message(self, *args) -> None:
        pass

    def answer(self, status: int, content=b"", **headers) -> None:
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
            headers.setdefault("Content-Type", "application/json")
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def error(self, status: int, message: str, code: str | None = None) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.answer(status, {"error": message}, **headers)

    def route(self) -> None:
        hub, path = self.server_hub, unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.requests.append((self.command, path))
        for pattern in hub.refuse:
            if re.search(pattern, f"{self.command} {path}"):
                hub.refuse.remove(pattern)
                return self.error(403, "Not now")
        writes = self.command in ("POST", "PUT") and not path.startswith("/lfs/")
        if writes and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self.error(401, "Invalid username or password.")
        for method, pattern, handle in self.ROUTES:
            if method in (self.command, "*") and (match := re.fullmatch(pattern, path)):
                return handle(self, body, *match.groups())
        return self.error(404, f"No such page: {self.command} {path}")

    do_GET = do_HEAD = do_POST = do_PUT = route

    def repo(self, repo_id: str) -> Repo | None:
        repo = self.server_hub.repos.get(repo_id)
        allowed = repo is not None and (not repo.private or self.headers.get("Authorization"))
        if not allowed:
            self.error(404, "Repository not found", "RepoNotFound")
        return repo if allowed else None

    def tree(self, repo_id: str, revision: str) -> tuple[str, dict[str, bytes]] | tuple[None, None]:
        if (repo := self.repo(repo_id)) is None:
            return None, None
        if (sha := repo.sha(revision)) is None:
            self.error(404, f"Invalid rev id: {revision}", "RevisionNotFound")
            return None, None
        return sha, repo.commits[sha]

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        repo_id = f"{asked.get('organization') or 'me'}/{asked['name']}"
        url = {"url": f"{self.server_hub.url}/{repo_id}"}
        if repo_id in self.server_hub.repos:
            return self.answer(409, url | {"error": "You already created this model repo"})
        repo = Repo(private=asked.get("visibility") == "private")
        repo.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        self.server_hub.repos[repo_id] = repo
        return self.answer(200, url)

    def info(self, body: bytes, repo_id: str, revision: str | None) -> None:
        sha, files = self.tree(repo_id, revision or "main")
        if sha is not None:
            siblings = [{"rfilename": path} for path in sorted(files)]
            self.answer(200, {"id": repo_id, "modelId": repo_id, "sha": sha, "siblings": siblings, "tags": []})

    def list_commits(self, body: bytes, repo_id: str, branch: str) -> None:
        if (repo := self.repo(repo_id)) is not None:  # of all branches
            found = zip(repo.commits, repo.messages, strict=True)
            common = {"authors": [], "date": "2026-01-01T00:00:00.000Z", "message": ""}
            self.answer(200, [{"id": sha, "title": title} | common for sha, title in found][::-1])

    def list_tree(self, body: bytes, repo_id: str, revision: str, folder: str | None) -> None:
        sha, files = self.tree(repo_id, revision)
        if sha is None:
            return None
        prefix = f"{folder}/" if folder else ""
        entries = [
            {"type": "file", "path": path, "size": len(content), "oid": etag(path, content)}
            for path, content in sorted(files.items())
            if path.startswith(prefix)
        ]
        if folder and not entries:
            return self.error(404, f"{folder} does not exist on {revision!r}", "EntryNotFound")
        return self.answer(200, entries)

    def validate_yaml(self, body: bytes) -> None:
        content = json.loads(body)["content"]
        try:
            data = yaml.safe_load(content.split("---")[1]) if content.startswith("---") else {}
            wrong = [f"{key} must be text" for key in ("license", "pipeline_tag", "library_name")
                     if not isinstance(data.get(key, ""), str)]  # fmt: skip
        except yaml.YAMLError as error:
            wrong = [str(error)]
        messages = [{"message": message} for message in wrong]
        self.answer(400 if wrong else 200, {"errors": messages, "warnings": []})

    def branch(self, body: bytes, repo_id: str, name: str) -> None:
        repo = self.repo(repo_id)
        if repo is None:
            return None
        if name in repo.branches:
            return self.error(409, "Reference already exists")
        repo.branches[name] = repo.branches["main"]
        return self.answer(200, {})

    def preupload(self, body: bytes, repo_id: str, revision: str) -> None:
        sha, files = self.tree(repo_id, revision)
        if sha is None:
            return
        answers = []
        for file in json.loads(body)["files"]:
            path = file["path"]
            oid = etag(path, files[path]) if path in files else None
            mode = "lfs" if is_lfs(path, file["size"]) else "regular"
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.answer(200, {"files": answers})

    def lfs_batch(self, body: bytes, repo_id: str) -> None:
        if self.repo(repo_id) is None:
            return
        objects = []
        for item in json.loads(body)["objects"]:
            if item["oid"] not in self.server_hub.stored:  # no actions: it is there
                upload = {"href": f"{self.server_hub.url}/lfs/{item['oid']}"}
                item = item | {"actions": {"upload": upload}}
            objects.append(item)
        self.answer(200, {"transfer": "basic", "objects": objects})

    def lfs_put(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self.error(400, "The content is not what its SHA-256 says")
        self.server_hub.stored[oid] = body
        return self.answer(200)

    def commit(self, body: bytes, repo_id: str, branch: str) -> None:
        sha, files = self.tree(repo_id, branch)
        if sha is None:
            return None
        files, message = dict(files), ""
        for line in body.decode().splitlines():
            entry = json.loads(line)
            key, value = entry["key"], entry["value"]
            if key == "header":
                message = value["summary"]
                if value.get("parentCommit", sha) != sha:
                    return self.error(412, "A commit has happened since. Please refresh and try again.")
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                if value["oid"] not in self.server_hub.stored:
                    return self.error(400, f"LFS object {value['oid']} was not uploaded")
                files[value["path"]] = self.server_hub.stored[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
            else:
                return self.error(400, f"Unknown operation {key}")
        new = self.server_hub.repos[repo_id].commit(branch, files, message)
        url = f"{self.server_hub.url}/{repo_id}/commit/{new}"
        return self.answer(200, {"commitUrl": url, "commitOid": new, "success": True})

    def resolve(self, body: bytes, repo_id: str, revision: str, path: str) -> None:
        sha, files = self.tree(repo_id, revision)
        if sha is None:
            return None
        if path not in files:
            headers = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found", "X-Repo-Commit": sha}
            return self.answer(404, b"", **headers)
        content = files[path]
        return self.answer(200, content, **{"ETag": f'"{etag(path, content)}"', "X-Repo-Commit": sha})

    NAME = r"([^/]+/[^/]+)"
    ROUTES = (
        ("POST", "/api/repos/create", create),
        ("POST", "/api/validate-yaml", validate_yaml),
        ("GET", f"/api/models/{NAME}(?:/revision/(.+))?", info),
        ("GET", f"/api/models/{NAME}/commits/(.+)", list_commits),
        ("GET", f"/api/models/{NAME}/tree/([^/]+)(?:/(.+))?", list_tree),
        ("POST", f"/api/models/{NAME}/branch/(.+)", branch),
        ("POST", f"/api/models/{NAME}/preupload/(.+)", preupload),
        ("POST", f"/api/models/{NAME}/commit/(.+)", commit),
        ("POST", f"/{NAME}\\.git/info/lfs/objects/batch", lfs_batch),
        ("PUT", "/lfs/([0-9a-f]{64})", lfs_put),
        ("*", f"/{NAME}/resolve/([^/]+)/(.+)", resolve),
    )
