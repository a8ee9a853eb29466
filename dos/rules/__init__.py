"""Rules of updates: base.py has the protocol, adamw.py the one rule that there is."""
