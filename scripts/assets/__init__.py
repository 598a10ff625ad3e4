"""Makes the small targets: the embedded one, a second one for checks, and changed versions.

`tiny_target` makes assets/tiny-target and assets/prompts from Python sources, step by step.
`held_out_target` makes a Qwen3 from C++ headers. `changed_targets` makes fine-tuned and LoRA-merged
versions of the embedded target, and `drifting` makes the prompts of drifting traffic. They share
the reading of sources (`python_sources`, `cpp_headers`), the questions about them
(`conversations`), the prepared folder of tokens (`prepared`), the training (`training`) and the
target's folder (`export`).
"""
