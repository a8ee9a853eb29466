"""What an update is: base.py has what all others ask of it, adamw.py the one rule that there is."""
