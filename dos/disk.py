"""The error of state on disk, under its public name."""

from dos.state.disk import DiskError

__all__ = ["DiskError"]
