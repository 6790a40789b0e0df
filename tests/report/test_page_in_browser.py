"""A real run's report in a real browser: it draws, a click leads to tokens, the timeline zooms, nothing is loaded."""

import asyncio

import pytest

from browsing import chromium, needs_chromium
from recorded import trajectory, write_run
from running import start
from stretto.report.html import ReportPage

pytestmark = [pytest.mark.slow, needs_chromium]

DRAWN = """[...document.querySelectorAll('#curves canvas')].map((canvas) => {
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  return pixels.some((value) => value > 0);
})"""


async def looked_at(path):
    """A look through the page of a run of three steps."""
    async with chromium() as tab:
        await tab.open(path)
        drawn = await tab.value(DRAWN)
        assert len(drawn) >= 6 and all(drawn)
        assert "held-out accuracy" in await tab.value("document.querySelector('#overview').innerText")
        assert await tab.value("document.querySelector('#explained').innerText")

        # A click on a curve leads to its step, an attempt to its tokens, a token to its numbers.
        await tab.click(*await tab.place("#curves .card:nth-child(2) .u-over", across=0.34))
        await tab.until("document.querySelector('#answers h2')?.innerText.startsWith('Answers of step 1')")
        await tab.click(*await tab.place(".attempt:nth-child(3)", down=0.1))
        await tab.until("document.querySelector('.token-card h4')?.innerText.startsWith('Attempt 2')")
        assert await tab.value("document.querySelectorAll('.token.drawn').length") >= 1
        assert await tab.value("document.querySelectorAll('.tree .turn.mine').length") == 1
        await tab.mouse("mouseMoved", *await tab.place(".token.drawn"))
        await tab.until("document.querySelector('.reading').innerText.includes('log-prob')")
        reading = await tab.value("document.querySelector('.reading').innerText")
        assert "advantage" in reading and "drawn by the model" in reading

        # The timeline has a lane for each cell, shows idle time, and zooms.
        view = "document.querySelector('#lanes').dataset.view.split(',').map(Number)"
        low, high = await tab.value(view)
        await tab.mouse("mouseWheel", *await tab.place("#lanes"), deltaX=0, deltaY=-400)
        await tab.until(f"({view})[1] - ({view})[0] < {(high - low) * 0.9}")
        busy = await tab.value("document.querySelector('#lanes').dataset.busy.split(',').map(Number)")
        assert len(busy) >= 2 and all(0 <= share <= 1 for share in busy)

        # The same in the other theme.
        before = await tab.value("getComputedStyle(document.body).backgroundColor")
        await tab.value("document.querySelector('#theme').click()")
        await tab.value("document.querySelector('#theme').click()")
        assert await tab.value("getComputedStyle(document.body).backgroundColor") != before
        assert tab.errors == []
        assert {address.partition(":")[0] for address in tab.asked} <= {"file", "data", "blob"}


def test_a_real_runs_page_opens_and_answers_clicks(tmp_path):
    finished = start(tmp_path)
    path = finished.folder / "report.html"
    assert path.stat().st_size < 300_000
    asyncio.run(looked_at(path))


async def hostile(path, text):
    async with chromium() as tab:
        await tab.open(path)
        assert await tab.value("document.querySelectorAll('img, iframe, object').length") == 0
        assert text in await tab.value("document.querySelector('.said').textContent")
        assert await tab.value("window.hurt === undefined")
        assert tab.errors == []
        # The policy refuses what slipped in all the same: were there such a tag, it would neither load nor run.
        await tab.value(
            "document.body.insertAdjacentHTML('beforeend', '<img src=http://127.0.0.1:9/x onerror=\"window.hurt=1\">')"
        )
        for _ in range(100):
            if len(tab.errors) >= 2:
                break
            await asyncio.sleep(0.05)
        assert len(tab.errors) >= 2 and all("Content Security Policy" in error for error in tab.errors)
        assert await tab.value("window.hurt === undefined")
        assert not [address for address in tab.asked if address.startswith("http")]


def test_what_a_model_wrote_neither_runs_nor_loads(tmp_path):
    text = "</script><img src=x onerror=window.hurt=1><script>window.hurt=1</script>"
    folder = write_run(
        tmp_path / "run", rows=lambda step: [trajectory(step, 0, a, ["What", "?", text, "4"]) for a in range(2)]
    )
    ReportPage([folder]).write(tmp_path / "page.html")
    asyncio.run(hostile(tmp_path / "page.html", text))
