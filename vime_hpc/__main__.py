"""`python -m vime_hpc`, the same as the `vime-hpc` command."""

import sys

from vime_hpc.cli.main import main

sys.exit(main())
