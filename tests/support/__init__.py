"""What tests share; nothing here is a test."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""Of the checkout."""
