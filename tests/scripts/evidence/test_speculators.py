"""The comparison with speculators: both sides read the same, our side trains as `headstart train`
does, what is converted is the same drafter. The library itself is not needed here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from inference.cpu import multiplies_bfloat16
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.evidence import sides, speculators
from scripts.evidence.common import settings_of
from scripts.evidence.foreign import speculators_worker
from scripts.evidence.sides import Setting, Side
from scripts.evidence.speculators import timing
from tests.train.micro_run import prepare
from train.data.loader import require_dealt
from train.data.pack import PackedData
from train.muon import COEFFICIENTS, ITERATIONS, orthogonalise


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("micro"))


@pytest.fixture(scope="module")
def target(micro: Path) -> TargetModel:
    return TargetModel.load(TargetConfig(str(micro / "target"), dtype="float32", device="cpu"))


def test_rows_are_the_documents_of_our_training(
    micro: Path, tmp_path: Path, target: TargetModel
) -> None:
    setting = Setting("python", micro / "answers", micro / "target", tmp_path, 1)
    held_out = ([5, 6, 7], [0, 1, 1])
    tokens = setting.write_rows([held_out])
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    *rows, last = [json.loads(line) for line in lines]
    assert (last["tokens"], last["mask"]) == held_out
    assert json.loads((tmp_path / "rows.json").read_text()) == {"trained": len(rows)}
    data = PackedData.from_manifest(micro / "answers", target.info, sides.LENGTH)
    assert tokens == data.report.tokens == sum(len(row["tokens"]) for row in rows)
    assert sum(sum(row["mask"]) for row in rows) == int(data.supervised.sum())
    assert all(len(row["mask"]) == len(row["tokens"]) for row in rows)


def test_their_data_depend_on_dtype_documents_and_target(micro: Path, tmp_path: Path) -> None:
    given = ("python", micro / "answers", micro / "target", tmp_path, 1)
    settings = [Setting(*given, dtype=dtype) for dtype in ("float32", "bfloat16")]
    settings[0].write_rows()
    names = [setting.data("eagle3") for setting in settings]
    settings[0].write_rows([([5], [1])])
    assert len({*names, settings[0].data("eagle3")}) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_their_features_are_our_taps(micro: Path, target: TargetModel, dtype: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(micro / "target", dtype=torch.float32).eval()
    batch = [[11, 12, 13, 14, 15, 16], [20, 21, 22]]
    layers = list(range(1, target.info.num_layers))[:3]
    found = speculators_worker.hidden_states(model, batch, layers, dtype)
    close = 0.05 if dtype == "bfloat16" else 1e-5
    for row, states in zip(batch, found, strict=True):
        tokens = torch.tensor([row])
        needs = FeatureSpec(tuple(layers), last_hidden=True)
        assert states.dtype == getattr(torch, dtype)
        with torch.autocast("cpu", torch.bfloat16, dtype == "bfloat16"):
            taps, last = target.features(
                tokens,
                torch.arange(len(row))[None],
                torch.ones_like(tokens, dtype=torch.int32),
                needs,
            )
        assert taps is not None
        assert last is not None
        torch.testing.assert_close(states[:, :-1].float(), taps[0].float(), atol=close, rtol=close)
        with torch.no_grad():
            torch.testing.assert_close(
                model.model.norm(states[:, -1].float()), last[0].float(), atol=close, rtol=close
            )


def test_their_muon_iterates_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patched optimiser makes the library's update, to bfloat16's precision."""
    from torch.optim import _muon

    original = _muon._zeropower_via_newtonschulz
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", original)
    generator = torch.Generator().manual_seed(0)
    for shape in ((24, 8), (8, 24)):
        grad = torch.randn(shape, generator=generator)
        updates = []
        for patched in (False, True):
            if patched:
                speculators_worker.muon_in_float32()
            weight = torch.nn.Parameter(torch.zeros(shape))
            weight.grad = grad.clone()
            torch.optim.Muon([weight], lr=1.0, weight_decay=0.0).step()
            updates.append(weight.detach())
            assert torch.equal(weight.grad, grad)
        torch.testing.assert_close(updates[1], updates[0], atol=0.02, rtol=0.05)
        assert not torch.equal(updates[0], updates[1])
        monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", original)
    own = speculators_worker.orthogonalise(grad, COEFFICIENTS, ITERATIONS, 1e-7)
    if not multiplies_bfloat16():
        torch.testing.assert_close(own, orthogonalise(grad))


