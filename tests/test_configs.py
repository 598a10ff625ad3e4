"""Every file in conf/ is composed and built, alone and in recipes; what it refers to exists."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import yaml

from heads.api.errors import UserError
from heads.api.kinds import kind_names
from heads.api.registry import get_kind
from heads.api.target_info import TargetInfo
from scripts.config import compose
from scripts.config.compose import options
from scripts.config.fields import REPOSITORY
from scripts.config.schema import attribute, load_settings
from scripts.config.stages import OPTION_GROUPS, RECIPE_GROUPS, STAGES, Stage
from train.engines.deepspeed import import_deepspeed

CONF = REPOSITORY / "conf"
OWN = "data.path=prompts.jsonl"
NEEDED = {
    ("target", "local"): ["target.path=some/model", OWN],
    ("experiment", "own_model"): ["target.path=some/model", OWN],
    ("target", "llama31_8b"): [OWN],
    ("target", "qwen3_8b"): [OWN],
    ("target", "qwen3_next_80b"): [OWN],
    ("target", "glm45_air"): [OWN],
    ("target", "deepseek_v32"): [OWN],
    ("data", "jsonl"): ["data.path=prompts.jsonl"],
    ("bench", "jsonl"): ["bench.prompts=prompts.jsonl"],
    ("bench", "spec_bench"): ["bench.prompts=question.jsonl"],
    ("bench", "arena_hard"): ["bench.prompts=question.jsonl"],
    ("bench", "table"): ["bench.prompts=questions.csv", "bench.dataset.template='{question}'"],
}
"""Values that an option leaves to the user."""
RECIPES = options("experiment")
REAL_TARGETS = {
    "llama31_8b": TargetInfo(
        "meta-llama/Llama-3.1-8B-Instruct",
        "r",
        "llama",
        "t",
        128_256,
        4096,
        32,
        32,
        8,
        128,
        14_336,
        1e-5,
        5e5,
        131_072,
        8_030_261_248,
    ),
    "qwen3_8b": TargetInfo(
        "Qwen/Qwen3-8B",
        "r",
        "qwen3",
        "t",
        151_936,
        4096,
        36,
        32,
        8,
        128,
        12_288,
        1e-6,
        1e6,
        40_960,
        8_190_735_360,
    ),
}


def group_options() -> list[tuple[str, str]]:
    return [
        (group, name)
        for group in OPTION_GROUPS
        if group not in RECIPE_GROUPS
        for name in options(group)
    ]


STAGE = [
    pytest.param(stage, id=name, marks=[] if name == "loop" else pytest.mark.slow)
    for name, stage in STAGES.items()
]
"""Every stage; those that do not read all that recipes set in `make test-all` only."""


def test_a_loop_reads_every_group_that_recipes_set() -> None:
    for folder in RECIPE_GROUPS:
        for path in (CONF / folder).rglob("*.yaml"):
            named = set(yaml.safe_load(path.read_text(encoding="utf-8")) or {}) - {"defaults"}
            assert named <= set(STAGES["loop"].groups), path


@pytest.mark.parametrize(("group", "name"), group_options(), ids="/".join)
def test_every_option_composes(group: str, name: str) -> None:
    """In one of the stages that read its group."""
    stages = [stage for stage in STAGES.values() if group in stage.groups]
    assert stages, f"no stage reads '{group}'"
    require_option(stages[0], group, name)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "name"), group_options(), ids="/".join)
def test_every_option_composes_in_every_stage_that_reads_its_group(group: str, name: str) -> None:
    for stage in STAGES.values():
        if group in stage.groups:
            require_option(stage, group, name)


def require_option(stage: Stage, group: str, name: str) -> None:
    needed = NEEDED.get((group, name), [])
    read = [item for item in needed if item.split(".")[0] in stage.groups]
    settings = load_settings(stage, [f"{group}={name}", *read])
    assert hasattr(settings, attribute(group))
    assert settings.choices[group] == name


@pytest.mark.parametrize("stage", STAGES.values(), ids=lambda stage: stage.name)
def test_every_stage_composes(stage: Stage) -> None:
    settings = load_settings(stage, ["experiment=demo"])
    for group in stage.groups:
        assert hasattr(settings, attribute(group))


@pytest.mark.rotated
@pytest.mark.parametrize("stage", STAGE)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_builds_in_every_stage(recipe: str, stage: Stage) -> None:
    needed = NEEDED.get(("experiment", recipe), [])
    read = [item for item in needed if item.split(".")[0] in stage.groups]
    settings = load_settings(stage, [f"experiment={recipe}", *read])
    for group in stage.groups:
        assert hasattr(settings, attribute(group))


@pytest.mark.rotated
@pytest.mark.parametrize("stage", STAGE)
@pytest.mark.parametrize("name", options("debug"))
def test_every_debug_setting_builds_with_the_demo(name: str, stage: Stage) -> None:
    load_settings(stage, ["experiment=demo", f"debug={name}"])


@pytest.mark.parametrize(
    "recipe", [name for name in RECIPES if "8b_" in name and not name.endswith("_loop")]
)
def test_a_real_recipe_builds_its_drafter(recipe: str) -> None:
    settings = load_settings(STAGES["train"], [f"experiment={recipe}"])
    info = REAL_TARGETS[str(settings.choices["target"])]
    assert settings.target.path == info.id
    kind = get_kind(settings.head.kind)
    with torch.device("meta"):
        drafter = kind.drafter_class(settings.head.config, info)
    parameters = sum(p.numel() for p in drafter.parameters())
    assert 10**7 < parameters < 3 * 10**9
    drafter.needs.check(info.num_layers)
    assert settings.engine.name == "deepspeed"
    assert settings.engine.precision == "bfloat16"
    assert settings.train.global_batch % (settings.train.micro_batch * 8) == 0  # eight GPUs
    if settings.head.kind == "eagle3":  # as EAGLE-3 was published, whatever the defaults are
        assert (settings.head.config.ttt_steps, settings.head.config.decay) == (7, 0.8)
    tree = settings.decode.tree()
    assert tree.max_depth <= getattr(settings.head.config, "num_heads", tree.max_depth)
    assert tree.max_depth <= getattr(settings.head.config, "ttt_steps", tree.max_depth)
    answers = load_settings(STAGES["generate"], [f"experiment={recipe}"])
    assert answers.data.path.count("/") == 1  # a Hub dataset
    assert answers.sampling.shape == "none"


def test_every_file_is_a_root_or_an_option() -> None:
    possible = {f"{name}.yaml" for name in (*(stage.root for stage in STAGES.values()), "base")}
    roots = {path.name for path in CONF.glob("*.yaml")}
    assert "base.yaml" in roots <= possible
    for path in CONF.rglob("*.yaml"):
        relative = path.relative_to(CONF)
        assert (
            relative.name in roots
            if len(relative.parts) == 1
            else relative.parts[0] in OPTION_GROUPS
        ), relative


def test_every_kind_has_a_yaml_of_its_name_and_every_head_a_kind() -> None:
    for name in kind_names():
        content = yaml.safe_load((CONF / "head" / f"{name}.yaml").read_text())
        assert content["kind"] == name
    for name in options("head"):
        assert load_settings(STAGES["train"], [f"head={name}"]).head.kind in kind_names()


def test_the_demo_trains_the_three_kinds_and_finds_its_files() -> None:
    settings = load_settings(STAGES["loop"], ["experiment=demo"])
    recipes = settings.loop.recipes
    heads = [
        load_settings(STAGES["train"], [f"experiment=[{recipe},demo]"]).head.kind
        for recipe in recipes
    ]
    assert heads == ["eagle3", "distilled", "medusa"]
    assert (REPOSITORY / "assets" / "tiny-target" / "config.json").is_file()
    assert settings.run.name == "demo"


@pytest.mark.parametrize("place", [[], ["run.root=/x", "run.name=y"]])
def test_recipes_start_from_drafters_of_their_own_run(place: list[str]) -> None:
    loop = load_settings(STAGES["loop"], ["experiment=families", *place])
    train = loop.run.directory / "train"
    start = f"train.refresh.init_from={train}/eagle3@0.01/best"
    assert start in loop.loop.sweep["eagle3_code"].overrides
    named = {"checkpoint": f"{train}/distilled@0.0004/best"}
    assert named in loop.measure.heads["cascade"]["parts"]
    for recipe in ("glm45_air_native_mtp", "qwen3_next_80b_native_mtp"):
        found = load_settings(STAGES["train"], [f"experiment={recipe}", *place])
        expected = found.run.directory / "train" / "shipped" / "best"
        assert found.train.refresh.init_from == str(expected)


def test_training_never_reads_the_prompts_of_the_measurement() -> None:
    settings = load_settings(STAGES["loop"], ["experiment=demo"])
    read = [settings.data.path, *settings.train.prompts]
    assert len(read) == 2  # the training prompts, and others that choose the checkpoint
    files = [Path(path).read_text().splitlines() for path in read]
    assert not set(files[0]) & set(files[1])
    training = {line for lines in files for line in lines if line}
    for domain in settings.bench.domains:
        measured = (Path(settings.bench.prompts) / f"{domain}.jsonl").read_text().splitlines()
        assert len(measured) >= 64
        assert not training & set(measured)


def test_a_recipe_from_elsewhere_is_found_and_held_to_the_same_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\noptim: {lr: 0.125}\n")
    (tmp_path / "experiment" / "wrong.yaml").write_text(
        "# @package _global_\noptim: {lrr: 0.125}\n"
    )
    (tmp_path / "experiment" / "stray.yaml").write_text("# @package _global_\noptm: {lr: 0.125}\n")
    monkeypatch.setenv("HEADSTART_CONF", str(tmp_path))
    assert load_settings(STAGES["train"], ["experiment=mine"]).optim.lr == 0.125
    assert load_settings(STAGES["train"], ["experiment=mine", "optim.lr=0.5"]).optim.lr == 0.5
    with pytest.raises(UserError, match=r"optim\.lrr: there is no such key\. Did you mean 'lr'"):
        load_settings(STAGES["train"], ["experiment=wrong"])
    with pytest.raises(UserError, match=r"optm: there is no such group\. Did you mean 'optim'"):
        load_settings(STAGES["train"], ["experiment=stray"])
    monkeypatch.setenv("HEADSTART_CONF", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"HEADSTART_CONF names .*nowhere', which is not a folder"):
        load_settings(STAGES["train"], [])


def test_lists_and_nested_lists_become_tuples() -> None:
    decode = load_settings(STAGES["train"], ["decode=tree", "decode.choices=[[0],[0,0]]"]).decode
    assert decode.choices == ((0,), (0, 0))
    hash(decode)


def test_seeds_follow_the_run() -> None:
    settings = load_settings(STAGES["loop"], ["run.seed=7"])
    assert settings.decode.seed == 7
    assert settings.sampling.seed == 7
    assert load_settings(STAGES["loop"], ["run.seed=7", "decode.seed=3"]).decode.seed == 3


def test_the_engine_is_torch_where_deepspeed_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless another one is asked for, by name or by a recipe."""
    asked = ["engine=zero2"], ["experiment=qwen3_8b_distilled"]
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    settings = load_settings(STAGES["train"], [])
    assert (settings.engine.name, settings.choices["engine"]) == ("torch", "torch")
    for overrides in asked:
        assert load_settings(STAGES["train"], overrides).engine.name == "deepspeed"
    with pytest.raises(UserError, match="Use engine=torch, or install deepspeed"):
        import_deepspeed("cpu")


@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_trainings_are_in_bfloat16_on_gpus_and_in_float32_on_cpus(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, chosen = STAGES["train"], f"engine={engine}"
    for there, expected in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert load_settings(stage, [chosen]).engine.precision == expected
    # a plan is of the machine that it names
    planned = load_settings(STAGES["plan"], [chosen, "plan.gpu=h100"])
    assert planned.engine.precision == "bfloat16"
    given = load_settings(stage, [chosen, "engine.precision=bfloat16"])
    assert given.engine.precision == "bfloat16"


def test_recipes_for_cpus_train_in_bfloat16_where_the_cpu_multiplies_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it is emulated, experiment=demo would take hours."""
    recipes = [file.stem for file in (CONF / "experiment").glob("embedded_*.yaml")]
    recipes = [name for name in recipes if name != "embedded_few_prompts"] + ["families"]
    assert len(recipes) >= 5
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for fast, expected in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(compose, "multiplies_bfloat16", lambda fast=fast: fast)
        for name in recipes:
            settings = load_settings(STAGES["train"], [f"experiment={name}"])
            assert settings.engine.precision == expected, name
