"""Makes the small targets: the embedded one, a second one kept for checks, and changed ones.

`tiny_target` makes assets/tiny-target and assets/prompts from Python sources, step by step;
`held_out_target` a Qwen3 from C++ headers; `changed_targets` fine-tuned and LoRA-merged versions of
the embedded target; `drifting` the prompts of traffic that drifts. They share the reading of
sources (`python_sources`, `cpp_headers`), the questions asked about them (`conversations`), the
prepared folder of tokens (`prepared`), the training (`training`) and the target's folder
(`export`).
"""
