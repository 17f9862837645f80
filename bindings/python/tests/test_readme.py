# SPDX-License-Identifier: Apache-2.0
"""The sessions in docs/python.md, as a doctest: each goes on with the names of the one before."""

from __future__ import annotations

import doctest
import re
from typing import Any

from conftest import ROOT


def test_docs() -> None:
    text = (ROOT / "docs" / "python.md").read_text()
    blocks = re.findall(r"^```pycon\n(.*?)^```$", text, re.M | re.S)
    assert blocks, "docs/python.md has no session"
    names: dict[str, Any] = {}
    for block in blocks:
        test = doctest.DocTestParser().get_doctest(block, names, "docs", "python.md", 0)
        assert test.examples
        result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, clear_globs=False)
        assert result.failed == 0
        names = test.globs
