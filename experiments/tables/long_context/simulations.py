"""Uneven sequence layouts against even ones on HexiSeq's simulated clusters 1 to 3: 13B and 70B, to 1,024K tokens.

python -m experiments.tables.long_context.simulations          # about 14 minutes on two cores
python -m experiments.tables.long_context.simulations --quick  # seconds, on a tiny setting
"""

import sys

from experiments.tables import published
from experiments.tables.frame import main
from experiments.tables.long_context.comparison import comparison
from experiments.tables.long_context.settings import SIMULATIONS

TABLE = comparison(
    "simulations",
    "Long contexts on clusters of three and four GPU types",
    SIMULATIONS,
    published.sequence_ratios("simulations"),
    by_peak=True,
)

if __name__ == "__main__":
    sys.exit(main(TABLE, __doc__))
