"""Test the formulas, the comparison of answers, the processes and the reports of `python -m benchmarks vllm`."""

import gzip
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import compare, performance
from benchmarks.engines import backends, command, engine, kernels, outputs, processes, results
from benchmarks.engines.engine import Engine, Plan

CPU = torch.device("cpu")

# Formulas


def test_a_decode_step():
    """Check that 1.29 s for 129 tokens and 0.01 s for one token give 128 steps of 10 ms each."""
    assert outputs.step_seconds([9.0, 1.29, 0.2], [0.01, 0.01, 3.0], 129) == pytest.approx(0.01)


def answer(tokens, *logprobs):
    return {"tokens": list(tokens), "logprobs": list(logprobs)}


SAID = answer([3, 5], {"3": -0.1, "4": -2.0}, {"5": -0.5, "6": -0.6})


@pytest.mark.parametrize(
    ("given", "equal", "wrong", "differences"),
    [
        (SAID, 1, 0, [0, 0, 0, 0]),
        # The second token differs. In the reference it is less likely by 0.1, which is a near tie.
        (answer([3, 6], {"3": -0.3, "9": -1.0}, {"6": -0.5, "5": -0.9}), 0, 0, [0.2, 0.1, 0.4]),
        # The first token differs, and is less likely by 1.9. The second step continues another text.
        (answer([4, 5], {"3": -0.1, "4": -0.05}, {"5": -9.0}), 0, 1, [0, 1.95]),
        # The reference does not list the token.
        (answer([8, 5], {"8": -0.1, "3": -0.2}, {"5": -9.0}), 0, 1, [0.1]),
    ],
)
def test_comparison_of_answers(given, equal, wrong, differences):
    found = outputs.compare([given, SAID], [SAID, SAID], 0.2)
    every = [*differences, 0, 0, 0, 0]
    assert (found.answers, found.equal, found.wrong) == (2, 1 + equal, wrong)
    # With a large gap, only a token that the reference does not list is wrong.
    assert outputs.compare([given, SAID], [SAID, SAID], 2.0).wrong == (8 in given["tokens"])
    assert found.mean == pytest.approx(sum(every) / len(every)) and found.largest == pytest.approx(max(every))


def test_judged_answers():
    right = outputs.Agreement(200, 190, 2, 0.05, 1.0, 0.2)
    assert right.reason_wrong(0.05) is None
    assert "differ from the reference by 0.050" in right.reason_wrong(0.04)
    assert "3 of 200" in outputs.Agreement(200, 190, 3, 0.05, 1.0, 0.2).reason_wrong(0.05)
    assert outputs.Agreement(1, 0, 1, float("nan"), 1.0, 0.2).reason_wrong(0.05)
    assert outputs.Agreement(1, 0, 1, 9.0, 9.0, 0.2).reason_wrong(None) is None
    with pytest.raises(ValueError, match="1 answers cannot be compared with 2"):
        outputs.compare([SAID], [SAID, SAID], 0.2)


def test_logs_and_traces():
    log = "(EngineCore) INFO Model loading took 5.67 GiB memory and 4.0 seconds\nModel loading took 5.7 GiB memory"
    assert outputs.weights_gib(log) == 5.7 and outputs.weights_gib("nothing") is None
    events = [
        {"cat": "kernel", "name": "mm<1, 2>", "dur": 3.0},
        {"cat": "kernel", "name": "norm", "dur": 4.5},
        {"cat": "kernel", "name": "mm<8>(float)", "dur": 2.0},
        {"cat": "cpu_op", "name": "mm", "dur": 100.0},
        {"cat": "kernel", "name": "mm"},
    ]
    assert list(outputs.kernel_times(events).items()) == [("mm", (2, 5.0)), ("norm", (1, 4.5))]


# Options


