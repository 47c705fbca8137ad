"""What tests of every backend want; its folder is where they find `cases` and `drawn`."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Graphs of random models are not to stay in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XINFER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
