"""Reads a profile file in any of the formats that are known, by what stands in it."""

from pathlib import Path

from hexiopt.errors import InputError
from hexiopt.problem.profile import Profile, profile_from_section
from hexiopt.readers.profiles.amp import amp_profile, is_amp
from hexiopt.readers.profiles.sailor import is_sailor, sailor_profile
from hexiopt.reading import Section, read_mapping


def read_profile(path: Path) -> Profile:
    """The layers measured in a file: of hexiopt, of Sailor or of AMP. Raises InputError."""
    data = read_mapping(path)
    if "format" in data:
        return profile_from_section(Section(data, str(path)))
    if is_amp(data):
        return amp_profile(data, str(path))
    if is_sailor(data):
        return sailor_profile(data, str(path))
    raise InputError(
        f"{path}: is no profile of layers that is known; write format: hexiopt.profile (as hexiopt profile does), or "
        "give a file of Sailor's or AMP's"
    )
