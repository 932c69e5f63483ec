"""What a small hub holds and answers, and its faults; ``hub_server`` serves it on the loopback device.

It knows what publishing and loading need: repositories, pre-upload, Git LFS (one part or several), commits with
a parent check, tags, trees, and files. Large files lie at another name of this machine (``localhost``), as a
hub's do with a storage of another host. It knows no Xet.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

PAGE = b"<!DOCTYPE html><html><body>Please log in</body></html>"
TOKEN = "hf_PlantedSecretThatMustNeverBeSeen"


@dataclass
class Fault:
    """Something that goes wrong at a step.

    Args:
        step: of which (``Handler.ROUTES``).
        status: answer with it; 0 for the kinds below.
        kind: ``before`` (the connection is cut before anything is done), ``during`` (while the request is
            being read), ``after`` (when it was done, before the answer), ``page`` (an HTML page), ``flip``
            (a bit of the answer), ``slow`` (silence first).
        times: requests that it hits.
        skip: requests of the step that it spares first.
        path: only requests whose address ends so.
        code: ``X-Error-Code``.
        headers: more of them.
        seconds: of silence.
    """

    step: str
    status: int = 0
    kind: str = ""
    times: int = 1
    skip: int = 0
    path: str = ""
    code: str = ""
    message: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class Repo:
    """Commits (oid -> path -> content), the newest one, tags, and who may what."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    head: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False
    history: list[str] = field(default_factory=list)

    def add(self, files: dict[str, bytes]) -> str:
        """A new head; its name depends on all that was before."""
        oid = hashlib.sha1(f"{self.head}{time.monotonic_ns()}{sorted(files)}".encode()).hexdigest()
        self.commits[oid] = files
        self.head = oid
        self.history.append(oid)
        return oid

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[self.head]


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_large(path: str) -> bool:
    return path.endswith((".safetensors", ".bin"))


class Answer(Exception):
    """Ends a request."""

    def __init__(self, status: int, body: Any = None, code: str = "", message: str = "", **headers: str):
        super().__init__(status)
        self.status = status
        self.body = {"error": message or f"it is a {status}"} if body is None else body
        self.headers = {key.replace("_", "-"): value for key, value in headers.items()}
        if code:
            self.headers["X-Error-Code"] = code
        if message:
            self.headers["X-Error-Message"] = message


