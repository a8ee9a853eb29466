"""Configurations of models by their name on the Hugging Face hub, from its cache on this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def config_path(given: str) -> Path:
    """The file of a configuration: a path as it is, or a hub name such as `meta-llama/Llama-3.1-8B`.

    Nothing is downloaded. Raises ValueError for a name whose configuration the cache does not have.
    """
    path = Path(given)
    if path.exists() or path.suffix == ".json" or not _NAME.fullmatch(given):
        return path
    cache = _cache()
    model = cache / f"models--{given.replace('/', '--')}"
    reference = model / "refs" / "main"
    current = reference.read_text().strip() if reference.is_file() else "*"
    found = list(model.glob(f"snapshots/{current}/config.json")) or list(model.glob("snapshots/*/config.json"))
    if not found:
        raise ValueError(
            f"no file {given!r}, and no configuration of a model of that name in {cache}; get it with "
            f"hf download {given} config.json (older: huggingface-cli download), or pass the file from "
            f"https://huggingface.co/{given}/blob/main/config.json"
        )
    return max(found, key=lambda each: each.stat().st_mtime)


def _cache() -> Path:
    """Where huggingface_hub keeps models: HF_HUB_CACHE, else `hub` in HF_HOME, else in the user's cache."""
    if hub := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(hub).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"
