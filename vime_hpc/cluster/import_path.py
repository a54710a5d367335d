"""Where a rank finds the user's own modules: it is started with -P, so that nothing there hides Python's or ours."""

from __future__ import annotations

import os
import sys

IMPORT_FROM = "VIME_IMPORT_FROM"
"""Environment variable: the directory the run was started or submitted from."""


def add_users_modules() -> None:
    """Look for modules in that directory too, after everywhere else."""
    directory = os.environ.get(IMPORT_FROM)
    if directory and directory not in sys.path:
        sys.path.append(directory)
