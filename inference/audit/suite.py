"""The audit: tests whether any drafter, shape, batch, number format or processor changes the text.

Three checks, each on prompts of the user's own target:

- invariance: at temperature 0 and above, chain and tree, one row and a ragged batch, real drafters,
  scripted ones (`inference.audit.drafters`) and no drafter must give the tokens of plain decoding
  with the same seed. In float64 every token must be equal. In other formats near ties are allowed;
  `inference.audit.comparison` distinguishes them from mismatches and counts them. Plain decoding
  launches every step. If steps were captured and replayed, the answers are decoded again with
  launched steps, which must give every token again, in every format, as the passes are the same.
- processors: the same for repetition penalty, bias, bad words, filters and temperature, separately
  and together.
- distribution: many seeds of one prompt against the exact probabilities of all its short answers
  (chi-square), for every lossless rule.

`inference.audit.findings` writes the results, and `inference.audit.report` shows them.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch

from heads.api.drafter import forget
from heads.api.errors import UserError
from heads.api.tree import DartreeShape
from inference.audit.comparison import Divergence, Known, audit, flips_alone
from inference.audit.config import AuditConfig
from inference.audit.drafters import KNOWS, ScriptedDrafter, scripted_drafters
from inference.audit.findings import AuditedTarget, AuditRow, DistributionRow, Findings, FlipRow
from inference.audit.statistics import Text, chi_square, entropy, exact_distribution
from inference.decoding.arm import Arm
from inference.decoding.config import DecodeConfig, Shape
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.decoding.rules.names import CHAINS_ONLY
from inference.decoding.structured.constraint import Constraint
from inference.measure.prompts import Prompt, select_prompts, to_requests
from inference.report.model import DeviceFacts
from inference.target.hardware import device_facts, release_unused
from inference.target.model import TargetModel

NO_DRAFTER = "none"
PROMPT_TAIL = 8
"""Tokens of a prompt that the distribution check keeps, as it decodes thousands of answers."""
DISTRIBUTION_LENGTH = 3
DISTRIBUTION_ROWS = 64
Changes = dict[str, Any]
"""Settings of `DecodeConfig` that differ from the user's."""
UNPROCESSED: Changes = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": (),
    "bad_words": (),
    "structure": "",
}
"""The settings that cases of the processors check and the distribution check start from."""
MOST_DIVERGENCES = 3
"""Divergences kept per case; all are counted."""
Answers = list[list[int]]


@dataclass(frozen=True)
class Contestant:
    """A real drafter: how to load it for a target, and the draft that it was made for."""

    name: str
    load: Callable[[TargetModel], Any]
    decode: DecodeConfig


def run_audit(
    config: AuditConfig,
    decode: DecodeConfig,
    load_target: Callable[[str], TargetModel],
    contestants: Sequence[Contestant],
    prompts: Sequence[Prompt],
    say: Callable[[str], None] = lambda text: None,
) -> Findings:
    """Run the checks of `config`.

    decode: the user's sampling settings, depth and seed. load_target: loads the target in a
    precision, given its name; one target is in memory at a time. say: receives progress messages.
    Raises `UserError` if no prompt fits, or if nothing could be compared.
    """
    findings = Findings()
    sampled_in = "float32" if "float32" in config.precisions else config.precisions[0]
    for precision in config.precisions:
        say(f"loading the target in {precision}")
        target = load_target(precision)
        if not findings.target:
            info = target.info
            findings.target = AuditedTarget(
                id=info.id, revision=info.revision, parameters=info.parameters
            )
            findings.device = DeviceFacts(**device_facts(target.device))
        part = _Precision(config, decode, target, precision, contestants, prompts, findings, say)
        if "invariance" in config.checks:
            part.invariance()
        if "processors" in config.checks and precision == config.precisions[0]:
            part.processors()
        if "distribution" in config.checks and precision == sampled_in:
            part.distribution()
        findings.flips.append(FlipRow.of(precision, part.tokens, part.flips, part.alone))
        del part, target
        gc.collect()  # hooks create reference cycles; the next precision needs the memory
        release_unused()
    if not findings.rows and not findings.distributions:
        skipped = [f"{item.drafter}, {item.shape}: {item.reason}" for item in findings.skipped]
        raise UserError(f"nothing could be audited. {'; '.join(skipped)}")
    return findings


