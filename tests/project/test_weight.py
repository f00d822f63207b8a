"""Each package has a budget of lines, which a step lowers and no step raises without deleting elsewhere."""

import pytest
from weight import BUDGETS, count_lines

LINES = count_lines()


def test_each_package_has_a_budget():
    assert set(LINES) == set(BUDGETS)


@pytest.mark.parametrize("entry", BUDGETS)
def test_a_package_keeps_to_its_budget_of_lines(entry):
    assert LINES[entry] <= BUDGETS[entry], "delete what answers the same question, or lower another budget by as much"
