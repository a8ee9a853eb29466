"""Room on disk for optimizer state, and reads and writes of it."""

from dos.state.disk.extent import PAGE, Extent
from dos.state.disk.files import DiskError
from dos.state.disk.space import DiskSpace

__all__ = ["PAGE", "DiskError", "DiskSpace", "Extent"]
