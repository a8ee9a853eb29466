"""Plan training before renting hardware: the command is `perfmodel.planner.main`."""

import sys

from perfmodel.planner.main import main

if __name__ == "__main__":
    sys.exit(main())