def test_options(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    given = ["--model", str(tmp_path), "--batch", "1", "256", "--prefill", "4000", "--options", '{"seed": 3}']
    plan = command.plan_of(command.parse(given), tmp_path, tmp_path)
    assert plan.options["seed"] == 3 and plan.options["max_num_seqs"] == 256 and plan.vocabulary == 100
    assert plan.options["max_model_len"] > 4000 and plan.options["max_num_batched_tokens"] == 16384
    assert plan.parts == ("answers", "decode", "prefill", "requests")
    assert plan.compared == [(1, 32), (256, 32), (1, 2048)]
    few = command.parse([*given, "--parts", "prefill", "start", "--profile"])
    assert command.plan_of(few, tmp_path, tmp_path).parts == ("answers", "prefill", "profile")
    path = tmp_path / "plan"
    plan.write(path)
    assert Plan.read(path) == plan
    # Decoded weights come after the peers with quantised weights, whatever the order of the options.
    order = command.in_order(["ours_fp8", "ours"], ["bf16", "vllm", "humming", "marlin"])
    assert [each.name for each in order] == ["marlin", "humming", "vllm", "bf16", "ours", "ours_fp8"]
    for wrong in (
        ["--model", "9b"], ["--batch", "0"], ["--options", "[1]"], ["--options", "{"], ["--against", "cutlass"],
        ["--against", "--ours"],
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            command.parse(wrong)
    assert "--model 9b is neither a folder with config.json nor one of 8b, tiny" in capsys.readouterr().err


def test_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(backends.metadata, "entry_points", lambda group, name: [])
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    reasons = {name: each.reason_absent() for name, each in backends.BACKENDS.items()}
    assert [name for name, reason in reasons.items() if reason is None] == ["marlin", "vllm", "bf16"]
    assert "entry point torch_cute_ops" in reasons["ours_fp8"] and "humming is not installed" in reasons["humming"]
    assert command.main([]) == command.NO_GPU and "needs vLLM" in capsys.readouterr().err


# Processes


def test_environment_of_a_process(tmp_path):
    given = {
        "PATH": "p",
        "PYTHONPATH": "x",
        "TORCH_CUTE_OPS_VLLM": "fp8",
        "TRITON_CACHE_DIR": "/y",
        "HF_HUB_OFFLINE": "0",
    }
    made = processes.environment_of(tmp_path, given)
    assert made["PATH"] == "p" and made["PYTHONPATH"] == f"{processes.ROOT}{os.pathsep}x"
    assert "TORCH_CUTE_OPS_VLLM" not in made and made["HF_HUB_OFFLINE"] == made["VLLM_NO_USAGE_STATS"] == "1"
    assert made["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"  # a function is passed to vLLM's workers
    assert all(made[name].startswith(f"{tmp_path}/") for name in processes.CACHES)


def test_processes(tmp_path):
    log = tmp_path / "log"
    assert processes.run(["-c", "print('said')"], os.environ, log, 60) == "" and log.read_text() == "said\n"
    assert processes.run(["-c", "exit(3)"], os.environ, log, 60) == "ended with status 3"
    # The program and the process that it starts are both ended.
    program = "import subprocess, time; print(subprocess.Popen(['sleep', '99']).pid, flush=True); time.sleep(99)"
    assert processes.run(["-c", program], os.environ, log, 3) == "did not end within 3 s"
    status = Path(f"/proc/{int(log.read_text())}/status")
    end = time.monotonic() + 20
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < end, "the second process still runs"
        time.sleep(0.05)


def test_results_of_a_process(tmp_path, monkeypatch):
    """Check that a program that ends early gives no results, even if its status is 0."""
    lines = ['{"event": "start", "seconds": 2}', '{"event": "end"}']

    def run(given, environment, log, timeout_s):
        assert given[:2] == ("-m", "benchmarks.engines.engine") and Plan.read(tmp_path / "a.plan.json") == plan
        (tmp_path / "a.jsonl").write_text("\n".join([*lines, '{"event": "cut']))
        log.write_text("Model loading took 1.5 GiB")
        return ""

    monkeypatch.setattr(processes, "run", run)
    plan = Plan("m", {"a": 1}, 10)
    outcome = processes.measure(plan, tmp_path, "a", tmp_path / "caches", 60)
    assert (
        outcome.error == "" and outcome.weights_gib == 1.5 and outcome.of("start") == [{"event": "start", "seconds": 2}]
    )
    lines.pop()
    assert processes.measure(plan, tmp_path, "a", tmp_path / "caches", 60).error == "ended without results"


# Measurement


class FakeLLM:
    """Engine whose prefill takes 1 ms per 100 tokens and whose decode step takes `step` seconds."""

    def __init__(self, step, shift=0.0, model=None):
        self.step, self.shift, self.now, self.asked = step, shift, 0.0, []
        self.model = model or torch.nn.Module()

    def apply_model(self, function):
        return [function(self.model)]

    def generate(self, given, parameters, use_tqdm):
        lengths = [len(each["prompt_token_ids"]) for each in given]
        self.asked.append((lengths, parameters.max_tokens))
        self.now += sum(lengths) * 1e-5 + (parameters.max_tokens - 1) * self.step
        logprobs = [{7: SimpleNamespace(logprob=-0.5 - self.shift)}] * parameters.max_tokens
        said = SimpleNamespace(token_ids=[7] * parameters.max_tokens, logprobs=logprobs)
        return [SimpleNamespace(outputs=[said])] * len(given)


def events_of(llm, plan):
    found = []
    tell = lambda event, **values: found.append(json.loads(json.dumps({"event": event, **values})))  # noqa: E731
    tell("start", seconds=30.0 + llm.step, import_seconds=5.0, version="0.32.0")
    Engine(llm, SimpleNamespace, plan, tell, lambda: llm.now).run()
    return found


def test_measurement_of_an_engine():
    llm = FakeLLM(0.004)
    plan = Plan(
        "m", {"max_num_seqs": 8}, 50, ("answers", "decode", "prefill", "requests"), (1, 2), 10, 5, (300,), 4, 20, 3
    )
    outcome = processes.Outcome(events_of(llm, plan), "", "")
    assert llm.asked[:3] == [([32], 8), ([32, 32], 8), ([300], 8)]
    found = {case: (part, tokens, time["us"]) for part, case, tokens, time in results.times(outcome, plan)}
    assert found == {
        "decode step, batch 1": ("decode", 1, pytest.approx(4000)),
        "decode step, batch 2": ("decode", 2, pytest.approx(4000)),
        "prefill, 300 tokens": ("prefill", 300, pytest.approx(3000)),
        "4 requests, 20 in, 3 out, 8 at once": ("requests", 12, pytest.approx(800 + 8000)),
    }
    answers = outcome.of("answers")
    assert [(each["count"], len(each["answers"])) for each in answers] == [(1, 1), (2, 2), (1, 1)]
    assert answers[0]["answers"][0] == {"tokens": [7] * 8, "logprobs": [{"7": -0.5}] * 8}
    for count, length in ((2, 5), (1, 7)):
        made = engine.prompts(count, length, 50)
        assert (
            made == engine.prompts(count, length, 50)
            and [len(each["prompt_token_ids"]) for each in made] == [length] * count
        )
        assert all(4 <= token < 50 for each in made for token in each["prompt_token_ids"])


def test_profile(tmp_path, monkeypatch):
    """Check that each batch gets the times of its own trace, and that the client's trace is ignored."""
    monkeypatch.setattr(engine.time, "sleep", lambda seconds: None)
    llm, plan = FakeLLM(0.004), Plan("m", {}, 50, ("profile",), (1, 2), profiles=str(tmp_path))
    llm.start_profile = lambda: None

    def stop_profile():
        sequences = len(llm.asked[-1][0])
        events = [{"cat": "kernel", "name": "mm<1>", "dur": 2.5}] * sequences
        with gzip.open(tmp_path / f"rank0.{sequences}.pt.trace.json.gz", "wt") as file:
            json.dump({"traceEvents": events}, file)
        (tmp_path / f"async_llm.{sequences}.json").write_text("{}")

    llm.stop_profile = stop_profile
    _, _, first, second = events_of(llm, plan)
    assert first == {"event": "profile", "batch": 1, "tokens": 8, "kernels": {"mm": [1, 2.5]}}
    assert second == {"event": "profile", "batch": 2, "tokens": 8, "kernels": {"mm": [2, 5.0]}}
    table = results.profile_table({"ours": second["kernels"]}).splitlines()[2]
    assert [cell.strip() for cell in table.strip("|").split("|")] == ["ours", "mm", "2", "5.00"]


# Kernels of the layers


class LinearMethodBase:
    """Class with the name of vLLM's base class."""


class FusedMoEMethodBase:
    """Class with the name of vLLM's base class."""


class UnquantizedLinearMethod(LinearMethodBase):
    pass


class ModelOptNvFp4W4A16LinearMethod(LinearMethodBase):
    def __init__(self):
        self.marlin_input_dtype, self.kernel = None, MarlinNvFp4LinearKernel()


class CompressedTensorsLinearMethod(LinearMethodBase):
    pass


class CompressedTensorsW4A4Fp4:
    def __init__(self):
        self.use_a16, self.kernel = True, HummingNvFp4LinearKernel()


class MarlinNvFp4LinearKernel:
    pass


class HummingNvFp4LinearKernel:
    pass


class CuteLinearMethod(LinearMethodBase):
    def __init__(self):
        self.scheme = "nvfp4"


class CuteExpertsMethod(FusedMoEMethodBase):
    pass


class CompressedTensorsKVCacheMethod:
    pass


def served(*methods, scheme=None):
    """Return a model with a layer for each class of method, and with layers that are not quantised."""
    model = torch.nn.Sequential(*(torch.nn.Module() for _ in methods), torch.nn.Linear(1, 1))
    for layer, method in zip(model, (*methods, UnquantizedLinearMethod), strict=True):
        layer.quant_method = method()
        if method is CompressedTensorsLinearMethod:
            layer.scheme = scheme()
    attention = torch.nn.Module()
    attention.quant_method = CompressedTensorsKVCacheMethod()
    return model.append(attention)


BY_MARLIN = served(ModelOptNvFp4W4A16LinearMethod, ModelOptNvFp4W4A16LinearMethod)
BY_HUMMING = served(*[CompressedTensorsLinearMethod] * 3, scheme=CompressedTensorsW4A4Fp4)
BY_OURS = served(CuteLinearMethod, CuteExpertsMethod, ModelOptNvFp4W4A16LinearMethod)


def test_kernels_of_a_model():
    """Check that kernels are found in methods of ModelOpt and in schemes of compressed-tensors."""
    assert kernels.kernels_of(BY_MARLIN) == {"linear": {"MarlinNvFp4LinearKernel": 2}, "experts": {}}
    assert kernels.kernels_of(BY_HUMMING) == {"linear": {"HummingNvFp4LinearKernel": 3}, "experts": {}}
    ours = kernels.kernels_of(BY_OURS)
    assert ours == {
        "linear": {"CuteLinearMethod": 1, "MarlinNvFp4LinearKernel": 1},
        "experts": {"CuteExpertsMethod": 1},
    }
    assert kernels.kernels_of(served()) == {"linear": {}, "experts": {}}
    assert kernels.added([ours, ours])["linear"] == {"CuteLinearMethod": 2, "MarlinNvFp4LinearKernel": 2}
    assert kernels.listed(ours["linear"]) == "CuteLinearMethod in 1 layers, MarlinNvFp4LinearKernel in 1 layers"


@pytest.mark.parametrize(
    ("backend", "model", "reason"),
    [
        ("marlin", BY_MARLIN, None),
        ("marlin", BY_HUMMING, "HummingNvFp4LinearKernel in 3 layers; expected Marlin"),
        ("humming", BY_HUMMING, None),
        ("humming", BY_MARLIN, "other kernels for quantised linear layers: MarlinNvFp4LinearKernel in 2 layers"),
        ("humming", BY_OURS, "CuteLinearMethod in 1 layers, MarlinNvFp4LinearKernel in 1 layers"),
        ("humming", served(), "linear layers: none"),
        ("vllm", BY_MARLIN, None),
        ("bf16", served(), None),
        ("bf16", BY_MARLIN, "the model has quantised layers: MarlinNvFp4LinearKernel in 2 layers"),
        # Formats that this package does not support keep vLLM's methods.
        ("ours", BY_OURS, None),
        ("ours_fp8", BY_MARLIN, "no layer uses this package's kernels; vLLM uses MarlinNvFp4LinearKernel in 2 layers"),
    ],
)
def test_other_kernels(backend, model, reason):
    found = backends.BACKENDS[backend].reason_other_kernels(kernels.kernels_of(model))
    assert found is None if reason is None else reason in found


def test_limits_depend_on_the_reference():
    """Check that kernels for 16-bit activations are compared with decoded weights by the limit of decoded weights."""
    limits = {
        (name, reference): backends.BACKENDS[name].limit_from(backends.BACKENDS[reference])
        for name in ("ours", "bf16", "ours_fp8", "ours_fp4")
        for reference in ("marlin", "bf16")
    }
    close, decoded, rough = backends.CLOSE, backends.DECODED, backends.ROUGH
    assert limits == {
        ("ours", "marlin"): close, ("ours", "bf16"): decoded, ("bf16", "marlin"): decoded, ("bf16", "bf16"): decoded,
        ("ours_fp8", "marlin"): rough, ("ours_fp8", "bf16"): rough,
        ("ours_fp4", "marlin"): None, ("ours_fp4", "bf16"): None,
    }  # fmt: skip
    ours, fp4, marlin, bf16 = (backends.BACKENDS[name] for name in ("ours", "ours_fp4", "marlin", "bf16"))
    assert (ours.gap_from(marlin), ours.gap_from(bf16), fp4.gap_from(bf16)) == pytest.approx((0.2, 0.4, 0.2))


STEPS = {"bf16": 0.008, "marlin": 0.006, "humming": 0.005, "ours": 0.004, "ours_fp8": 0.003}
MODELS = {"bf16": served(), "marlin": BY_MARLIN, "humming": BY_HUMMING, "ours": BY_OURS, "ours_fp8": BY_OURS}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Compare backends whose engines are simulated; return the exit status and the result. `shifts` contains shifts of
    log probabilities by backend, the name of a backend that "fails", and other "models" by backend."""
    monkeypatch.setattr(command.environment, "collect", lambda device: {"gpu": "made up"})
    monkeypatch.setattr(command.environment, "package_version", {"transformers": "9.9"}.get)
    monkeypatch.setattr(results.environment, "headline", lambda found: found["gpu"])
    monkeypatch.setattr(backends.Backend, "reason_absent", lambda self: "gone" if self.name == "humming" else None)

    def make(comparison, what, source, made):
        made.mkdir()
        (made / "config.json").write_text('{"vocab_size": 50}')

    monkeypatch.setattr(command.Comparison, "make", make)

    def measured(shifts, *arguments):
        plans = []

        def measure(plan, folder, name, caches, timeout_s):
            plans.append((name, plan))
            backend = name.rpartition("-")[0]
            if backend == shifts.get("fails"):
                return processes.Outcome([], "ended with status 1", "the last line")
            if "torch_cute_ops" in str(plan.options.get("quantization")):  # one kernel per start
                kernel = caches / "torch_cute_ops" / "v" / name
                kernel.mkdir(parents=True)
                (kernel / processes.DESCRIPTION).touch()
            log = f"Model loading took {5 + len(backend)} GiB"
            model = shifts.get("models", MODELS).get(backend, MODELS[backend])
            llm = FakeLLM(STEPS[backend], shifts.get(backend, 0.0), model)
            return processes.Outcome(events_of(llm, plan), "", log)

        monkeypatch.setattr(processes, "measure", measure)
        options = command.parse(["--output", str(tmp_path / "out"), "--batch", "1", "64", *arguments])
        status = command.compare(options, CPU)
        text = (tmp_path / "out" / "vllm.md").read_text()
        return status, json.loads((tmp_path / "out" / "vllm.json").read_text()), text, plans

    return measured


def test_a_run(run, tmp_path, capsys):
    status, result, text, plans = run({"ours": 0.01}, "--no-plot")
    assert status == 0 and result["reference"] == "marlin" and result["absent"] == {"humming": "gone"}
    assert [name for name, _ in plans] == [f"{b}-{c}" for b in ("marlin", "bf16", "ours") for c in ("cold", "warm")]
    models = {name: plan.model.rpartition("/")[2] for name, plan in plans}
    assert models["bf16-warm"] == "8b-compressed-tensors-decoded"
    assert models["ours-cold"] == models["marlin-warm"] == "8b-compressed-tensors"
    chosen = {name: plan.options for name, plan in plans}
    assert chosen["marlin-cold"]["linear_backend"] == "marlin" and "quantization" not in chosen["marlin-cold"]
    assert chosen["ours-warm"]["quantization"] == "torch_cute_ops" and plans[0][1].parts == ()
    rows = {row["case"]: {name: each["us"] for name, each in row["variants"].items()} for row in result["rows"]}
    assert rows["decode step, batch 64"] == pytest.approx({"bf16": 8000, "marlin": 6000, "ours": 4000})
    assert rows["start, cold caches"] == pytest.approx({"bf16": 30.008e6, "marlin": 30.006e6, "ours": 30.004e6})
    assert result["agreement"]["ours"]["mean"] == pytest.approx(0.01) and result["late_kernels"] == {"ours": 1}
    assert result["weights_gib"] == {"bf16": 9.0, "marlin": 11.0, "ours": 9.0}
    line = next(line for line in text.splitlines() if "decode step, batch 64" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["decode step, batch 64", "ms", "4.00", "6.00", "8.00", "1.50", "2.00", "16,000"]
    assert text.splitlines()[2] == "made up · vllm 0.32.0 · transformers 9.9"
    assert result["kernels"]["marlin"] == {"linear": {"MarlinNvFp4LinearKernel": 2}, "experts": {}}
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert ["marlin", "linear", "MarlinNvFp4LinearKernel in 2 layers"] in cells
    assert ["ours", "experts", "CuteExpertsMethod in 1 layers"] in cells
    assert "- humming: gone" in text and "ours: 1 kernels compiled after the start" in text
    # The other commands that read the file
    ((name, _, _, marks),) = performance.measured(tmp_path / "out")
    verdicts = {mark.name: (mark.value, mark.passed) for mark in marks}
    assert name == "vllm" and verdicts["decode step, batch 64: marlin / ours"] == (pytest.approx(1.5), True)
    assert verdicts["decode step, batch 1: marlin / ours"] == (pytest.approx(1.5), True)
    assert verdicts["decode step, batch 64: humming / ours"] == (None, None)
    assert verdicts["start, warm caches: ours / marlin"] == (pytest.approx(30.004 / 30.006), True)
    assert verdicts["start, cold caches: ours − marlin"] == (pytest.approx(-0.002), True)
    new = json.loads(json.dumps(result))
    for row in new["rows"]:
        row["variants"]["ours"]["us"] *= 1.5
    found, slower = compare.compared("vllm", result, new, 0.02)
    assert slower == 6 and "ours, 8b, decode step, batch 1" in found and "marlin, 8b" not in found


def test_times_of_wrong_answers_are_left_out(run, capsys):
    shifts = {"bf16": 0.06, "ours": 0.06, "ours_fp8": 0.06}
    status, result, text, _ = run(shifts, "--ours", "ours", "ours_fp8", "--parts", "decode")
    assert status == 1 and "differ from the reference by 0.060" in result["failed"].pop("ours")
    assert not result["failed"]
    assert all(row["variants"].keys() == {"marlin", "bf16", "ours_fp8"} for row in result["rows"])
    assert [row["part"] for row in result["rows"]] == ["decode", "decode"]
    assert "by more than 0.2 in the reference (`bf16`: 0.4, `ours_fp8`: 1.2)." in " ".join(text.split())
    assert "4.00 ms" not in capsys.readouterr().out and "- ours: log probabilities differ" in text


def test_times_of_other_kernels_are_left_out(run, monkeypatch, capsys):
    """Check that a peer whose layers use another peer's kernels is absent, and is not the reference."""
    monkeypatch.setattr(backends.Backend, "reason_absent", lambda self: None)
    against = ("--against", "humming", "bf16")
    status, result, text, plans = run({"models": {"humming": BY_MARLIN}}, *against, "--no-plot")
    assert status == 0 and not result["failed"] and result["reference"] == "bf16"
    assert "MarlinNvFp4LinearKernel in 2 layers; expected Humming" in result["absent"]["humming"]
    assert all("humming" not in row["variants"] for row in result["rows"]) and "- humming: vLLM uses other" in text
    assert "humming" not in result["weights_gib"] and "| humming" not in text
    assert [name for name, _ in plans if "humming" in name] == ["humming-cold"]  # nothing is timed afterwards
    _, result, _, _ = run({"models": {"humming": BY_MARLIN}}, *against, "--parts", "decode", "--no-plot")
    assert "humming" in result["absent"] and result["reference"] == "bf16"
    assert all("humming" not in row["variants"] for row in result["rows"])
    status, result, _, _ = run({}, *against, "--no-plot")
    assert status == 0 and not result["absent"] and result["reference"] == "humming"
    assert all("humming" in row["variants"] for row in result["rows"])


def test_a_failed_engine(run, capsys):
    """Check that the next peer becomes the reference if the first peer fails."""
    status, result, text, _ = run({"fails": "marlin"}, "--no-plot")
    assert status == 1 and result["reference"] == "bf16" and "- marlin: the engine ended with status 1" in text
    assert "the last line" in capsys.readouterr().err and result["agreement"].keys() == {"ours"}


# Checkpoints


def test_checkpoints(tmp_path, monkeypatch):
    """Check that the decoded checkpoint contains the products of codes and scales, rounded to bfloat16."""
    pytest.importorskip("transformers")
    from safetensors.torch import load_file

    from benchmarks import layer, llama
    from benchmarks.engines import checkpoints

    small = llama.Size(layer.Widths(hidden=256, qkv=512, attention=256, intermediate=320), 1, 64, ())
    monkeypatch.setattr(checkpoints, "SIZES", {"small": small})
    monkeypatch.setattr(checkpoints, "device", lambda: CPU)
    assert checkpoints.main(["random", "small", str(tmp_path / "a")]) == 0
    assert checkpoints.main(["decode", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["max_position_embeddings"] > 8192
    group = config["quantization_config"]["config_groups"]["group_0"]
    assert group["format"] == "nvfp4-pack-quantized" and group["input_activations"] is None
    assert "quantization_config" not in json.loads((tmp_path / "b" / "config.json").read_text())
    stored, decoded = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    values = torch.cat((values, -values))
    quantised = [name for name in stored if name.endswith("_global_scale")]
    plain = {name for name in stored if "_scale" not in name and "_packed" not in name}
    assert len(quantised) == 7 and not any("input" in name for name in quantised)
    assert decoded.keys() == plain | {name.replace("_global_scale", "") for name in quantised}
    assert len({stored[name].item() for name in quantised}) == 1  # merged layers share a global scale
    for name in decoded:
        if name in plain:
            want = stored[name]
        else:
            packed, reciprocal = stored[f"{name}_packed"], stored[f"{name}_global_scale"].double()
            codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()
            want = values[codes] * stored[f"{name}_scale"].double().repeat_interleave(16, 1) / reciprocal
        assert decoded[name].dtype == torch.bfloat16
        assert (decoded[name].double() - want.double()).abs().max() <= 2**-8 * want.double().abs().max(), name
        torch.testing.assert_close(decoded[name].double(), want.double(), rtol=2**-8, atol=0)
