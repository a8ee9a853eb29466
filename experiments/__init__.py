"""Commands that reproduce the paper (`paper`), measure us (`bench`) and check a machine (`check`); see README.md."""

from pathlib import Path

# `python -m experiments.NAME` finds the commands in these folders by their names alone; imports name the folder.
__path__.extend(str(Path(__file__).parent / folder) for folder in ("paper", "bench", "check"))
