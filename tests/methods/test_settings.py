"""Settings of methods and plans that are of the wrong kind: one line that says what to give."""

import pytest
import torch

import dpbnn
from dpbnn.methods.method import Problem

PLAN = {"epsilon": 1.0, "delta": 1e-5, "n": 100, "batch_size": 10, "epochs": 1}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dpbnn.SGD(clip={"0.": 1.0}), "clip=.*: is of type dict; give one number"),
        (lambda: dpbnn.SGD(clip="1"), "clip='1'"),
        (lambda: dpbnn.SGD(learning_rate=[0.1]), "learning_rate=.*: is of type list"),
        (lambda: dpbnn.SGD(momentum="a"), "momentum='a'"),
        (lambda: dpbnn.SGLD(learning_rate=1e-4, keep=1.5), "keep=1.5: must be a whole number"),
        (lambda: dpbnn.SGHMC(learning_rate=1e-4, friction="a"), "friction='a'"),
        (lambda: dpbnn.BBP(draws="two"), "draws='two'"),
        (lambda: dpbnn.VI(draws=0), "draws=0: must be a whole number >= 1"),
        (lambda: dpbnn.VI(beta=float("nan")), "beta=nan"),
        (lambda: dpbnn.EP(damping="a"), "damping='a'"),
        (lambda: dpbnn.EM(variances=(1.0,)), r"variances=\(1\.0,\)"),
        (lambda: dpbnn.SEP(step_size=(0.1,)), r"step_size=\(0\.1,\): must be a number, or a pair"),
        (lambda: dpbnn.SEP(step_size="a"), "step_size='a'"),
        (lambda: dpbnn.plan(**{**PLAN, "epsilon": "1"}), "epsilon='1': is of type str"),
        (lambda: dpbnn.plan(**{**PLAN, "delta": 0.5}), r"delta=0\.5: must lie in \(0, 0\.1\)"),
        (lambda: dpbnn.plan(**{**PLAN, "n": "100"}), "n='100'"),
        (lambda: dpbnn.plan(**{**PLAN, "epochs": True}), "epochs=True: is of type bool"),
        (lambda: dpbnn.plan(noise_multiplier="a", delta=1e-5, n=9, batch_size=1, steps=1),
         "noise_multiplier='a'"),
        (lambda: dpbnn.open_plan(n=9, batch_size=1, steps="3"), "steps='3'"),
        (lambda: dpbnn.Ledger(epsilon="1", delta=1e-5), "epsilon='1'"),
    ],
)  # fmt: skip
def test_a_setting_of_the_wrong_kind(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("batch", [1, 5])
def test_the_printed_update_stays_where_every_factor_is_the_shared_one(batch):
    """theta <- (gamma/N) sum_i f_i + (N - b gamma/N) f + prior leaves theta = N f + prior."""
    torch.manual_seed(0)
    problem = Problem(
        dpbnn.mlp(2, (3,), 1), dpbnn.likelihoods.Gaussian(0.5), dpbnn.Gaussian(1.0), 20, batch, 4,
        True,
    )  # fmt: skip
    process = dpbnn.SEP.paper(clip=1e9).start(problem)
    state = process.begin()
    before, shared = state.q, process.shared(state.q)
    release = {f"mean.{n}": batch * v for n, v in shared.first.items()}
    release |= {f"precision.{n}": batch * v for n, v in shared.second.items()}
    assert any(v.abs().max() > 0.01 for v in shared.first.values())
    after = process.update(state, release).q
    for name, value in before.first.items():
        torch.testing.assert_close(after.first[name], value)
        torch.testing.assert_close(after.second[name], before.second[name])
