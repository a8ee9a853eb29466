"""Plan training before renting hardware: the command is `perfmodel.planner.main`."""

import importlib.util
import sys

if __name__ == "__main__":
    if importlib.util.find_spec("numpy") is None:  # as in a new environment, where README's first command is tried
        print("python -m perfmodel: numpy is needed to plan: pip install numpy rich", file=sys.stderr)
        sys.exit(2)
    from perfmodel.planner.main import main

    sys.exit(main())
