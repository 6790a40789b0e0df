"""One run with an adapter, which the tests of this folder look at and do not change."""

import pytest

from exported import lora_run


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """The folder of the run."""
    return lora_run(tmp_path_factory.mktemp("lora"))
