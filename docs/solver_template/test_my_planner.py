from hexiopt.testing import check_pricer, check_solver


def test_the_solver_keeps_the_contract():
    check_solver("mine", max_tp=4)


def test_the_pricer_keeps_the_contract():
    check_pricer("hidden_sync")