def test_their_sizes_are_ours(target: TargetModel) -> None:
    def flags(*words: str) -> str:
        head = settings_of("train", "experiment=[families]", *words).head
        return " ".join(sides.their_sizes(head, target.info, 128))

    assert flags("head=eagle3") == "--num-layers 1 --full-attention-indices 0"
    blocks = flags("head=dspark", "head.block_size=7")
    assert blocks.endswith("--block-size 7 --max-anchors 128")
    assert flags("head=peagle", "head.num_layers=2", "head.depths=6") == (
        "--num-layers 2 --full-attention-indices 0 1 --num-depths 6 --max-anchors 128"
    )


class Commands:
    """A channel that gives commands from a list and keeps the answers."""

    def __init__(self, *commands: dict[str, Any]) -> None:
        self.given, self.answers = commands, []

    def commands(self):
        return iter(self.given)

    def say(self, **answer: Any) -> None:
        self.answers.append(answer)


def test_our_side_takes_the_steps_of_headstart_train(
    micro: Path, tmp_path: Path, target: TargetModel
) -> None:
    from scripts.config.schema import load_settings
    from scripts.config.stages import STAGES
    from train.run import train

    overrides = [
        "head=medusa",
        "head.num_heads=2",
        "engine=torch",
        "target=local",
        f"target.path={micro / 'target'}",
        "target.dtype=float32",
        "target.device=cpu",
        "train.max_steps=3",
        "train.global_batch=2",
        "train.micro_batch=2",
        "train.sequence_length=64",
        "train.eval_every=0",
        "train.parity=false",
        "train.save_every=0",
        "train.tracker.wandb=disabled",
    ]
    job = {"overrides": overrides, "answers": str(micro / "answers"), "out": str(tmp_path / "a")}
    channel = Commands(
        {"do": "steps", "count": 1},
        {"do": "steps", "count": 2},
        {"do": "save", "to": str(tmp_path / "saved")},
    )
    speculators.follow_commands(job, channel)
    assert channel.answers[0]["ready"]
    assert [sorted(answer) for answer in channel.answers[1:]] == [
        ["peak_bytes", "seconds", "tokens"]
    ] * 2 + [["saved"]]
    s = load_settings(STAGES["train"], overrides)
    train(
        s.head.kind,
        s.head.config,
        target=s.target,
        data=micro / "answers",
        out=tmp_path / "b",
        config=s.train,
        features=s.features,
        engine=s.engine,
        optim=s.optim,
        schedule=s.schedule,
        decode=s.decode,
        joint=s.joint,
    )
    mine, theirs = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "saved", tmp_path / "b" / "best")
    )
    assert set(mine) == set(theirs)
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name


def test_a_side_that_dies_is_named_with_its_log(tmp_path: Path) -> None:
    side = Side(
        [sys.executable, "-c", "import sys; sys.exit('no such thing')"], tmp_path / "log.txt"
    )
    with pytest.raises(UserError, match="no such thing"):
        side.answer()


def test_another_version_of_the_library_is_refused(tmp_path: Path) -> None:
    tell = 'import sys; print(\'{"version": "0.1"}\', flush=True); sys.stdin.read()'
    side = Side([sys.executable, "-c", tell], tmp_path / "log.txt")
    with pytest.raises(UserError, match=r"speculators 0\.1, and .* Install speculators==0\.9\.0"):
        side.require_version()


