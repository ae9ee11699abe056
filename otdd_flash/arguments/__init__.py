"""What every public entry accepts: a declaration for each, one check per argument.

Functions take theirs by `checks.takes`, dataclasses of options by `checks.check_fields`. Whatever
prepares a request for later can check it here as well: nothing of this imports torch.
"""
