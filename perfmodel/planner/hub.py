"""Configurations of models by their name on the Hugging Face hub, from its cache on this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path


def config_path(given: str) -> Path:
    """The file of a configuration: a path as it is, or a hub name such as `meta-llama/Llama-3.1-8B`.

    Nothing is downloaded: huggingface_hub keeps models in HF_HUB_CACHE, else `hub` in HF_HOME, else in the user's
    cache. Raises ValueError for a name whose configuration is not there.
    """
    path, environment = Path(given), os.environ
    if path.exists() or path.suffix == ".json" or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", given):
        return path
    home = environment.get("HF_HOME") or Path(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    hub = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE") or Path(home, "hub")
    cache = Path(hub).expanduser()
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