def test_our_side_takes_steps_of_one_row(micro: Path, tmp_path: Path) -> None:
    """What `timing` starts composes, and has the rows, anchors and optimiser of the library's."""
    setting = Setting("python", micro / "answers", micro / "target", tmp_path, 1)
    for kind in speculators.OURS:
        found = settings_of("train", "experiment=[families]", *speculators.recipe(kind))
        train = found.train
        assert (train.global_batch, train.micro_batch, train.sequence_length) == (1, 1, 1024)
        require_dealt(train.global_batch, train.micro_batch, 1)
        flags = speculators.their_flags(setting, kind)
        if kind != "eagle3":
            anchors = flags[flags.index("--max-anchors") + 1]
            assert int(anchors) == getattr(found.head.config, "num_anchors", 1024)
        for name in ("--lr", "--muon-lr"):
            assert float(flags[flags.index(name) + 1]) == found.optim.lr
        assert flags[flags.index("--optimizer") + 1] == found.optim.kind == "muon"


@pytest.mark.slow
def test_our_side_reads_a_store_and_runs_online(micro: Path, tmp_path: Path) -> None:
    setting = Setting("python", micro / "answers", micro / "target", tmp_path, 1, 1024)
    seen = []
    for name, store in (("store", speculators.our_store(setting, "eagle3")), ("online", [])):
        side = speculators.our_side(setting, "eagle3", name, 2, store)
        seen.append((side.about["trained_weights"], side.ask(do="steps", count=2)["tokens"]))
        side.end()
        job = json.loads((tmp_path / f"ours-{name}" / "job.json").read_text())
        assert ("features=store" in job["overrides"]) == bool(store)
    assert seen[0] == seen[1]


class Clock:
    """A side that answers as it is told, and notes what it was asked."""

    def __init__(self, seconds: float, tokens: int, peak: int) -> None:
        self.seconds, self.tokens, self.peak, self.counts = seconds, tokens, peak, []
        self.about = {"trained_weights": 5, "settings": {"optimizer": "muon"}}

    def ask(self, **command: Any) -> dict[str, Any]:
        self.counts.append(command["count"])
        return {
            "seconds": self.seconds * len(self.counts),
            "tokens": self.tokens,
            "peak_bytes": self.peak,
        }

    def end(self) -> None:
        self.counts.append(0)


def test_speeds_are_ratios_of_sums_after_the_warm_rounds() -> None:
    clocks = {
        speculators.ONLINE: Clock(2.0, 800, 300),
        speculators.STORED: Clock(1.0, 800, 150),
        speculators.THEIRS: Clock(4.0, 800, 600),
    }
    rows = timing(clocks, warm=1, rounds=2, steps=3)  # type: ignore[arg-type]
    assert all(clock.counts == [3, 3, 3, 0] for clock in clocks.values())
    theirs = rows[speculators.THEIRS]
    assert theirs["tokens_per_cpu_second"] == pytest.approx(1600 / (8 + 12))
    assert (theirs["steps"], theirs["settings"]) == (6, {"optimizer": "muon"})
    found = speculators.summary(rows, {"tokens": 1000, "seconds": 10.0})
    assert found["speed_ratio"][speculators.STORED] == pytest.approx(4.0)
    assert found["speed_ratio"][speculators.ONLINE] == pytest.approx(2.0)
    with_making = found["speed_ratio"][
        f"{speculators.ONLINE}, theirs with the making of its states"
    ]
    assert with_making == pytest.approx((1600 / 10) / (1 / (1 / 80 + 10 / 1000)))
    assert found["memory_ratio"][speculators.STORED] == pytest.approx(0.25)
    settings = {"speculators": "0.9.0", "threads": 1, "dtype": "float32", "tokens_per_step": 1024}
    settings |= {"anchors": 128, "steps": 6}
    row = {"kind": "eagle3", **found}
    content = {"settings": settings, "command": "a command", "rows": [row]}
    page = "\n".join(speculators.markdown(content))
    assert "| eagle3 | speculators, from a store | 0.00 M | 3.33 | 80 | 1 | 0.00 |" in page
    assert "| eagle3 | ours, from a store | 0.00 M | 0.83 | 320 | 4.00 | 0.00 |" in page
