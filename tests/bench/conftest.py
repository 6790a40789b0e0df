import pytest

from stretto.bench import machine


@pytest.fixture(autouse=True, scope="session")
def products_are_measured_briefly():
    """The rate of a machine takes a second or two to measure well; here it only has to be there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "SECONDS", 0.0)
        yield
