"""Sentences that a command would print, as the page shows them."""

from fivefold.web.plan import why
from fivefold.web.question import Ask, without_option_dashes


def test_options_are_named_as_fields_and_commands_stay() -> None:
    assert (
        without_option_dashes("needs 94 GB; nearest: --layout tp=8,sp (+1%)")
        == "needs 94 GB; nearest: layout tp=8,sp (+1%)"
    )
    assert without_option_dashes("--top-k 3 -- and a-b--c") == "top k 3 -- and a-b--c"
    for command in ("`fivefold ui --runs runs`", "'fivefold plan tiny --cluster 2xCPU'"):
        assert without_option_dashes(f"write {command}, or --fix tp=2") == f"write {command}, or fix tp=2"


def test_the_advice_about_a_layout_that_does_not_fit_has_no_option_of_the_command_line() -> None:
    found = why(Ask({"model": "llama3-70b", "cluster": "1x8xH100", "batch": "8", "layout": "tp=8"}, ()))
    assert "it does not fit" in found["advice"]
    assert "--" not in found["advice"]
