# SPDX-License-Identifier: Apache-2.0
"""The session in docs/python.md, as a doctest."""

from __future__ import annotations

import doctest
import re

from conftest import ROOT


def test_docs() -> None:
    text = (ROOT / "docs" / "python.md").read_text()
    blocks = re.findall(r"^```pycon\n(.*?)^```$", text, re.M | re.S)
    assert blocks, "docs/python.md has no session"
    for block in blocks:
        test = doctest.DocTestParser().get_doctest(block, {}, "docs", "python.md", 0)
        assert test.examples
        result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
        assert result.failed == 0
