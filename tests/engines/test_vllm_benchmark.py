"""The program of ``python -m benchmarks vllm`` that starts and measures vLLM, on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path

from serving import OURS, save

sys.path.insert(0, str(Path(__file__).parents[2]))  # the installed package does not contain `benchmarks`

from benchmarks.engines import outputs, processes
from benchmarks.engines.engine import Plan


def test_a_process(tmp_path):
    folder = save(tmp_path / "model", "nvfp4", "modelopt")
    options = {
        "quantization": OURS, "dtype": "bfloat16", "max_model_len": 64, "max_num_seqs": 2, "enforce_eager": True,
        "max_num_batched_tokens": 128, "skip_tokenizer_init": True, "enable_prefix_caching": False,
    }  # fmt: skip
    parts = ("answers", "decode", "prefill", "requests")
    plan = Plan(str(folder), options, 512, parts, (2,), 8, 2, (16,), 3, 8, 2, repeat=1)
    outcome = processes.measure(plan, tmp_path, "ours", tmp_path / "caches", 300)
    assert outcome.error == "", outcome.log[-3000:]
    (start,) = outcome.of("start")
    assert start["seconds"] > 0 and start["version"]
    (found,) = outcome.of("kernels")
    assert found["layers"] == {"linear": {"CuteLinearMethod": 8}, "experts": {}}
    groups = outcome.of("answers")
    assert [(each["count"], each["length"]) for each in groups] == [(2, 32), (1, 16)]
    answers = [answer for group in groups for answer in group["answers"]]
    found = outputs.compare(answers, answers, 0.2)
    assert found.equal == 3 and found.mean == 0
    assert all(str(answer["tokens"][0]) in answer["logprobs"][0] for answer in answers)
    (decode,) = outcome.of("decode")
    assert decode["batch"] == 2 and outputs.step_seconds(decode["long"], decode["short"], 2) > 0
    assert len(outcome.of("prefill")) == len(outcome.of("requests")) == 1
