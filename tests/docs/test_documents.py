"""Check the code, tables, figures and messages of the documents against the code."""

import ast
import json
import re
import runpy
import shutil
from itertools import chain, product
from pathlib import Path

import pytest
import torch
from support.example_scripts import ROOT
from support.interpreters import forked
from torch._subclasses import FakeTensorMode

import torch_cute_ops
from torch_cute_ops import deployment, kernel_wheels
from torch_cute_ops.gemm import cost, select
from torch_cute_ops.kernel_wheels import MODELS
from torch_cute_ops.nn.quantize import SCHEMES
from torch_cute_ops.nn.warmup import collect
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.arch import ARCHS, Arch

README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
by_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def table_after(text: str, heading: str) -> list[dict[str, str]]:
    """Return the rows of the first table after a line that begins with ``heading``. A row is a dict keyed by column."""
    lines = text[re.search(rf"^{re.escape(heading)}", text, re.MULTILINE).start() :].splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[begin:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


# Code blocks and links


def blocks_of(text: str, tag: str) -> list[str]:
    """Return the code blocks of a document whose language tag matches the regular expression ``tag``."""
    return re.findall(rf"^```{tag}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    """Return the subpackages that `import torch_cute_ops` imports."""
    done = forked("import sys, torch_cute_ops; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    return {name.split(".")[1] for name in done.stdout.split() if name.startswith("torch_cute_ops.")}


@by_document
def test_python_blocks_import_what_they_use(path: Path, loaded: set[str]) -> None:
    """Check, from the source of each block, that the block imports what it uses. Running a block would not show a
    missing import, because earlier tests have imported every subpackage."""
    blocks = "\n".join(blocks_of(path.read_text(encoding="utf-8"), "py(?:thon)?"))
    parts = {path.name for path in (ROOT / "torch_cute_ops").iterdir() if (path / "__init__.py").exists()}
    used = {name for name in re.findall(r"torch_cute_ops\.(\w+)\.", blocks) if name in parts}
    imported = set(re.findall(r"^\s*(?:import|from) torch_cute_ops\.(\w+)", blocks, re.MULTILINE))
    imported |= set(re.findall(r"^\s*from torch_cute_ops import (\w+)", blocks, re.MULTILINE))
    assert used <= loaded | imported


@by_document
def test_python_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a document's code blocks one after the other, in a folder that contains the files shown in the document."""
    text = path.read_text(encoding="utf-8")
    blocks = blocks_of(text, "python")
    monkeypatch.chdir(tmp_path)
    for name, content in re.findall(r"^```toml\n# (\S+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        (tmp_path / name).write_text(content, encoding="utf-8")
        assert deployment.read(tmp_path / name)
    if any("torch.compile" in block for block in blocks) and not (torch.cuda.is_available() or shutil.which("g++")):
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    program = tmp_path / "blocks.py"  # write a file, because Dynamo reads the source of compiled functions
    program.write_text("\n".join(blocks), encoding="utf-8")
    runpy.run_path(str(program))


@by_document
def test_links_lead_somewhere(path: Path) -> None:
    """Check that linked files exist; `make docs` checks the headings."""
    links = re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not missing


# The README


def test_readme_is_short() -> None:
    assert len(text_of("README.md").splitlines()) <= 165


def test_readme_names_every_op() -> None:
    rows = [row["op"] for row in table_after(text_of("README.md"), "## Ops") if "**" not in row["op"]]
    named = [name.strip("`") for row in rows for name in row.split(", ")]
    assert sorted(named) == sorted(OPS)


VARIANTS = {"quack": "QuACK", "cublas_bf16": "cuBLAS bf16", "deep_gemm": "DeepGEMM", "inductor": "Inductor"}


@pytest.mark.parametrize("row", table_after(text_of("README.md"), "## Performance"), ids=lambda row: row["op"])
def test_readme_has_the_figures_of_the_benchmarks(row: dict[str, str]) -> None:
    """Check each figure in the README, ours and the peers', against the committed results, to three digits."""
    shown = dict(pair.split(" = ") for pair in re.split(r", (?=\w+ =)", row["sizes"]))
    results = json.loads(text_of(f"benchmarks/results/{row['op'].strip('`')}.json"))["rows"]
    found = [one for one in results if shown == {**{k: f"{v:,}" for k, v in one["sizes"].items()}, **one["choices"]}]
    assert len(found) == 1, f"{len(found)} results for {shown}"
    measured = {VARIANTS.get(name, name): three_digits(variant["us"]) for name, variant in found[0]["variants"].items()}
    assert row["µs"] == measured["ours"]
    peers = re.findall(r"(?:^|, )([A-Za-z][\w ]*?) ([\d.,]*\d)", row["peers, µs"])
    assert len(peers) > 1
    assert dict(peers) == {name: measured[name] for name, _ in peers}


def three_digits(us: float) -> str:
    return f"{us:,.{max(0, 2 - len(str(int(us))) + 1)}f}"


CAPABILITIES = "10.0, 10.3, 12.0 and 12.1"


def test_gpus() -> None:
    """Check the compute capabilities that the documents list against the supported architectures."""
    named = {f"sm_{capability.replace('.', '')}a" for capability in re.findall(r"\d+\.\d", f"9.0 {CAPABILITIES}")}
    assert named == set(ARCHS)
    readme, troubleshooting = (" ".join(text_of(name).split()) for name in ("README.md", "docs/troubleshooting.md"))
    assert CAPABILITIES in readme
    assert CAPABILITIES.replace(" and", " or") in troubleshooting
    evidence = {
        f"sm_{row['compute capability'].replace('.', '')}a": row["run on a GPU, and measured"] != "no"
        for row in table_after(text_of("docs/limits.md"), "## GPUs")
    }
    assert evidence == {name: arch.has_run for name, arch in ARCHS.items()}


# Tables and messages


def kind_of_gemm(op: str) -> dict[str, int]:
    return {"experts": 8} if op.startswith(("grouped", "moe")) else {}


@pytest.mark.parametrize("row", table_after(text_of("docs/gemm.md"), "A backend is one way"), ids=lambda r: r["GEMM"])
def test_backends_of_gpus(row: dict[str, str]) -> None:
    """Check the listed backends against the backends that support a typical problem. The reference, which supports
    every problem, is not listed."""
    listed = [(name, capability) for name in row for capability in re.findall(r"\d+\.\d", name)]
    columns = {f"sm_{capability.replace('.', '')}a": name for name, capability in listed}
    assert set(columns) == set(ARCHS)
    kinds = {"MXFP4": {"block_size": 32}, "MXFP8": {"mxfp8": True}, "1 × 128": {"scales_by_row": True}}
    given = next((kinds[name] for name in kinds if name in row["GEMM"]), {})
    for op in re.findall(r"`(\w+)`", row["GEMM"]):
        spec = OPS[op]
        kwargs = spec.path.example(n=4096, k=4096, device="meta", **kind_of_gemm(op), **given)
        problem = spec.path.problem(spec.bind(**kwargs))
        for arch, column in columns.items():
            reasons = select.reasons(problem, cost.usual_targets(ARCHS[arch])[0])
            able = [name for name, reason in reasons.items() if reason is None and name != "reference"]
            assert sorted(re.findall(r"\w+", row[column])) == sorted(able), (op, arch)
        on_cpu = select.reasons(problem, select.target_of(torch.device("cpu")))
        assert [name for name, reason in on_cpu.items() if reason is None] == re.findall(r"\w+", row["CPU"])


@pytest.mark.parametrize("size", [4096, 8192])
@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_backends_by_the_model(arch: Arch, size: int) -> None:
    """Check what docs/gemm.md says about the choice of a backend without tuning."""

    def chosen(op: str, m: int, **properties: int) -> str:
        kwargs = OPS[op].path.example(n=size, k=size, m=m, device="meta", **properties)
        problem = OPS[op].path.problem(OPS[op].bind(**kwargs))
        return select.choose(problem, m, cost.usual_targets(arch)[0]).backend.name

    few, many = (1, 16), (1024, 4096)
    if arch.has_tcgen05:
        assert {chosen("mm_fp4", m) for m in few} == {"tcgen05"}
        assert {chosen("mm_fp4", m) for m in many} == {"cublas"}
    own = {"wgmma"} if arch.has_wgmma else {"tcgen05"} if arch.has_tcgen05 else set()
    for op in ("mm_fp4_weight_only",) if arch.has_tcgen05 else ("mm_fp4", "mm_fp4_weight_only"):
        assert {chosen(op, m) for m in many} == (own or {"cublas"})
        assert {chosen(op, m) for m in few} <= {"mma_sync", *own}
    if not arch.has_wgmma:
        fastest = "tcgen05" if arch.has_tcgen05 else "mma_sync"
        assert {chosen("mm_fp8", m) for m in few} == {fastest} and {chosen("mm_fp8", m) for m in many} == {"scaled_mm"}
        for block_size in (16, 32):
            assert {chosen("mm_fp8_fp4", m, block_size=block_size) for m in (*few, *many)} == {fastest}
    else:
        assert {chosen("mm_fp8_fp4", m, block_size=32) for m in few} == {"wgmma_codes"}
        assert {chosen("mm_fp8_fp4", m, block_size=16) for m in few} == {"wgmma_rs"}
    for m in (*few, *many):
        fastest = "wgmma" if arch.has_wgmma else "tcgen05" if arch.has_tcgen05 else "mma_sync"
        assert chosen("mm_fp8_block", m) == fastest
        assert chosen("mm_fp8", m) in {fastest, "scaled_mm"}
        if arch.has_wgmma:
            assert chosen("moe_fc2_fp4", m, experts=32) == "routed"


def test_every_gemm_is_in_the_tables() -> None:
    gemms = {name for name, op in OPS.items() if op.has_backends}
    text = text_of("docs/gemm.md")
    assert {row["op"].strip("`") for row in table_after(text, "# GEMMs")} == gemms
    backends = {backend.name for backend in select.BACKENDS}
    assert {row["backend"].strip("`") for row in table_after(text, "| backend |")} == backends


KERNELS = ROOT / "torch_cute_ops" / "kernels"


@pytest.mark.parametrize("row", table_after(text_of("docs/kernels.md"), "## Which file"), ids=lambda row: row["step"])
def test_map_of_the_fp8_gemm(row: dict[str, str]) -> None:
    """Check that the files named in a row of the table "Which file" define the classes and methods named in the same
    row."""
    paths = [KERNELS / path for path in re.findall(r"`([\w/]+\.py)`", " ".join(row.values()))]
    source = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    assert all(f"class {name}" in source for name in re.findall(r"`(\w+)`", row["class"]))
    methods = re.findall(r"`(?:\w+\.)?(\w+)`", row["method"])
    assert methods and all(re.search(rf"(def {name}\(|^{name} = )", source, re.M) for name in methods)


@pytest.mark.parametrize(
    "row", table_after(text_of("docs/kernels.md"), "## The parts of each FP8 kernel"), ids=lambda row: row["kernel"]
)
def test_parts_of_the_fp8_gemms(row: dict[str, str]) -> None:
    """Check that a kernel's source calls every part that the kernel's row in the table of FP8 kernels names."""
    (kernel,) = re.findall(r"`(\w+)`", row["kernel"])
    source = (KERNELS / kernel / "kernel.py").read_text(encoding="utf-8")
    parts = re.findall(r"`(\w+)`", " ".join(list(row.values())[1:]))
    assert parts and all(f"{part}(" in source for part in parts)


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got.double() - exact.double()).norm() / exact.double().norm()).item()


def test_errors_of_mistakes() -> None:
    """Make each mistake in the table of docs/troubleshooting.md on Gaussian numbers, and check the error that the table
    gives."""
    weight, x = torch.randn(512, 1024) / 5000, torch.randn(128, 1024, dtype=torch.bfloat16)
    exact, g = x.float() @ weight.t(), 2688 / weight.abs().max()
    codes, scale = torch_cute_ops.fp4_quantize(weight, g)
    zeros, no_scale = torch_cute_ops.fp4_quantize(weight)
    swapped = (codes >> 4) | (codes << 4)
    results = {
        "0.095": (codes, scale, 1 / g),
        "0.34": (codes, scale.view(512, 64), 1 / g),
        "1.0": (zeros, no_scale, None),
        "1.4": (swapped, scale, 1 / g),
        "10 and more": (codes, scale, None),
    }
    rows = table_after(text_of("docs/troubleshooting.md"), "## Results are off")
    assert [next(iter(row.values())) for row in rows] == list(results)
    for shown, (b, b_scale, alpha) in results.items():
        error = relative_error(torch_cute_ops.mm_fp4_weight_only(x, b.t(), b_scale, alpha), exact)
        assert error > 10 if "more" in shown else error == pytest.approx(float(shown), rel=0.05), shown


def test_errors_of_formats() -> None:
    """Check the errors of the formats that the first paragraph of docs/troubleshooting.md gives."""
    weight, x = torch.randn(512, 1024), torch.randn(64, 1024, dtype=torch.bfloat16)
    exact = x.float() @ weight.t()
    codes, scale = torch_cute_ops.fp4_quantize(weight)
    a, a_scale = torch_cute_ops.fp4_quantize(x)
    mx, mx_scale = torch_cute_ops.fp4_quantize(weight, block_size=32)
    blocks = weight.view(4, 128, 8, 128)
    fp8_scale = blocks.abs().amax((1, 3)) / 448
    fp8 = (blocks / fp8_scale[:, None, :, None]).view(512, 1024).to(torch.float8_e4m3fn)
    row, row_scale = torch_cute_ops.fp8_quantize(x, granularity="block128")
    got = (
        torch_cute_ops.mm_fp4_weight_only(x, codes.t(), scale),
        torch_cute_ops.mm_fp4_weight_only(x, mx.t(), mx_scale, block_size=32),
        x.float() @ (fp8.float().view(blocks.shape) * fp8_scale[:, None, :, None]).view(512, 1024).t(),
        torch_cute_ops.mm_fp4(a, codes.t(), a_scale, scale),
        torch_cute_ops.mm_fp8_block(row, fp8.t(), row_scale, fp8_scale),
    )
    section = text_of("docs/troubleshooting.md").split("## Results are off")[1]
    shown = [float(number) for number in re.findall(r"([\d.]+) %", section)][: len(got)]
    assert [100 * relative_error(y, exact) for y in got] == pytest.approx(shown, rel=0.05)


def test_error_of_transposed_fp8_scales() -> None:
    """Check the error that docs/troubleshooting.md gives for transposed scales, which no op can detect if M = K/128."""
    section = text_of("docs/troubleshooting.md").split("## Results are off")[1]
    least, most = map(float, re.search(r"error\sof\s(\d+)\sto\s(\d+)\s%\sin\san\sFP8\sGEMM", section).groups())
    weight = torch.randn(256, 1024).to(torch.float8_e4m3fn)
    for magnitudes in (torch.ones(8, 1), 10.0 ** torch.randn(8, 1)):
        x = (torch.randn(8, 1024) * magnitudes).bfloat16()
        a, a_scale = torch_cute_ops.fp8_quantize(x, granularity="block128")
        y = torch_cute_ops.mm_fp8_block(a, weight.t(), a_scale.t(), torch.ones(2, 8))
        assert 0.6 * least < 100 * relative_error(y, x.float() @ weight.float().t()) < 1.3 * most


def strings_of_the_package() -> list[str]:
    """Return every string in the package's sources, with an ellipsis for each inserted value."""
    found = []
    for path in (ROOT / "torch_cute_ops").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[\w.]+", "…", node.value))
    return found


QUOTED = re.findall(r'"([^"]+)"', " ".join(re.findall(r"^\*\*(.*?)\*\*", text_of("docs/troubleshooting.md"), re.M)))


@pytest.fixture(scope="session")
def strings() -> list[str]:
    return strings_of_the_package()


def test_messages_are_quoted() -> None:
    assert len(QUOTED) > 20


@pytest.mark.parametrize("quoted", QUOTED)
def test_messages_are_those_of_the_code(quoted: str, strings: list[str]) -> None:
    """Check that each message that a document quotes exists: its parts between ellipses occur, in order, in one string
    of the sources."""
    pattern = re.compile(".*".join(map(re.escape, quoted.strip("… ").split("…"))), re.DOTALL)
    assert any(pattern.search(text) for text in strings)


def test_message_about_a_missing_tensor() -> None:
    quoted = re.search(r"`(weight is None; .*?)`", text_of("docs/troubleshooting.md")).group(1)
    with pytest.raises(TypeError, match=f"cute::rmsnorm_fp4quant: {quoted}$"):
        torch_cute_ops.rmsnorm_fp4quant(torch.ones(2, 64), None)


def test_message_about_a_deployment(tmp_path: Path) -> None:
    """Check the message that docs/serving.md quotes, by making the mistake in the file that the document shows."""
    text = text_of("docs/serving.md")
    content = re.search(r"^```toml\n# deployment.toml\n(.*?)^```", text, re.DOTALL | re.MULTILINE).group(1)
    quoted = re.search(r"`deployment.toml: (\[\[kernel.*?)`", " ".join(text.split())).group(1)
    wrong, count = re.subn(r"^m = .*$", "m = 0", content, flags=re.MULTILINE)
    assert count == 1
    (tmp_path / "deployment.toml").write_text(wrong, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(quoted) + "$"):
        deployment.read(tmp_path / "deployment.toml")
    limit = re.search(r"at\smost\s([\d,]+)\scalls", text).group(1)
    assert limit == f"{deployment.LIMIT:,}"


def test_models_of_wheels() -> None:
    """Compare the table of models and formats with the GEMMs that each architecture supports."""
    rows = table_after(text_of("docs/serving.md"), "### A wheel of kernels")
    shown = {
        (model, arch): cell
        for row in rows
        for model in row.pop("model").replace("`", "").split(", ")
        for archs, cell in row.items()
        for arch in archs.split(", ")
    }
    assert shown.keys() == set(product(MODELS, ARCHS))
    for (name, arch), cell in shown.items():
        found: dict[str, set[bool]] = {}
        for scheme, activations in MODELS[name].formats:
            with FakeTensorMode():
                layers = kernel_wheels._layers(MODELS[name], SCHEMES[scheme], activations)
                collected = collect(layers, 64, ARCHS[arch])
            has_gemm = any(OPS[op].has_backends for op in collected.served)
            found.setdefault(scheme, set()).update({has_gemm, not collected.refused})
        full = [scheme for scheme in found if found[scheme] == {True}]
        partial = [f"{scheme} without the experts" for scheme in found if found[scheme] == {True, False}]
        assert cell == "; ".join([", ".join(full) or "none", *partial]), (name, arch)


def test_settings() -> None:
    shown = {row["variable"].strip("`") for row in table_after(text_of("docs/serving.md"), "## Settings")}
    assert shown == {setting["variable"] for setting in settings.described()}


def test_versions() -> None:
    """Check that the documents name the oldest versions that pip installs."""
    oldest = dict(re.findall(r'^    "([\w-]+)>=([\d.]+)[",]', text_of("pyproject.toml"), re.MULTILINE))
    section = re.search(r"## Versions\n\n(.*?)\n\n", text_of("docs/limits.md"), re.DOTALL)[1]
    stated = " ".join(section.split())
    assert f"torch {oldest['torch']} or newer" in stated and f"torch {oldest['torch']} or newer" in text_of("README.md")
    assert f"`nvidia-cutlass-dsl` {oldest['nvidia-cutlass-dsl']} to " in stated
    assert f"`apache-tvm-ffi` {oldest['apache-tvm-ffi']} to " in stated


def test_terms_of_the_glossary_are_used() -> None:
    """Check that each term of the glossary occurs in the sources or in another document."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "torch_cute_ops").rglob("*.py")]
    texts += [text_of(str(path)) for path in DOCUMENTS if path.name != "glossary.md"]
    everything = plain(" ".join(texts))
    entries = re.findall(r"^- \*\*(.+?)\*\*", text_of("docs/glossary.md"), re.MULTILINE)
    terms = list(chain.from_iterable(entry.split(", ") for entry in entries))
    assert len(terms) > 50
    assert [term for term in terms if plain(term) not in everything] == []


def plain(text: str) -> str:
    """Return the text in lower case, with single spaces between words."""
    return " ".join(re.split(r"[\s_-]+", text.lower()))
