"""What reproduces the paper (`paper`), measures us (`bench`) and checks a machine (`check`); README.md lists all."""

from pathlib import Path

# `python -m experiments.NAME` finds the commands in these folders by their names alone; imports name the folder.
__path__.extend(str(Path(__file__).parent / folder) for folder in ("paper", "bench", "check"))
