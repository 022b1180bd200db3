import json
import re

import pytest

import dpbnn
from dpbnn.cli import main

PLAN = ["plan", "--delta", "1e-5", "--n", "60000", "--batch-size", "256", "--epochs", "15"]


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    streams = capsys.readouterr()
    return stop.value.code or 0, streams.out, streams.err


def test_plan_prints_noise_steps_and_every_epsilon(capsys):
    code, out, _ = run(capsys, *PLAN, "--noise-multiplier", "1.3")
    assert code == 0
    for word in ("0.8646", "0.9546", "0.8346", "3516", "approximation", "noise / signal"):
        assert word in out, word


def test_plan_as_json_is_a_plan(capsys):
    code, out, _ = run(capsys, *PLAN, "--epsilon", "1", "--json")
    assert code == 0
    values = json.loads(out)
    assert 0.995 <= values["epsilon"] <= 1
    assert set(values["epsilons"]) == {"pld", "rdp", "gdp-clt"}
    assert dpbnn.Plan.from_json(out).steps == 3516


def test_account_reads_a_ledger(capsys, tmp_path):
    path = tmp_path / "ledger.jsonl"
    book = dpbnn.Ledger(path, epsilon=2.0, delta=1e-5)
    book.spend(dpbnn.Poisson(1000, 10).event(1.5, 100), label="training", clip=1.0)
    code, out, _ = run(capsys, "account", str(path))
    assert code == 0
    assert "100 releases" in out
    assert "Budget: epsilon 2" in out
    assert "training" in out
    code, out, _ = run(capsys, "account", str(path), "--json")
    values = json.loads(out)
    assert values["releases"] == 100
    assert values["statement"]["epsilon"] == pytest.approx(book.epsilon())


def test_demo_trains_on_the_digits(capsys):
    code, out, _ = run(capsys, "demo")
    assert code == 0
    assert "1347 training images" in out
    assert float(re.search(r"Test accuracy (\d\.\d+)", out)[1]) > 0.85
    assert "Differential privacy: epsilon =" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*PLAN, "--epsilon", "-1"], "epsilon=-1"),
        ([*PLAN, "--epsilon", "nan"], "epsilon=nan"),
        ([*PLAN, "--epsilon", "one"], "'one' is not a valid float"),
        ([*PLAN], "missing: give all of epsilon"),
        ([*PLAN, "--epsilon", "1", "--relation", "swap"], "relation='swap'"),
        ([*PLAN, "--epsilon", "1", "--sampling", "full"], "leave batch_size out"),
        (["plan", "--epsilon", "1"], "Missing option '--delta'"),
        (["account", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["nothing"], "No such command 'nothing'"),
    ],
)
def test_bad_values_give_one_line_and_exit_code_two(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_a_damaged_ledger_is_one_line_too(capsys, tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text("not a ledger\n")
    code, _, err = run(capsys, "account", str(path))
    assert code == 2
    assert "no readable header" in err


@pytest.mark.parametrize("command", [[], ["plan"], ["account"], ["demo"]])
def test_help_has_an_example(capsys, command):
    code, out, _ = run(capsys, *command, "--help")
    assert code == 0
    assert "Usage: dpbnn" in out
    if command:
        assert f"dpbnn {command[0]}" in out.split("Example:")[1]
