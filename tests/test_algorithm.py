"""docs/algorithm.md names functions and tests that exist, and shows what the command prints."""

import re
from pathlib import Path

import pytest

from experiments import codecs
from taco_jax import PRESETS

DOC = Path(__file__).parent.parent / "docs" / "algorithm.md"
TEXT = DOC.read_text()
ROW = r"^  (\w+)((?:\s+\d+\.\d+){5})\s*$"


def test_every_equation_names_code_that_exists():
    named = re.findall(r"\[`(\w+)`\]\(([^\s)]+)\)", TEXT)
    assert len(named) > 20 and len(re.findall(r"\]\(", TEXT)) == len(named)
    for name, path in named:
        assert re.search(rf"^(def|class) {name}\b", (DOC.parent / path).read_text(), re.MULTILINE), (name, path)


def test_every_test_it_refers_to_exists():
    named = re.findall(r"`(tests/\w+\.py)(?:::(\w+))?`", TEXT)
    assert len(named) > 5
    for path, name in named:
        assert f"def {name}" in (DOC.parent.parent / path).read_text(), (path, name)


def test_math_is_written_as_github_renders_it():
    """Inline between $` and `$, so that Markdown touches nothing of it; displayed in math blocks."""
    prose = re.sub(r"^```.*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE)
    assert "$" not in re.sub(r"\$`[^`$\n]+`\$", "", prose)
    assert TEXT.count("```") % 2 == 0
    for block in re.findall(r"^```math\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE):
        assert block.count("{") == block.count("}")
        assert len(re.findall(r"\\left\b", block)) == len(re.findall(r"\\right\b", block))


@pytest.mark.slow
def test_the_table_is_what_the_command_prints(capsys):
    assert codecs.main([]) == 0
    printed = capsys.readouterr().out
    shown, found = (
        {preset: figures.split() for preset, figures in re.findall(ROW, text, re.MULTILINE)} for text in (TEXT, printed)
    )
    assert shown.keys() == found.keys() == set(PRESETS) - {"none"}
    for preset, figures in shown.items():
        assert figures[0] == found[preset][0]
        # Another processor may round a figure that ends in 5 the other way.
        assert list(map(float, figures)) == pytest.approx(list(map(float, found[preset])), abs=0.101), preset
    assert re.search(r"paper: .*", printed).group() in TEXT
