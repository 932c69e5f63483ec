"""The list of formats: light to import, and each entry is what it says."""

from __future__ import annotations

import subprocess
import sys

from zoo.weights.catalog import CATALOG
from zoo.weights.formats import FORMATS
from zoo.weights.formats.common import Format


def test_every_entry_is_a_format() -> None:
    for name, entry in FORMATS.items():
        form = FORMATS.code(name)
        assert issubclass(form, Format)
        assert form.name == name
        assert form.what and entry.summary
        assert "detect" in vars(form)


def test_the_catalogs_formats_are_known() -> None:
    assert {card.format for card in CATALOG.values()} <= set(FORMATS)


def test_the_list_needs_no_torch() -> None:
    code = "import sys, zoo.weights.formats as f; assert f.FORMATS['swav'].summary; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
