"""`python -m hexiopt VERB ...`."""

import sys

from hexiopt.command import main

sys.exit(main())
