"""Skips tests whose libraries are not installed."""

from __future__ import annotations

import importlib.util

import pytest


def needs(*modules: str) -> pytest.MarkDecorator:
    """Skip where one is not installed. Imports none: that takes seconds in every process that collects the tests."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    return pytest.mark.skipif(
        bool(missing), reason=f"not installed: {', '.join(missing)}; pip install '.[examples,tools]'"
    )
