"""Uneven sequence layouts against even ones on HexiSeq's mixed testbed: 3B to 13B, 16K to 256K tokens.

python -m experiments.tables.long_context.testbed              # about 5 minutes on two cores
python -m experiments.tables.long_context.testbed --quick      # seconds, on a tiny setting
"""

import sys

from experiments.tables import published
from experiments.tables.frame import main
from experiments.tables.long_context.comparison import comparison
from experiments.tables.long_context.settings import TESTBED

TABLE = comparison(
    "testbed", "Long contexts on a mixed H100 and A100 testbed", TESTBED, published.sequence_ratios("testbed")
)

if __name__ == "__main__":
    sys.exit(main(TABLE, __doc__))