@dataclass
class Asked:
    """A request: who asks, and what came with it."""

    token: str
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Hub:
    """The state of a server, what was asked, and what shall go wrong.

    Args:
        port: where it listens.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.endpoint = f"http://127.0.0.1:{port}"
        self.storage = f"http://localhost:{port}"
        self.verify_at = self.endpoint
        self.lock = threading.RLock()
        self.ended = threading.Event()
        self.hashes = True
        self.chunk = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.repos: dict[str, Repo] = {}
        self.stored: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.writers = {TOKEN: "me"}
        self.creators = {TOKEN}
        self.readers: set[str] = set()
        self.faults: list[Fault] = []
        self.log: list[tuple[str, str, str, str]] = []
        self.received = 0
        self.on_commit: Callable[[Repo], None] | None = None
        self.on_step: Callable[[str, str], object] = lambda step, when: None
        self.chunk = 0
        self.verify_at = self.endpoint

    def steps(self) -> list[str]:
        """What was asked, in order."""
        return [step for step, _, _, _ in self.log]

    def leaks(self, token: str = TOKEN) -> list[str]:
        """Requests that carried the token to another name than the hub's own."""
        own = f"127.0.0.1:{self.port}"
        return [path for _, path, host, held in self.log if token in held and host != own]

    def fault(self, step: str, address: str) -> Fault | None:
        """The fault for this request, which is used up by it."""
        with self.lock:
            for found in self.faults:
                if found.step != step or not address.endswith(found.path) or not found.times:
                    continue
                if found.skip:
                    found.skip -= 1
                    continue
                found.times -= 1
                return found
        return None

    def repo(self, name: str, token: str) -> Repo:
        found = self.repos.get(name)
        if found is None or (found.private and token not in self.writers):
            raise Answer(404 if token else 401, code="RepoNotFound", message="Repository not found")
        return found

    def commit_of(self, repo: Repo, revision: str) -> str:
        known = {"main": repo.head, **repo.tags, **{oid: oid for oid in repo.commits}}
        if revision not in known:
            raise Answer(404, code="RevisionNotFound", message=f"Invalid rev id: {revision}")
        return known[revision]

    def may_write(self, token: str) -> None:
        if token not in self.writers:
            raise Answer(403, message="You don't have the rights to write")

    # --- what is asked ---

    def whoami(self, asked: Asked) -> Any:
        if not asked.token or asked.token not in {*self.writers, *self.readers}:
            raise Answer(401, message="Invalid credentials in Authorization header")
        role = "write" if asked.token in self.writers else "read"
        auth = {"type": "access_token", "accessToken": {"displayName": "test", "role": role}}
        return {"name": "me", "type": "user", "orgs": [], "auth": auth}

    def create(self, asked: Asked) -> Any:
        wanted = asked.json()
        name = f"{wanted['organization'] or 'me'}/{wanted['name']}"
        if asked.token not in self.creators:
            raise Answer(403, message="You don't have the rights to create a model under this namespace")
        if name in self.repos:
            raise Answer(409, {"error": "You already created this model repo", "url": self.page(name)})
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        self.repos[name] = repo = Repo(private=private)
        repo.add({".gitattributes": b"*.safetensors filter=lfs\n"})
        return {"url": self.page(name)}

    def page(self, name: str) -> str:
        return f"{self.endpoint}/{name}"

    def yaml(self, asked: Asked) -> Any:
        return {"errors": [], "warnings": []}

    def info(self, asked: Asked, name: str, revision: str = "main") -> Any:
        repo = self.repo(name, asked.token)
        commit = self.commit_of(repo, unquote(revision))
        siblings = [{"rfilename": path} for path in repo.commits[commit]]
        return {"id": name, "sha": commit, "private": repo.private, "siblings": siblings}

    def tree(self, asked: Asked, name: str, revision: str) -> Any:
        repo = self.repo(name, asked.token)
        files = repo.commits[self.commit_of(repo, unquote(revision))]
        return [self.entry(path, content) for path, content in files.items()]

    def entry(self, path: str, content: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "type": "file",
            "path": path,
            "size": len(content),
            "oid": git_oid(content),
        }
        if is_large(path):
            digest = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
        return entry

    def refs(self, asked: Asked, name: str) -> Any:
        repo = self.repo(name, asked.token)
        tags = [
            {"name": tag, "ref": f"refs/tags/{tag}", "targetCommit": oid} for tag, oid in repo.tags.items()
        ]
        branches = [{"name": "main", "ref": "refs/heads/main", "targetCommit": repo.head}]
        return {"branches": branches, "converts": [], "tags": tags}

    def preupload(self, asked: Asked, name: str, revision: str) -> Any:
        self.repo(name, asked.token)
        self.may_write(asked.token)
        return {
            "files": [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if is_large(file["path"]) else "regular",
                    "shouldIgnore": False,
                }
                for file in asked.json()["files"]
            ]
        }

    def batch(self, asked: Asked, name: str) -> Any:
        self.may_write(asked.token)
        objects = []
        for file in asked.json()["objects"]:
            oid, size = file["oid"], file["size"]
            told: dict[str, Any] = {"oid": oid, "size": size}
            if oid not in self.stored:
                upload: dict[str, Any] = {"href": f"{self.storage}/put/{oid}"}
                if self.chunk:
                    count = -(-size // self.chunk)
                    parts = {str(n): f"{self.storage}/part/{oid}/{n}" for n in range(1, count + 1)}
                    upload = {
                        "href": f"{self.storage}/complete/{oid}",
                        "header": {"chunk_size": str(self.chunk), **parts},
                    }
                told["actions"] = {"upload": upload, "verify": {"href": f"{self.verify_at}/verify"}}
            objects.append(told)
        return {"transfer": "multipart" if self.chunk else "basic", "objects": objects}

    def put(self, asked: Asked, oid: str) -> Any:
        self.store(oid, asked.body)
        return {}

    def store(self, oid: str, content: bytes) -> None:
        if self.hashes and hashlib.sha256(content).hexdigest() != oid:
            raise Answer(400, message="The content has another hash")
        self.stored[oid] = content

    def part(self, asked: Asked, oid: str, number: str) -> Any:
        self.parts.setdefault(oid, {})[int(number)] = asked.body
        raise Answer(200, {}, ETag=f'"{number}"')

    def complete(self, asked: Asked, oid: str) -> Any:
        parts = self.parts.pop(oid)
        self.store(oid, b"".join(parts[number] for number in sorted(parts)))
        return {}

    def verify(self, asked: Asked) -> Any:
        if asked.json()["oid"] not in self.stored:
            raise Answer(404, message="not stored")
        return {}

    def commit(self, asked: Asked, name: str, revision: str) -> Any:
        repo = self.repo(name, asked.token)
        self.may_write(asked.token)
        if self.on_commit is not None:
            self.on_commit(repo)
        lines = [json.loads(line) for line in asked.body.splitlines()]
        with self.lock:
            parent = lines[0]["value"].get("parentCommit")
            if parent not in (None, repo.head):
                raise Answer(412, message="A commit has happened since. Please refresh and try again.")
            files = dict(repo.files)
            for line in lines[1:]:
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    if value["oid"] not in self.stored:
                        raise Answer(400, message="LFS pointer points to a file that does not exist")
                    files[value["path"]] = self.stored[value["oid"]]
                elif files.pop(value["path"], None) is None:
                    raise Answer(404, code="EntryNotFound", message="A file with this name doesn't exist")
            oid = repo.add(files)
        return {"commitUrl": f"{self.page(name)}/commit/{oid}", "commitOid": oid}

    def tag(self, asked: Asked, name: str, revision: str) -> Any:
        repo = self.repo(name, asked.token)
        self.may_write(asked.token)
        tag = asked.json()["tag"]
        if tag in repo.tags:
            raise Answer(409, message=f"Tag reference exists already: {tag}")
        repo.tags[tag] = self.commit_of(repo, unquote(revision))
        return {}

    def untag(self, asked: Asked, name: str, tag: str) -> Any:
        self.may_write(asked.token)
        if self.repo(name, asked.token).tags.pop(unquote(tag), None) is None:
            raise Answer(404, code="RevisionNotFound", message="no such tag")
        return {}

    def resolve(self, asked: Asked, name: str, revision: str, path: str) -> Any:
        repo = self.repo(name, asked.token)
        if repo.gated and asked.token not in self.writers:
            raise Answer(403 if asked.token else 401, code="GatedRepo", message="Access is restricted")
        commit = self.commit_of(repo, unquote(revision))
        content = repo.commits[commit].get(unquote(path))
        head = {"X_Repo_Commit": commit}
        if content is None:
            raise Answer(404, code="EntryNotFound", message="Entry not found", **head)
        if is_large(path):
            digest = hashlib.sha256(content).hexdigest()
            self.stored.setdefault(digest, content)
            linked = {"X_Linked_Etag": f'"{digest}"', "X_Linked_Size": str(len(content))}
            raise Answer(302, b"", Location=f"{self.storage}/cdn/{digest}", **head, **linked)
        raise Answer(200, content, ETag=f'"{git_oid(content)}"', **head)

    def cdn(self, asked: Asked, oid: str) -> Any:
        raise Answer(200, self.stored[oid], ETag=f'"{oid}"')
