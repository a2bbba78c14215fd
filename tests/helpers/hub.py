"""A cache of Hugging Face with models of ours."""

import hashlib
import shutil

OLD, NEW = "a" * 40, "b" * 40  # commits
NAME = "tiny/model"


def put(cache, folder, commit, name=NAME):
    """A snapshot: files are links to blobs, which have their hashes as names; refs/main is the commit."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for place in (repository / "blobs", repository / "refs", snapshot):
        place.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        blob = repository / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    (repository / "refs" / "main").write_text(commit)
