"""Of what a session consists: each of these owns some of its fields and entry points."""
