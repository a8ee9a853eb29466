"""Accelerators behind one small protocol."""

from dos.devices.base import Copy, Device, Job, Memory
from dos.devices.emulated import EmulatedDevice
from dos.devices.select import device_for, host_zeros

__all__ = ["Copy", "Device", "EmulatedDevice", "Job", "Memory", "device_for", "host_zeros"]
