"""`python -m gagar_jax` is the `gagar` command."""

import sys

from gagar_jax.cli import main

sys.exit(main())
