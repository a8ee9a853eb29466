"""Room on disk for optimizer state, and how it is read and written."""

from dos.disk.extent import PAGE, Extent
from dos.disk.files import DiskError
from dos.disk.space import DiskSpace

__all__ = ["PAGE", "DiskError", "DiskSpace", "Extent"]
