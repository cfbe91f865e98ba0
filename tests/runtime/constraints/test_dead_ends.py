"""Rows for which nothing is left: behind an end they are nobody's business, elsewhere what came before is said."""

from __future__ import annotations

from typing import Any

import pytest

from mtp_engines.errors import RequestError
from mtp_runtime import Model
from mtp_runtime.sampling import accept
from mtp_runtime.sampling.law import Law, Laws
from tests.runtime.conftest import carried  # noqa: F401

ASKED: dict[str, Any] = {"prompt": "The ", "choice": ["abcd"], "bad_words": ["c"], "max_new_tokens": 8}
WAYS = [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "seed": 3, "acceptor": "rejection"}]
WAYS += [{"acceptor": "relaxed"}, {"verify": "step"}]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_row_behind_the_end_may_have_nothing_left(carried: Model, way: dict[str, Any]) -> None:  # noqa: F811
    """The stop text ends the answer before the banned token; a verify has a row for it all the same."""
    for draft_tokens in range(5):
        finished = carried.complete(**ASKED, **way, stop="b", draft_tokens=draft_tokens)
        assert (finished.text, finished.finish_reason) == ("a", "stop")


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_dead_end_fails_after_all_that_could_be_said(carried: Model, way: dict[str, Any]) -> None:  # noqa: F811
    for draft_tokens in range(5):
        said: list[str] = []
        with pytest.raises(RequestError, match="every token is masked"):
            said.extend(event.text for event in carried.generate(**ASKED, **way, draft_tokens=draft_tokens))
        assert "".join(said) == "ab"


def test_control_rows_behind_accepted_drafts_that_fail_at_once_are_seen(
    carried: Model,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def strict(laws: Laws, row: int) -> Law:
        return laws[row]

    monkeypatch.setattr(accept, "law_behind_accepted", strict)
    with pytest.raises(RequestError):
        test_a_row_behind_the_end_may_have_nothing_left(carried, {})
