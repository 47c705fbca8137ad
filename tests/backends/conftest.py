"""What tests of every backend want; its folder is where they find `cases` and `drawn`."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="module")
def cache_of_its_own(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Graphs of random models are not to stay in the user's cache; the real model, found before, is in no other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XINFER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
