"""How long calls of workers may take."""

import pytest

from stretto.recipe.schema import Deadlines, NativeEngineSection, Recipe, SglangEngineSection, VllmEngineSection
from stretto.workers.deadlines import CallDeadlines, call_deadlines

GIVEN = Deadlines(start=300, generate=10, train=20, publish=30)


@pytest.mark.parametrize(
    ("engine", "again"),
    [(NativeEngineSection(), 0), (VllmEngineSection(), 300), (SglangEngineSection(url="http://host:1"), 300)],
    ids=["native", "vllm", "server"],
)
def test_an_engine_of_another_process_may_load_again_in_any_call_after_the_start(engine, again):
    found = call_deadlines(Recipe(engine=engine, deadlines=GIVEN))
    assert found == CallDeadlines(start=300, generate=10 + again, train=20 + again, publish=30 + again)
