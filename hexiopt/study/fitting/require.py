"""The least of a verdict that is required."""

from hexiopt.reading import Section

REQUIRED = ("context", "micro_batch", "layers", "tokens_per_s")


def least_required(section: Section) -> dict[str, float]:
    """The least of each quantity that a mapping requires. Raises InputError naming the key."""
    least = {key: section.number(key, above=0, at_most=1e15) for key in REQUIRED if key in section}
    section.finish()
    return least
