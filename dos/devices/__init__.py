"""Accelerators behind one small protocol."""

from dos.devices.base import (
    LANE_OF,
    Cached,
    Caller,
    Copy,
    Device,
    Job,
    Mark,
    Memory,
    ThreadJob,
    memory_of,
    pinned_whole,
    pinned_zeros,
)
from dos.devices.emulated import EmulatedDevice, Script
from dos.devices.select import DeviceFinder, checked_device

__all__ = [
    "LANE_OF",
    "Cached",
    "Caller",
    "Copy",
    "Device",
    "DeviceFinder",
    "EmulatedDevice",
    "Job",
    "Mark",
    "Memory",
    "Script",
    "ThreadJob",
    "checked_device",
    "memory_of",
    "pinned_whole",
    "pinned_zeros",
]