@dataclass
class _Precision:
    """The checks on the target in one number format."""

    config: AuditConfig
    decode: DecodeConfig
    target: TargetModel
    precision: str
    contestants: Sequence[Contestant]
    prompts: Sequence[Prompt]
    findings: Findings
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        follows = Constraint.read(self.decode.structure)
        self.requests = [
            replace(request, constraint=request.constraint or follows)
            for request in choose_requests(self.config, self.decode, self.target, self.prompts)
        ]
        self.real = [
            Arm(item.name, item.load(self.target), item.decode) for item in self.contestants
        ]
        self.tokens, self.flips, self.alone = 0, list[Divergence](), (0, 0)

    # The three checks

    def invariance(self) -> None:
        """Drafters, shapes and batches against plain decoding, one row at a time."""
        for temperature in self.config.temperatures:
            decode = self.settings({"temperature": temperature})
            plain = self.plain(decode)
            known: Known = {}
            alone = decode.without_draft()
            batched = replace(alone, batch_size=self.config.batch_size)
            if self.compare(Arm(NO_DRAFTER, None, batched), plain, known):
                self.compare(Arm(NO_DRAFTER, None, alone), plain, known)
            arms = list(self.arms(decode, plain))
            widest = max(arm.decode.tree().num_nodes for arm in arms)
            given = self.target, self.requests, plain, decode.sampling(), widest
            counts = flips_alone(*given, exact=decode.exact, chunk=decode.prefill_chunk)
            self.alone = (self.alone[0] + counts[0], self.alone[1] + counts[1])
            for arm in arms:
                for rows in (1, self.config.batch_size):
                    one = replace(arm, decode=replace(arm.decode, batch_size=rows))
                    self.compare(one, plain, known)

    def processors(self) -> None:
        """Every processor and filter separately, and all together."""
        # bad words may leave no token that a grammar allows
        self.requests = [replace(request, constraint=None) for request in self.requests]
        unprocessed: dict[float, Answers] = {}  # by temperature
        for temperature in (0.0, 1.0):
            decode = self.settings({**UNPROCESSED, "temperature": temperature})
            unprocessed[temperature] = self.plain(decode)
        for name, changes in processor_cases(unprocessed, self.target.eos_token_ids).items():
            decode = self.settings({**UNPROCESSED, **changes})
            plain = self.plain(decode)
            before = unprocessed[1.0 if decode.temperature else 0.0]
            changed = sum(one != other for one, other in zip(plain, before, strict=True))
            known: Known = {}
            for arm in self.arms(decode, plain):
                if isinstance(arm.drafter, ScriptedDrafter) and arm.name != KNOWS:
                    continue  # drafts that are never accepted test little here
                batched = replace(arm.decode, batch_size=self.config.batch_size)
                arm = replace(arm, decode=batched)
                self.compare(arm, plain, known, name, changed)

    def distribution(self) -> None:
        """Sampled answers of one prompt, by rule, drafter and shape."""
        sampling: Changes = {**UNPROCESSED, "temperature": 1.0, "top_k": self.config.support}
        sampling |= {"max_new_tokens": DISTRIBUTION_LENGTH, "batch_size": DISTRIBUTION_ROWS}
        decode = self.settings(sampling)
        tails = sorted({request.tokens[-PROMPT_TAIL:] for request in self.requests})
        exact = {
            tail: exact_distribution(self.target, tail, decode.sampling(), DISTRIBUTION_LENGTH)
            for tail in tails
        }
        prompt = max(tails, key=lambda tail: entropy(exact[tail]))
        generator = torch.Generator().manual_seed(self.decode.seed)
        seeds = torch.randint(0, 1 << 62, (self.config.seeds,), generator=generator).tolist()
        requests = [
            Request(number, prompt, seed, DISTRIBUTION_LENGTH) for number, seed in enumerate(seeds)
        ]
        likely = likeliest(prompt, exact[prompt])
        guesses = ScriptedDrafter(likely, self.target.info.vocab_size, 0.7)
        arms = [*self.real, Arm("guesses", guesses, self.decode)]
        for arm, rule, shape in product(arms, self.config.rules, self.config.shapes):
            if rule not in CHAINS_ONLY or shape == "chain":
                shaped = replace(self.with_shape(decode, shape, arm.decode), rule=rule)
                self.sample(replace(arm, decode=shaped), requests, exact[prompt])

    def settings(self, changes: Changes) -> DecodeConfig:
        """The user's settings for plain decoding under rule match, with `changes`."""
        limit = self.config.max_new_tokens
        plain = replace(
            self.decode.without_draft(), rule="match", batch_size=1, max_new_tokens=limit
        )
        return replace(plain, **changes)

    def with_shape(self, decode: DecodeConfig, shape: Shape, own: DecodeConfig) -> DecodeConfig:
        """`decode` with a draft of this shape, with the depth or the tree of the drafter's `own`
        settings."""
        choices = (own.choices or self.config.choices) if shape == "tree" else ()
        # most nodes of a dynamic tree of this depth
        most = 1 + own.width + (own.depth - 1) * own.width**2
        if shape == "dartree":
            room = DartreeShape(2, own.depth, own.width, own.candidates)
            most = 1 + sum(room.level_sizes())
        return replace(
            decode, shape=shape, depth=own.depth, choices=choices, nodes=min(own.nodes, most)
        )

    def arms(self, decode: DecodeConfig, plain: Answers) -> Iterator[Arm]:
        """Every drafter in every shape that it can fill."""
        known = {
            request.tokens: [*request.tokens, *answer]
            for request, answer in zip(self.requests, plain, strict=True)
        }
        scripted = scripted_drafters(known, self.target.info.vocab_size).items()
        everyone = [*self.real, *(Arm(name, drafter, self.decode) for name, drafter in scripted)]
        for arm, shape in product(everyone, self.config.shapes):
            yield replace(arm, decode=self.with_shape(decode, shape, arm.decode))

    def plain(self, decode: DecodeConfig) -> Answers:
        """The baseline of all comparisons: plain decoding with launched steps."""
        return decode_all(self.target, None, launched(decode), self.requests).answers

    def compare(
        self, arm: Arm, plain: Answers, known: Known, setting: str = "", changed: int = 0
    ) -> bool:
        """Decode, compare with the plain answers, and add the result to the findings. Returns
        whether steps were captured. setting: of the processors check; changed: answers that the
        setting changes."""
        check = "processors" if setting else "invariance"
        decode = arm.decode
        self.say(
            f"{self.precision}: {check} {setting} temperature {decode.temperature:g}, "
            f"{arm.name}, {decode.shape}, {decode.batch_size} rows"
        )
        try:
            found, again = self.decode_twice(arm)
        except UserError as error:
            if arm.drafter is None or isinstance(arm.drafter, ScriptedDrafter):
                raise
            self.findings.skip(arm.name, decode.shape, error)
            return False
        width = max(2, decode.tree().num_nodes)
        given = self.target, self.requests, plain, found.answers, decode.sampling(), width, known
        report = audit(*given, exact=decode.exact, chunk=decode.prefill_chunk)
        self.tokens += report.tokens
        self.flips += report.found
        differ = sum(one != other for one, other in zip(found.answers, again, strict=True))
        strict = self.precision == "float64"
        same = report.identical == report.sequences if strict else report.mismatches == 0
        decisive = sorted(report.divergences, key=lambda item: item.near_tie)
        self.findings.rows.append(
            AuditRow(
                check=check,
                case=setting,
                precision=self.precision,
                drafter=arm.name,
                kind=NO_DRAFTER if arm.drafter is None else arm.drafter.kind,
                rule=decode.acceptance,
                shape=decode.shape,
                batch_size=decode.batch_size,
                temperature=decode.temperature,
                **report.counts(),
                tokens=report.tokens,
                flips=report.flips,
                tokens_per_pass=found.per_pass,
                changed=changed,
                captured=found.captured,
                changed_by_capture=differ,
                passed=same and not differ,
                divergences=decisive[:MOST_DIVERGENCES],
            )
        )
        return found.captured

    def decode_twice(self, arm: Arm) -> tuple[Decoded, Answers]:
        """What an arm decodes, and its answers with launched steps only; if no step was captured,
        these are the same answers. The drafter forgets earlier answers before each."""
        forget(arm.drafter)
        found = decode_all(self.target, arm.drafter, arm.decode, self.requests)
        if not found.captured:
            return found, found.answers
        forget(arm.drafter)
        again = decode_all(self.target, arm.drafter, launched(arm.decode), self.requests)
        return found, again.answers

    def sample(self, arm: Arm, requests: Sequence[Request], exact: dict[Text, float]) -> None:
        """Decode the requests, and test the answers against the exact distribution."""
        rule, shape = arm.decode.acceptance, arm.decode.shape
        self.say(
            f"{self.precision}: distribution, rule {rule}, {arm.name}, {shape}, "
            f"{len(requests)} seeds"
        )
        try:
            found = decode_all(self.target, arm.drafter, arm.decode, requests)
        except UserError as error:
            self.findings.skip(arm.name, f"{shape}, rule {rule}", error)
            return
        test = chi_square(map(tuple, found.answers), exact)
        self.findings.distributions.append(
            DistributionRow(
                rule=rule,
                precision=self.precision,
                drafter=arm.name,
                shape=shape,
                seeds=len(found.answers),
                texts=len(exact),
                entropy=entropy(exact),
                **vars(test),
                tokens_per_pass=found.per_pass,
                passed=test.p_value >= self.config.significance,
            )
        )


