"""Rules of updates: base.py has the protocol, adamw.py the only rule."""
