"""The plans and tables that pages show are what their commands print. `scripts/plans` writes them."""

import re
import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parent.parent / "scripts" / "plans"))
LONG = "scripts/studies sizes"  # minutes; `scripts/plans --check` compares it
EVERY = [shown for path in SCRIPT["PAGES"] for shown in SCRIPT["commands"](path.read_text())]
SHOWN = [shown for shown in EVERY if shown[0] != LONG]
ONE_HOST = [shown for shown in SHOWN if re.search(r"--cluster [128]x[A-Z]|studies memory", shown[0])]


def test_pages_show_plans_for_one_host_and_for_several():
    assert 4 <= len(ONE_HOST) < len(SHOWN) < len(EVERY)


@pytest.mark.parametrize(("command", "what", "text"), ONE_HOST, ids=range(len(ONE_HOST)))
def test_what_a_page_shows_of_a_plan_on_one_host_is_what_it_prints(command, what, text):
    assert SCRIPT["printed"](command, what) == text, "run scripts/plans"


@pytest.mark.slow
@pytest.mark.parametrize(("command", "what", "text"), [s for s in SHOWN if s not in ONE_HOST])
def test_what_a_page_shows_of_a_plan_on_several_hosts_is_what_it_prints(command, what, text):
    assert SCRIPT["printed"](command, what) == text, "run scripts/plans"
