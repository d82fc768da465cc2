"""Models by their name on the Hugging Face Hub: what is fetched, and why it could not be.

`google/gemma-3-4b-it` is a repository of safetensors and `org/name:Q4_K_M` a GGUF file of one. Only what is used is
fetched, with huggingface_hub and its conventions (the shared cache, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT). A
plan needs a config, or the first bytes of a GGUF file, and no weights. Pickles are refused; code of a repository is
neither fetched nor run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from windowpane.models.config import CONFIG, QUANT_CONFIG, ModelError
from windowpane.models.embedded import cache_directory
from windowpane.models.gguf import read_shard

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# What the engine reads beside weights; only those that a repository lists are fetched.
_TEXT_FILES = (
    CONFIG,
    QUANT_CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_TEMPLATES = "additional_chat_templates/"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<variant>[\w.-]+))?")
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)")
_QUANT = re.compile(r"(?i)[-._]((?:ud-)?(?:i?q\d\w*|tq\d\w*|bf16|f16|f32|fp16|mxfp4\w*))$")
_FIRST_HEADER_BYTES = 2**20
_MOST_HEADER_BYTES = 2**28
_PARALLEL_FILES = 4


class HubError(ModelError):
    """A model cannot be had from the Hub; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository, and the GGUF file of it that is meant (empty: its safetensors, or its only GGUF file)."""

    repository: str
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.repository}:{self.variant}" if self.variant else self.repository


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a repository at one commit, with their bytes."""

    repository: str
    commit: str
    sizes: dict[str, int]


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A repository in the shared cache."""

    repository: str
    size_bytes: int
    revisions: tuple[str, ...]
    path: str


def parse_name(text: str) -> HubName | None:
    """`org/name` or `org/name:VARIANT`; None for what cannot be a name on the Hub."""
    match = _NAME.fullmatch(text)
    return HubName(match["repository"], match["variant"] or "") if match else None


def cached_models(cache_dir: str | None = None) -> list[CachedModel]:
    """Models in the shared cache, by name; none where there is no cache or no client to read it."""
    try:
        from huggingface_hub import CacheNotFound, scan_cache_dir
    except ImportError:
        return []
    try:
        found = scan_cache_dir(cache_dir)
    except (CacheNotFound, ValueError):
        return []
    models = [
        CachedModel(
            repo.repo_id, repo.size_on_disk, tuple(sorted(r.commit_hash for r in repo.revisions)), str(repo.repo_path)
        )
        for repo in found.repos
        if repo.repo_type == "model"
    ]
    return sorted(models, key=lambda model: model.repository.lower())


@dataclass(frozen=True, slots=True)
class Hub:
    """Where models come from. What is None is left to huggingface_hub's own conventions."""

    revision: str | None = None
    cache_dir: str | None = None
    endpoint: str | None = None
    token: str | None = None

    def shape(self, name: HubName) -> Path:
        """A directory with the config, or a file with a GGUF header, of a model; no weights are fetched."""
        listing = self._list(name)
        if listing is None:
            return self._cached(name, weights=False)
        if name.variant or CONFIG not in listing.sizes:
            headers = [self._gguf_header(listing, file) for file in _gguf_files(listing, name.variant)]
            return headers[0]
        return self._fetch(listing, [file for file in (CONFIG, QUANT_CONFIG) if file in listing.sizes])

    def cached_shape(self, name: HubName) -> Path | None:
        """Where the shape lies if the shared cache has it; the Hub is not asked."""
        try:
            return self._cached(name, weights=False)
        except (HubError, ModuleNotFoundError):
            return None

    def model(self, name: HubName) -> Path:
        """A directory or GGUF file with everything that running the model takes."""
        listing = self._list(name)
        if listing is None:
            return self._cached(name, weights=True)
        if name.variant or (CONFIG not in listing.sizes and _variants(listing)):
            files = _gguf_files(listing, name.variant)
            return self._fetch(listing, files) / files[0]
        return self._fetch(listing, [*_text_files(listing), *self._weight_files(listing)])

    def _list(self, name: HubName) -> Listing | None:
        """The repository's files; None where there is no network and the cache must do."""
        with self._errors(name.repository):
            from huggingface_hub import HfApi, constants

            if constants.HF_HUB_OFFLINE:
                return None
            try:
                info = HfApi(endpoint=self.endpoint, token=self.token).model_info(
                    name.repository, revision=self.revision, files_metadata=True
                )
            except Exception as error:
                if _is_offline(error) and self._snapshot(name.repository) is not None:
                    return None
                raise
            return Listing(name.repository, str(info.sha), {s.rfilename: s.size or 0 for s in info.siblings or ()})
        raise AssertionError  # `_errors` raises what it catches

    def _weight_files(self, listing: Listing) -> list[str]:
        if INDEX in listing.sizes:
            directory = self._fetch(listing, [INDEX])
            try:
                shards = sorted(set(json.loads((directory / INDEX).read_text("utf-8"))["weight_map"].values()))
            except (ValueError, KeyError, AttributeError):
                raise HubError(f"{listing.repository}: {INDEX} lists no files; report it to its author") from None
            missing = [shard for shard in shards if shard not in listing.sizes]
            if missing:
                raise HubError(
                    f"{listing.repository} lacks {missing[0]}, which its index names; try another --revision"
                )
            return [INDEX, *shards]
        if SINGLE in listing.sizes:
            return [SINGLE]
        raise HubError(_no_weights(listing))

    def _fetch(self, listing: Listing, files: Sequence[str]) -> Path:
        """These files in the shared cache, and the directory they lie in. What is there is not fetched again."""
        with self._errors(listing.repository):
            from huggingface_hub import hf_hub_download

            self._check_disk(listing, files)

            def fetch(file: str) -> str:
                return hf_hub_download(
                    listing.repository,
                    file,
                    revision=listing.commit,
                    cache_dir=self.cache_dir,
                    endpoint=self.endpoint,
                    token=self.token,
                )

            with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
                paths = list(pool.map(fetch, files))
            self._remember_revision(listing)
            # A file in a folder of the repository lies deeper than the snapshot.
            return Path(paths[0]).parents[files[0].count("/")]
        raise AssertionError

    def _check_disk(self, listing: Listing, files: Sequence[str]) -> None:
        from huggingface_hub import try_to_load_from_cache

        needed = sum(
            listing.sizes[file]
            for file in files
            if not isinstance(
                try_to_load_from_cache(listing.repository, file, cache_dir=self.cache_dir, revision=listing.commit), str
            )
        )
        place = self._cache_root()
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        if needed > free:
            raise HubError(
                f"{listing.repository} needs {needed / 2**30:.2f} GiB of disk and {place} has {free / 2**30:.2f} free; "
                "make room, or give another place with --download-dir or HF_HOME"
            )

    def _cache_root(self) -> Path:
        from huggingface_hub import constants

        return Path(self.cache_dir or constants.HF_HUB_CACHE).expanduser()

    def _remember_revision(self, listing: Listing) -> None:
        """Which commit the revision was, so that the cache answers for it without a network."""
        refs = self._repository_folder(listing.repository) / "refs"
        target = refs / (self.revision or "main")
        if self.revision == listing.commit or not refs.parent.is_dir():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(listing.commit, "utf-8")

    def _repository_folder(self, repository: str) -> Path:
        return self._cache_root() / f"models--{repository.replace('/', '--')}"

    def _snapshot(self, repository: str) -> Path | None:
        """The cached snapshot of the revision, whole or not."""
        folder = self._repository_folder(repository)
        revision = self.revision or "main"
        ref = folder / "refs" / revision
        commit = ref.read_text("utf-8").strip() if ref.is_file() else revision
        snapshot = folder / "snapshots" / commit
        return snapshot if snapshot.is_dir() else None

    def _cached(self, name: HubName, weights: bool) -> Path:
        snapshot = self._snapshot(name.repository)
        if snapshot is None:
            raise HubError(
                f"{name} is not in the cache ({self._cache_root()}) and the Hub is not asked (HF_HUB_OFFLINE, or no "
                f"network); fetch it once with a network, or give a directory{_nearest(name.repository)}"
            )
        sizes = {str(p.relative_to(snapshot)): p.stat().st_size for p in snapshot.rglob("*") if p.is_file()}
        listing = Listing(name.repository, snapshot.name, sizes)
        if name.variant or CONFIG not in sizes:
            return snapshot / _gguf_files(listing, name.variant)[0]
        if weights:
            files = [SINGLE] if SINGLE in sizes else self._cached_shards(snapshot, sizes)
            if not files:
                raise HubError(f"the cache holds {name} without its weights; fetch them once with a network")
        return snapshot

    def _cached_shards(self, snapshot: Path, sizes: dict[str, int]) -> list[str]:
        if INDEX not in sizes:
            return []
        shards = set(json.loads((snapshot / INDEX).read_text("utf-8"))["weight_map"].values())
        return sorted(shards) if shards <= set(sizes) else []

    def _gguf_header(self, listing: Listing, file: str) -> Path:
        """A file of the GGUF's size whose header is there and whose tensors are holes: it takes no disk.

        Headers have no length field, so more is asked for until one can be read.
        """
        target = cache_directory() / "headers" / listing.repository / listing.commit / Path(file).name
        if target.is_file() and target.stat().st_size == listing.sizes[file]:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{os.getpid()}")
        size, whole = _FIRST_HEADER_BYTES, listing.sizes[file]
        try:
            while True:
                size = min(size, whole)
                partial.write_bytes(self._range(listing, file, 0, size))
                try:
                    header = read_shard(partial)
                    break
                except ModelError:
                    if size >= min(whole, _MOST_HEADER_BYTES):
                        raise
                    size *= 4
            with partial.open("r+b") as out:
                out.truncate(whole)
                if rope := header.tensors.get("rope_freqs.weight"):  # the one tensor that a config is read from
                    out.seek(rope.offset)
                    out.write(self._range(listing, file, rope.offset, 4 * rope.shape[0]))
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        return target

    def _range(self, listing: Listing, file: str, start: int, length: int) -> bytes:
        with self._errors(listing.repository):
            from huggingface_hub import hf_hub_url
            from huggingface_hub.utils import (  # type: ignore[attr-defined]
                build_hf_headers,
                get_session,
                hf_raise_for_status,
            )

            url = hf_hub_url(listing.repository, file, revision=listing.commit, endpoint=self.endpoint)
            asked = {"Range": f"bytes={start}-{start + length - 1}"}
            response = get_session().get(url, headers={**build_hf_headers(token=self.token), **asked})
            hf_raise_for_status(response)
            content: bytes = response.content
            return content if response.status_code == 206 else content[start : start + length]
        raise AssertionError

    @contextmanager
    def _errors(self, repository: str) -> Iterator[None]:
        """What goes wrong with the Hub, as one line that says which."""
        try:
            yield
        except ModuleNotFoundError as error:
            if error.name != "huggingface_hub":
                raise
            raise HubError(
                f"{repository} is a name on the Hub, and fetching it needs huggingface_hub: pip install huggingface_hub"
            ) from None
        except HubError:
            raise
        except Exception as error:
            message = self._explained(repository, error)
            if message is None:
                raise
            raise HubError(message) from error

    def _explained(self, repository: str, error: Exception) -> str | None:
        from huggingface_hub import constants, errors

        host = self.endpoint or constants.ENDPOINT
        status = getattr(getattr(error, "response", None), "status_code", None)
        has_token = bool(self.token or os.environ.get("HF_TOKEN"))
        if isinstance(error, errors.GatedRepoError):
            return (
                f"{repository} is gated: accept its terms at {host}/{repository}, then log in with `hf auth login` or "
                "set HF_TOKEN to a token of that account"
            )
        if status == 401 and has_token:
            return f"{host} refuses the token for {repository}; renew it at {host}/settings/tokens and set HF_TOKEN"
        if isinstance(error, errors.RevisionNotFoundError):
            return f"{repository} has no revision {self.revision!r}; leave --revision out for its main branch"
        if isinstance(error, errors.RepositoryNotFoundError):
            return _not_on_hub(repository, host, has_token)
        if status == 403:
            return f"{host} forbids reading {repository} with this token (403); use one that may read it"
        if status == 429:
            return (
                f"{host} asks to wait: too many requests (429); try again in a minute, or log in with `hf auth login`"
            )
        if status is not None:
            return f"{host} answers {status} for {repository}; try again later"
        if _is_offline(error):
            return (
                f"no network: {host} cannot be reached for {repository}; check the connection or HF_ENDPOINT, or give "
                f"a directory{_nearest(repository)}"
            )
        return f"cannot fetch {repository}: {error}" if isinstance(error, OSError) else None


