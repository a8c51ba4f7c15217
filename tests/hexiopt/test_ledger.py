import pytest

from hexiopt.errors import InputError
from hexiopt.ledger import Ledger, Vocabulary

VOCABULARY = Vocabulary(
    harmless=frozenset({"log-interval", "wandb-*"}),
    refused={
        "num-experts": "mixtures of experts are not planned; import a dense layout",
        "fp8-*": "FP8 is not read here; state workload.precision=fp8",
        "cp": lambda value: "context parallelism is not planned; take 1" if int(value) > 1 else None,
    },
)


def test_every_key_is_read_harmless_refused_or_named_as_not_read() -> None:
    ledger = Ledger("a.sh", {"tp": 2, "log-interval": 1, "wandb-name": "x", "odd": 3, "cp": "1"}, VOCABULARY, "--{}")
    assert ledger["tp"] == 2
    assert ledger.get("pp", 1) == 1
    ledger.refuse()
    assert ledger.notes() == ["not read: --odd"]


def test_what_is_asked_for_counts_as_read_even_by_in() -> None:
    ledger = Ledger("a.sh", {"flag": []}, VOCABULARY)
    assert "flag" in ledger
    assert ledger.notes() == []


def test_all_faults_come_in_one_line() -> None:
    ledger = Ledger("a.sh", {"num-experts": ["8"], "fp8-format": ["hybrid"], "cp": "4"}, VOCABULARY, "--{}")
    with pytest.raises(InputError) as error:
        ledger.refuse()
    assert str(error.value) == (
        "a.sh: --num-experts 8: mixtures of experts are not planned; import a dense layout; also --fp8-format hybrid: "
        "FP8 is not read here; state workload.precision=fp8; also --cp '4': context parallelism is not planned; take 1"
    )


@pytest.mark.parametrize("off", [None, False, 0, "0", "none", [], {}])
def test_a_value_that_states_the_absence_of_a_feature_is_harmless(off: object) -> None:
    ledger = Ledger("c.json", {"num-experts": off}, VOCABULARY)
    ledger.refuse()
    assert ledger.notes() == []


def test_a_closed_format_names_all_unknown_keys_at_once() -> None:
    ledger = Ledger("c.json", {"rope": 1, "hid": 2}, VOCABULARY)
    with pytest.raises(InputError, match=r"c\.json: unknown keys rope, hid; remove them"):
        ledger.refuse_unread(frozenset({"hidden"}), "remove them")
    with pytest.raises(InputError, match=r"unknown key hid, did you mean hidden\?; remove it"):
        Ledger("c.json", {"hid": 2}, VOCABULARY).refuse_unread(frozenset({"hidden"}), "remove it")


def test_a_flag_without_a_value_is_refused_where_no_value_means_that_it_is_on() -> None:
    flags = Vocabulary(refused={"mtp": "it is not planned; leave it out"}, off=(["0"],))
    assert Ledger("a.sh", {"mtp": []}, flags, "--{}").faults() == ["--mtp: it is not planned; leave it out"]
    assert Ledger("a.sh", {"mtp": ["0"]}, flags, "--{}").faults() == []
