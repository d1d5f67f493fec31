"""`python -m cli` is `agentrl`."""

import sys

from cli.main import main

sys.exit(main())