def _is_offline(error: BaseException) -> bool:
    """Whether an error means that the Hub was not reached at all; its class is the client's own in each release."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, ConnectionError | TimeoutError) or type(current).__name__ in (
            "ConnectError",
            "ConnectTimeout",
            "ReadTimeout",
            "ReadError",
            "RemoteProtocolError",
            "OfflineModeIsEnabled",
        ):
            return True
        current = current.__cause__ or current.__context__
    return False


def _not_on_hub(repository: str, host: str, has_token: bool) -> str:
    private = "" if has_token else "; a private one needs HF_TOKEN or `hf auth login`"
    return f"there is no model {repository} at {host}{_nearest(repository)}{private}"


def _nearest(repository: str) -> str:
    """A word on the shipped shape whose name is most alike."""
    from difflib import get_close_matches

    from windowpane.models import shipped_names

    close = get_close_matches(repository.rsplit("/", 1)[-1].lower(), shipped_names(), n=1, cutoff=0.5)
    return f"; the nearest shipped shape is {close[0]}" if close else ""


def _text_files(listing: Listing) -> list[str]:
    templates = [file for file in listing.sizes if file.startswith(_TEMPLATES) and file.endswith(".jinja")]
    return [file for file in _TEXT_FILES if file in listing.sizes] + sorted(templates)


def _no_weights(listing: Listing) -> str:
    if variants := _variants(listing):
        return _choose(listing.repository, variants)
    pickles = sorted(file for file in listing.sizes if file.endswith(_PICKLES))
    if pickles:
        return (
            f"{listing.repository} holds its weights only as pickles ({pickles[0]}), which may run code when they are "
            "loaded and are refused; use a repository or --revision with safetensors"
        )
    return f"{listing.repository} holds no {SINGLE}, no {INDEX} and no GGUF file"


def _variants(listing: Listing) -> dict[str, list[str]]:
    """GGUF files by what tells them apart, each with its shards in order; vision projectors are no models."""
    variants: dict[str, list[str]] = {}
    stems: dict[str, list[str]] = {}
    for file in sorted(listing.sizes):
        if file.endswith(".gguf") and not Path(file).name.startswith("mmproj"):
            stems.setdefault(_SHARD.sub("", file).removesuffix(".gguf"), []).append(file)
    for stem, files in stems.items():
        name = Path(stem).name
        quant = _QUANT.search(name)
        variants[(quant[1] if quant else name).upper()] = files
    return variants


def _gguf_files(listing: Listing, variant: str) -> list[str]:
    """The shards of one GGUF file, in order."""
    variants = _variants(listing)
    if not variants:
        raise HubError(
            f"{listing.repository} holds no GGUF file" if variant else f"{listing.repository} holds no {CONFIG}"
        )
    if not variant and len(variants) == 1:
        return next(iter(variants.values()))
    if variant.upper() not in variants:
        raise HubError(_choose(listing.repository, variants, variant))
    return variants[variant.upper()]


def _choose(repository: str, variants: dict[str, list[str]], variant: str = "") -> str:
    names = sorted(variants)
    has = f"has no GGUF file {variant}" if variant else "holds several GGUF files" if len(names) > 1 else "holds a GGUF"
    return f"{repository} {has}; name one, as in {repository}:{names[0]}. There are {', '.join(names)}"
