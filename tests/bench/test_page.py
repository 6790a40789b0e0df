from stretto.bench.page import number, put, section

MACHINE = {
    "cpu": "A Processor",
    "threads": 2,
    "cores": 2,
    "memory_gb": 24.0,
    "load": 0.1,
    "torch": "2.13",
    "transformers": "5.23",
    "trl": None,
}
ROW = {
    "case": "full-43",
    "unit": "s/step",
    "stretto": 5.0,
    "peer": 30.0,
    "peer_name": "P",
    "ratio": 6.0,
    "device": "cpu",
    "prompt_tokens": 43,
    "tokens_generated": {"stretto": 10, "peer": 10},
    "tokens_trained": {"stretto": 10, "peer": 10},
    "flops": {"unshared": 2e12, "shared": 1e12},
    "gflops_per_second": {"stretto": 200.0, "peer": 66.7},
    "matmul_gflops_per_second": 400.0,
    "share_of_matmul_rate": {"stretto": 0.5, "peer": 0.167},
    "replay": {name: {"stretto": 0.25, "peer": 0.25} for name in ("reward", "loss", "grad_norm")},
    "failed": {"batch 64": "it was killed"},
}


def test_a_section_names_date_machine_command_and_figures():
    text = section(
        {"bench": "step", "machine": MACHINE, "rows": [ROW]}, date="2026-01-02", command="stretto bench step"
    )
    assert "2026-01-02, A Processor, 2 threads of 2 cores, 24.0 GB, load 0.1 before the run, device cpu; " in text
    assert "torch 2.13, transformers 5.23.\n" in text
    assert "\n    stretto bench step\n" in text
    assert "| full-43 | s/step | 5 | 30 | 6.00 | P |" in text
    assert "| full-43 | 43 | 10 | 10 | 2.00 | 1.00 | 200, 67 | 400 | 50%, 17% |  |" in text
    assert "| full-43 | 0.25, 0.25 | 0.25, 0.25 | 0.25, 0.25 |" in text
    assert "full-43, left out: it was killed" in text


def text_of(*rows):
    return section({"bench": "step", "machine": MACHINE, "rows": rows}, date="", command="")


def test_work_and_speed_stand_once_for_a_case_that_has_a_row_of_memory_too():
    assert text_of(ROW, ROW | {"unit": "GB at the peak"}).count("| full-43 | 43 |") == 1


def test_both_rates_of_divergence_stand_beside_a_rollout():
    row = ROW | {"divergences_per_1000_tokens": 24.7, "draft_divergences_per_1000_tokens": 3.1}
    assert "| 50%, 17% | 24.7, 3.1 |" in text_of(row)


def test_a_new_run_replaces_the_old_one_and_nothing_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n<!-- results of a -->\nold\n<!-- end of a -->\n\nbelow\n")
    put(page, "a", "new")
    put(page, "b", "other")
    put(page, "a", "newer")
    assert page.read_text() == (
        "# Page\n\n<!-- results of a -->\nnewer\n<!-- end of a -->\n\nbelow\n\n"
        "<!-- results of b -->\nother\n<!-- end of b -->\n"
    )


def test_a_page_that_is_not_there_is_made(tmp_path):
    put(tmp_path / "page.md", "a", "text")
    assert (tmp_path / "page.md").read_text() == "<!-- results of a -->\ntext\n<!-- end of a -->\n"


def test_numbers_have_the_digits_that_count():
    assert [number(value) for value in (0.0123456, 4.0, 123.4, 12345.6)] == ["0.0123", "4", "123", "12,346"]
