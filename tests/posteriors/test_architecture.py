"""Networks described as JSON and rebuilt."""

import json

import pytest
import torch
from torch import nn

import dpbnn
from dpbnn.networks import LearnedNoise, SharedDropout, SlopedNoise, cnn, mlp, to_gaussian
from dpbnn.posteriors import PointPosterior, load
from dpbnn.posteriors.architecture import build, describe, named_tensors

KNOWN = [
    (nn.Sequential(nn.Linear(4, 2), SharedDropout(0.3), LearnedNoise(2)), (4,)),
    (nn.Sequential(nn.Linear(4, 2), SharedDropout(0.3), SlopedNoise(2)), (4,)),
    (mlp(5, (4,), 3, dropout=0.2), (5,)),
    (mlp(5, (4, 3), 3, dropout=0.2, linear_path=True), (5,)),
    (cnn(nn.Tanh), (1, 28, 28)),
    (nn.Sequential(nn.Conv1d(2, 4, 3, padding="same", groups=2), nn.GroupNorm(2, 4)), (2, 6)),
    (nn.Sequential(nn.Conv3d(1, 2, 2, bias=False), nn.MaxPool3d(2), nn.Flatten()), (1, 5, 5, 5)),
    (nn.Sequential(nn.ConvTranspose2d(2, 3, 2), nn.AdaptiveAvgPool2d((2, None))), (2, 4, 4)),
    (nn.Sequential(nn.LayerNorm(4, bias=False), nn.RMSNorm(4), nn.PReLU(), nn.Hardtanh()), (4,)),
    (nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3)), nn.Identity(), nn.Softmax(-1)), (4,)),
    (nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.GELU("tanh")), nn.LeakyReLU(0.2)), (4,)),
    (nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True), (3, 8)),
]


@pytest.mark.parametrize(("model", "shape"), KNOWN)
def test_standard_networks_are_rebuilt(model, shape, tmp_path):
    x = torch.randn(2, *shape)
    PointPosterior(model, "categorical").save(tmp_path / "saved")
    loaded = load(tmp_path / "saved")
    assert str(loaded.model) == str(model)
    assert torch.allclose(loaded.outputs(x)[0], model.eval()(x), atol=1e-6)


def test_embeddings_and_gaussian_layers_are_rebuilt(tmp_path):
    words = nn.Sequential(nn.Embedding(7, 3, padding_idx=0), nn.Flatten(), nn.Linear(6, 2))
    PointPosterior(words, "categorical").save(tmp_path / "words")
    x = torch.tensor([[1, 6], [0, 3]])
    assert torch.allclose(load(tmp_path / "words").outputs(x)[0], words(x))
    for model in (mlp(4, (3,), 2), mlp(4, (3,), 2, linear_path=True), cnn()):
        model = to_gaussian(model)
        again = build(json.loads(json.dumps(describe(model))))
        assert {n: t.shape for n, t in named_tensors(again).items()} == {
            n: t.shape for n, t in named_tensors(model).items()
        }


def test_building_draws_nothing_and_allocates_nothing():
    state = torch.get_rng_state()
    model = build(describe(KNOWN[0][0]))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.is_meta for p in model.parameters())


def test_what_cannot_be_described_is_not():
    class Mine(nn.Linear):
        pass

    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    twice = nn.Linear(3, 3)
    hooked = nn.Sequential(nn.Linear(3, 3))
    hooked[0].register_forward_hook(lambda m, x, y: 2 * y)
    for model in (
        nn.Sequential(Mine(3, 3)),
        nn.Sequential(nn.BatchNorm1d(3)),
        tied,
        nn.Sequential(twice, nn.Tanh(), twice),
        hooked,
        nn.Sequential(nn.LayerNorm(3), nn.TransformerEncoderLayer(4, 2, activation=torch.tanh)),
    ):
        assert describe(model) is None


def test_tied_networks_load_into_an_instance(tmp_path):
    def make():
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        model[2].weight = model[0].weight
        return model

    model, x = make(), torch.randn(2, 3)
    PointPosterior(model, "categorical").save(tmp_path / "saved")
    loaded = load(tmp_path / "saved", model=make())
    assert loaded.model[2].weight is loaded.model[0].weight
    assert torch.allclose(loaded.outputs(x)[0], model(x))


@pytest.mark.parametrize("name", ["system", "os.system", "Module", "__import__", None])
def test_only_known_classes_are_built(name):
    with pytest.raises(ValueError, match="known classes"):
        build({"class": name, "arguments": {}})


def test_nothing_is_pickled():
    from pathlib import Path

    source = Path(dpbnn.__file__).parent
    files = [*(source / "predictive").glob("*.py"), *(source / "posteriors").glob("**/*.py")]
    assert len(files) > 8
    for path in files:
        text = path.read_text()
        for word in ("pickle", "torch.load(", "torch.save(", "eval(", "exec(", "import_module"):
            assert word not in text.replace(".eval(", ""), (path.name, word)


def test_these_rooms_know_nothing_of_privacy_or_training():
    from pathlib import Path

    source = Path(dpbnn.__file__).parent
    for path in (*(source / "predictive").glob("*.py"), *(source / "posteriors").glob("**/*.py")):
        for room in ("privacy", "contributions", "training", "methods"):
            assert f"dpbnn.{room}" not in path.read_text(), (path.name, room)
