"""What `make test` and `make contract` leave to each other, and `make contract-rest` to `make test`."""

from types import SimpleNamespace

import pytest

from conftest import CONTRACT, tiers_of


def item(name, folder=CONTRACT.parent, every=None, **test):
    mark = None if every is None else pytest.mark.sampled(every).mark
    return SimpleNamespace(
        path=folder / "test_it.py", originalname=name, get_closest_marker=lambda _: mark, obj=SimpleNamespace(**test)
    )


def tiers(*items):
    return [sorted(found - {"rest"}) for _, found in tiers_of(items)]


def test_of_a_sampled_test_each_tier_runs_what_the_other_does_not():
    assert tiers(*[item("many", every=3)] * 5) == [["test"], ["contract"], ["contract"], ["test"], ["contract"]]


def test_all_of_the_contract_runs_in_one_tier_and_what_is_sampled_in_both():
    assert tiers(item("one", CONTRACT), item("two", CONTRACT, every=1)) == [["contract"], ["contract", "test"]]


def test_properties_run_in_both_tiers_and_plain_tests_in_one():
    assert tiers(item("plain"), item("drawn", hypothesis=object())) == [["test"], ["contract", "test"]]


def test_the_rest_is_what_make_test_leaves_out_and_properties_with_all_their_examples():
    kinds = {
        "inside": item("all", CONTRACT),
        "both": item("both", CONTRACT, every=1),
        "plain": item("plain"),
        "few": item("few", hypothesis=object()),
        "left": item("left", every=0),
    }
    found = dict(zip(kinds, (tiers for _, tiers in tiers_of(kinds.values())), strict=True))
    assert [name for name, tiers in found.items() if "rest" in tiers] == ["inside", "few", "left"]
    assert all(tiers & {"test", "rest"} for tiers in found.values()), "together they run every test"
    assert all(tiers >= {"contract"} for tiers in found.values() if "rest" in tiers)


def test_of_what_is_sampled_with_zero_make_test_runs_none():
    assert tiers(*[item("long", every=0)] * 2) == [["contract"], ["contract"]]


def test_tests_of_one_name_in_two_files_are_counted_apart():
    assert tiers(item("same", every=2), item("same", CONTRACT, every=2)) == [["test"], ["contract", "test"]]


def test_of_a_test_with_several_cases_make_test_runs_the_first_and_every_fourth_after_it():
    assert tiers(*[item("many")] * 9).count(["test"]) == 3
    assert tiers(*[item("few")] * 3) == [["test"], ["contract"], ["contract"]]
    assert tiers(*[item(None)] * 3) == [["test"]] * 3, "doctests have no name of a test"
