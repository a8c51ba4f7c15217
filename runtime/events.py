"""What the processes of a run tell the one that its user started, and it whoever follows the run: plain data."""

from typing import Any

Event = dict[str, Any]
"""`event` says what has happened (`step`, `validation`, `checkpoint`, `restart`, `note`, `error`, ...), other keys with
which numbers; all of it goes through JSON."""
