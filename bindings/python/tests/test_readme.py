# SPDX-License-Identifier: Apache-2.0
"""The README's session in Python, as a doctest."""

from __future__ import annotations

import doctest
import re

from conftest import ROOT


def test_readme() -> None:
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```pycon\n(.*?)^```$", text, re.M | re.S)
    assert blocks, "the README has no session in Python"
    for block in blocks:
        test = doctest.DocTestParser().get_doctest(block, {}, "README", "README.md", 0)
        assert test.examples
        result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
        assert result.failed == 0
