"""The commands of ``minedraft``, a module each: its flags, and the one function that it calls."""
