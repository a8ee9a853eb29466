"""Room on disk for optimizer state, and how it is read and written."""

from dos.state.disk.extent import PAGE, Extent
from dos.state.disk.files import DiskError
from dos.state.disk.space import DiskSpace

__all__ = ["PAGE", "DiskError", "DiskSpace", "Extent"]