def choose_requests(
    config: AuditConfig, decode: DecodeConfig, target: TargetModel, prompts: Sequence[Prompt]
) -> list[Request]:
    """Requests for prompts of all domains; raises `UserError` if none fits."""
    domains = len({prompt.domain for prompt in prompts})
    chosen = select_prompts(prompts, -(-config.prompts // domains), decode.seed)[: config.prompts]
    limit = target.info.max_position_embeddings
    longest = replace(decode, max_new_tokens=config.max_new_tokens)
    requests = to_requests(chosen, target.tokenizer, longest, capacity=limit, overlong="skip")
    # scripted drafters identify a row by its prompt
    distinct = {request.tokens: request for request in requests}
    if not distinct:
        raise UserError(
            f"no prompt fits: with audit.max_new_tokens={config.max_new_tokens} all are longer "
            f"than the target's {limit} positions. Shorten the prompts or the answers."
        )
    return list(distinct.values())


class Decoded(NamedTuple):
    """Decoded answers in the order of the requests, the tokens committed per verification, and
    whether steps were captured."""

    answers: Answers
    per_pass: float
    captured: bool


def launched(decode: DecodeConfig) -> DecodeConfig:
    """The same settings, with every step launched operation by operation."""
    return replace(decode, graph="off")


def decode_all(
    target: TargetModel, drafter: Any, decode: DecodeConfig, requests: Sequence[Request]
) -> Decoded:
    """Decode all requests."""
    engine = Engine(target, drafter, decode)
    done = engine.completions(requests)
    committed = [record.committed for found in done for record in found.passes]
    per_pass = sum(committed) / len(committed) if committed else 0.0
    return Decoded([found.tokens for found in done], per_pass, engine.captured)


def likeliest(prompt: Text, exact: Mapping[Text, float]) -> dict[Text, list[int]]:
    """The likeliest text for every first token, by prompt and first token."""
    rising = sorted(exact, key=lambda answer: exact[answer])
    return {(*prompt, answer[0]): [*prompt, *answer] for answer in rising}


def processor_cases(
    unprocessed: Mapping[float, Answers], ends: Sequence[int]
) -> dict[str, Changes]:
    """Settings by name. Biases and bad words are taken from the answers that they must change.

    unprocessed: answers at temperatures 0 and 1. ends: end-of-text tokens, which are not used.
    """
    greedy, sampled = (_text_cases(unprocessed[temperature], ends) for temperature in (0.0, 1.0))
    filters: dict[str, Changes] = {
        "temperature": {"temperature": 0.7},
        "top_k": {"top_k": 8},
        "top_p": {"top_p": 0.8},
        "min_p": {"min_p": 0.1},
    }
    cases = {f"{name}, greedy": {"temperature": 0.0, **part} for name, part in greedy.items()}
    cases["all, greedy"] = {"temperature": 0.0, **_merge(greedy)}
    cases |= {name: {"temperature": 1.0, **part} for name, part in (sampled | filters).items()}
    return cases | {"all": _merge(sampled | filters)}


def _text_cases(answers: Answers, ends: Sequence[int]) -> dict[str, Changes]:
    """Settings of the processors that act on tokens, for the most common tokens and pairs of the
    answers."""
    tokens = Counter(token for answer in answers for token in answer if token not in ends)
    pairs = Counter(pair for answer in answers for pair in pairwise(answer) if pair[1] not in ends)
    common = [token for token, _ in tokens.most_common(3)] or [0]
    words = tuple(pair for pair, _ in pairs.most_common(2))
    more = ((common[-1], 1.5),) if len(common) > 1 else ()
    return {
        "repetition_penalty": {"repetition_penalty": 1.3},
        "logit_bias": {"logit_bias": ((common[0], -3.0), *more)},
        "bad_words": {"bad_words": ((common[0],), *words)},
    }


def _merge(cases: Mapping[str, Changes]) -> Changes:
    return {key: value for changes in cases.values() for key, value in changes.items()}
