"""A drop-in AdamW for PyTorch that keeps optimizer state wherever it is cheapest right now."""

from dos.devices import EmulatedDevice
from dos.gradients.torch_clipping import fold_clipping
from dos.optimizer import DOSAdam

__all__ = ["DOSAdam", "EmulatedDevice", "__version__", "fold_clipping"]

__version__ = "0.1.0"
"""The package's version; pyproject.toml reads it from here."""
