"""A calibration that takes a moment."""

from dos.calibration.rounds import Effort

TINY = Effort(seconds=0.01, repeats=2, host_numel=20_000, device_numel=1000, copy_bytes=10_000, disk_bytes=2**18)
