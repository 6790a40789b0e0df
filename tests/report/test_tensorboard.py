"""TensorBoard shows the metrics of the run as it went in the end, and nothing of a course that was given up."""

import subprocess
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sample_rows import row
from stretto.report.tensorboard import TensorBoard


def shown(folder, name):
    reader = EventAccumulator(str(folder))
    reader.Reload()
    return [(point.step, round(point.value, 3)) for point in reader.Scalars(name)]


def write(folder, steps, value, **keywords):
    board = TensorBoard(folder, **keywords)
    for step in steps:
        board.metrics(step, {"loss": value, "grad_norm": None})
    board.close()


def test_metrics_become_scalars_and_missing_ones_have_no_point(tmp_path):
    write(tmp_path, range(3), 0.5)
    assert shown(tmp_path, "loss") == [(0, 0.5), (1, 0.5), (2, 0.5)]
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    assert reader.Tags()["scalars"] == ["loss"]


def test_after_a_resume_the_later_steps_of_the_first_process_are_gone(tmp_path):
    write(tmp_path, range(5), 0.5)
    write(tmp_path, range(3, 5), 0.25, after=2)
    assert shown(tmp_path, "loss") == [(0, 0.5), (1, 0.5), (2, 0.5), (3, 0.25), (4, 0.25)]


def test_recipe_and_answers_become_text_in_which_nothing_is_markup(tmp_path):
    board = TensorBoard(tmp_path)
    board.recipe({"optimizer.lr": 1e-4})
    board.samples(2, [row(answer="a|b`c`<b>\x1b[2J")])
    board.close()
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    recipe, samples = (
        reader.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0].decode() for name in ("recipe", "samples")
    )
    assert "`optimizer.lr` | `0.0001`" in recipe
    assert "`a│b'c'<b>\ufffd[2J`" in samples


def test_the_reports_load_no_torch_until_a_board_is_made():
    code = (
        "import sys, stretto.report.console, stretto.report.timeline, stretto.report.tensorboard;"
        "assert not {'torch', 'tensorboard'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
