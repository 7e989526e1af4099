"""The examples of layouts/README.md."""

from __future__ import annotations

import doctest
from pathlib import Path

import cutedsl_fa3.layouts as layouts


def test_the_examples_in_the_readme_print_what_it_says():
    path = Path(layouts.__file__).with_name("README.md")
    # A closing fence would count as expected output.
    text = path.read_text().replace("```", "\n")
    example = doctest.DocTestParser().get_doctest(text, {}, path.name, str(path), 0)
    results = doctest.DocTestRunner().run(example)
    assert results.attempted >= 14
    assert results.failed == 0
