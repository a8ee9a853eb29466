"""``python -m dos.calibrate``: measure this machine and keep its profile for DOSAdam."""

from __future__ import annotations

import sys

from dos.calibration.command import main

if __name__ == "__main__":
    sys.exit(main())
