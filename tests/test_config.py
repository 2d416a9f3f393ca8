"""The configuration file: what it accepts, and the one line that every mistake gets."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspa_megatron.config import (
    ConfigError,
    HotSPaConfig,
    ResolvedConfig,
    StrategyConfig,
    SwitchConfig,
    load_config,
    resolve,
)
from hotspa_megatron.planning.alignment import Alignment
from hotspa_megatron.planning.execution import Recompute
from hotspa_megatron.planning.legality import legal_tps, tp_problem
from hotspa_megatron.planning.model_shape import ModelShape
from hotspa_megatron.strategy import Kind, Strategy
from hotspa_megatron.strict_yaml import DEPTH_LIMIT, SIZE_LIMIT

SHAPE = ModelShape(
    num_layers=12,
    hidden_size=96,
    ffn_hidden_size=384,
    num_attention_heads=12,
    num_query_groups=12,
    kv_channels=8,
    padded_vocab_size=1024,
    seq_length=4096,
    gated_linear_unit=True,
    tied_embeddings=True,
    rms_norm=True,
    qk_layernorm=False,
    linear_bias=False,
    qkv_bias=False,
    learned_positions=None,
    sequence_parallel=True,
    layers_in_first_stage=None,
    layers_in_last_stage=None,
    parameter_bytes=2,
    gradient_bytes=4,
    distributed_optimizer=True,
)
HOME = Strategy(tp=4, cp=1, pp=1, dp=2)


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "hotspa.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def one_entry(line: str) -> str:
    return f"strategies:\n  - max_length: 512\n    {line}\n"


GOOD = """\
# comments and blank lines are fine

strategies:
  - max_length: 512        # sequences of up to 512 tokens
    tp: 1
    tokens_per_microbatch: 2048
  - {max_length: 2048, tp: 2, pp: 1, cp: 2}
home: {tokens_per_microbatch: 8192}
samples: documents
overlong: drop
merge: never
check_plans: false
get_batch: my_package.batches:get_batch
allow_untested: [megatron, fp8, fp8]
"""


def test_reads_every_key(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD))
    assert config == HotSPaConfig(
        path=tmp_path,
        strategies=(
            StrategyConfig(max_length=512, tokens_per_microbatch=2048),
            StrategyConfig(max_length=2048, tp=2, cp=2),
        ),
        home_tokens_per_microbatch=8192,
        overlong="drop",
        merge="never",
        check_plans=False,
        get_batch="my_package.batches:get_batch",
        allow_untested=("fp8", "megatron"),
    )
    assert [entry.line for entry in config.strategies] == [4, 7]
    assert config.strategies[0].line_of("tp") == 5
    assert config.strategies[0].line_of("cp") == 4


@pytest.mark.parametrize(
    "text",
    [
        "strategies: []\n",
        "strategies: []",
        "\ufeffstrategies: []\n",
        "# windows\r\nstrategies: []\r\n",
        "---\nstrategies: []\n...\n",
        "'strategies': []\nhome: {}\nget_batch: null\ncheck_plans: True\noverlong: 'split'\n",
        "strategies: []\nget_batch:\n",
    ],
)
def test_the_static_run(tmp_path: Path, text: str) -> None:
    assert load_config(write(tmp_path, text)) == HotSPaConfig(path=tmp_path, strategies=())


BAD: dict[str, tuple[str | bytes, int, str, str]] = {
    # Values that PyYAML reads as something else, or that look like a number.
    "octal": (one_entry("tp: 010"), 3, "strategies[0].tp", "'010' has a leading zero"),
    "hexadecimal": (one_entry("tp: 0x10"), 3, "strategies[0].tp", "'0x10' is not a whole number"),
    "underscore": (one_entry("tp: 1_0"), 3, "strategies[0].tp", "'1_0' is not a whole number"),
    "base sixty": (one_entry("tp: 1:30"), 3, "strategies[0].tp", "'1:30' is not a whole number"),
    "unit": (one_entry("tokens_per_microbatch: 32k"), 3, "strategies[0].tokens_per_microbatch", "'32k' is not"),
    "exponent": (one_entry("tokens_per_microbatch: 1e3"), 3, "strategies[0].tokens_per_microbatch", "'1e3' is not"),
    "float": (one_entry("tp: 2.0"), 3, "strategies[0].tp", "'2.0' is not a whole number"),
    "on": (one_entry("tp: on"), 3, "strategies[0].tp", "'on' is not a whole number"),
    "true": (one_entry("pp: true"), 3, "strategies[0].pp", "'true' is not a whole number"),
    "infinity": (one_entry("cp: .inf"), 3, "strategies[0].cp", "'.inf' is not a whole number"),
    "plus": (one_entry("tp: +2"), 3, "strategies[0].tp", "'+2' is not a whole number"),
    "other digits": (one_entry("tp: \u0662"), 3, "strategies[0].tp", "is not a whole number"),
    "quoted": (one_entry('tp: "2"'), 3, "strategies[0].tp", "'2' is text; write a whole number without quotes"),
    "null": (one_entry("tp: null"), 3, "strategies[0].tp", "has no value"),
    "nothing": (one_entry("tp:"), 3, "strategies[0].tp", "has no value"),
    "zero": (one_entry("tp: 0"), 3, "strategies[0].tp", "0 is less than 1"),
    "negative": (one_entry("cp: -2"), 3, "strategies[0].cp", "-2 is less than 1"),
    "huge": (one_entry(f"tp: {'9' * 5000}"), 3, "strategies[0].tp", "is too large"),
    "just too large": (one_entry(f"tp: {2**31}"), 3, "strategies[0].tp", "'2147483648' is too large"),
    "placeholder": (one_entry("tp: <TP>"), 3, "strategies[0].tp", "'<TP>' is not a whole number"),
    "mandatory marker": (one_entry("tp: ???"), 3, "strategies[0].tp", "'???' is not a whole number"),
    "interpolation": (one_entry("tp: ${model.tp}"), 3, "strategies[0].tp", "'${model.tp}' is not a whole number"),
    "list as value": (one_entry("tp: [1, 2]"), 3, "strategies[0].tp", "a list stands where a whole number is due"),
    "map as value": (one_entry("tp: {a: 1}"), 3, "strategies[0].tp", "a map stands where a whole number is due"),
    "several lines": (one_entry("tp: 1\n      2"), 3, "strategies[0].tp", "'1 2' is not a whole number"),
    "yes": ("strategies: []\ncheck_plans: yes\n", 2, "check_plans", "'yes' is not true or false"),
    "quoted truth": ("strategies: []\ncheck_plans: 'true'\n", 2, "check_plans", "without quotes"),
    # Colons without a space.
    "flow colon": (
        "strategies:\n  - {max_length: 8, tp: 2,pp:1}\n",
        2,
        "strategies[0].pp:1",
        "write 'pp: 1' with a space",
    ),
    "block colon": (one_entry("tp:2"), 3, "syntax", "a colon needs a space after it"),
    "value colon": (one_entry("tp: pp:1"), 3, "strategies[0].tp", "write 'pp: 1' with a space after the colon"),
    "entry colon": ("strategies:\n  - max_length:8\n", 2, "strategies[0]", "write 'max_length: 8' with a space"),
    # Keys.
    "long name": (one_entry("tensor_parallel: 2"), 3, "strategies[0].tensor_parallel", "did you mean tp?"),
    "size name": (one_entry("tp_size: 2"), 3, "strategies[0].tp_size", "did you mean tp?"),
    "megatron name": (one_entry("pipeline-model-parallel-size: 2"), 3, "strategies[0].pipeline-m", "did you mean pp?"),
    "capitals": (one_entry("TP: 2"), 3, "strategies[0].TP", "did you mean tp?"),
    "typo": ("strategys: []\n", 1, "strategys", "did you mean strategies?"),
    "nothing near": ("strategies: []\nzzz: 1\n", 2, "zzz", "valid keys: strategies, home, samples, overlong,"),
    "dp": (one_entry("dp: 2"), 3, "strategies[0].dp", "follows from the world"),
    "home's dp": ("strategies: []\nhome: {dp: 2}\n", 2, "home.dp", "unknown key 'dp'; did you mean"),
    "home's layers without full": (
        "strategies: []\nhome:\n  recompute: selective\n  recompute_layers: 2\n",
        4,
        "home.recompute_layers",
        "recompute is selective; write 'recompute: full' or remove it",
    ),
    "duplicate": (one_entry("tp: 1\n    tp: 2"), 4, "strategies[0].tp", "stands twice, first in line 3"),
    "duplicate top key": ("strategies: []\nstrategies: []\n", 2, "strategies", "stands twice, first in line 1"),
    "empty key": ("strategies: []\n'': 1\n", 2, "file", "unknown key ''"),
    "list as key": ("strategies: []\n? [a]\n: 1\n", 2, "strategies", "stands where a key is due"),
    "no max_length": ("strategies:\n  - {tp: 2}\n", 2, "strategies[0]", "max_length is missing"),
    # Structure.
    "empty": ("", 1, "strategies", "the file holds no keys; write at least 'strategies: []'"),
    "comments only": ("# nothing\n# here\n", 1, "strategies", "the file holds no keys"),
    "no strategies": ("\noverlong: split\n", 2, "strategies", "the key is missing"),
    "strategies null": ("strategies:\n", 1, "strategies", "nothing stands where a list is due; write []"),
    "strategies map": ("strategies: {tp: 1}\n", 1, "strategies", "a map stands where a list is due"),
    "list on top": ("- max_length: 8\n", 1, "file", "a list stands where a map is due; write strategies:"),
    "text on top": ("hello\n", 1, "file", "the text 'hello' stands where a map is due"),
    "entry null": ("strategies:\n  -\n", 2, "strategies[0]", "nothing stands where a map is due"),
    "entry list": ("strategies:\n  - [1, 4, 2]\n", 2, "strategies[0]", "a list stands where a map is due"),
    "home number": ("strategies: []\nhome: 4096\n", 2, "home", "the text '4096' stands where a map is due"),
    "tab": ("strategies:\n\t- max_length: 8\n", 2, "syntax", "a tab stands where YAML allows only spaces"),
    "tab after colon": ("strategies:\t[]\n", 1, "syntax", "a tab stands where"),
    "unclosed": ("strategies: [\n", 2, "syntax", "not valid YAML"),
    "bad indent": ("strategies: []\n overlong: split\n", 2, "syntax", "not valid YAML"),
    "two documents": ("strategies: []\n---\nstrategies: []\n", 2, "syntax", "a second document starts here"),
    "anchor": ("strategies: &a []\n", 1, "syntax", "anchors and aliases are not read"),
    "alias": ("strategies: *a\n", 1, "syntax", "anchors and aliases are not read"),
    "tag": ("strategies:\n  - max_length: !!int 8\n", 2, "syntax", "is not read; remove it"),
    "python tag": ("strategies: !!python/object/apply:os.getcwd []\n", 1, "syntax", "is not read; remove it"),
    "deep": (f"strategies: []\nhome:\n  {'[' * 5000}\n", 3, "syntax", f"nested more than {DEPTH_LIMIT} deep"),
    "latin-1": (b"strategies: []\n# caf\xe9\n", 2, "syntax", "byte 0xe9 is not UTF-8"),
    "utf-16": ("strategies: []\n".encode("utf-16"), 1, "syntax", "byte 0xff is not UTF-8"),
    "control character": ("strategies: []\n# \x00\n", 2, "syntax", "character 0x0 is not allowed"),
    "newline in key": ('strategies: []\n"a\\nb": 1\n', 2, "a\\nb", "unknown key 'a\\nb'"),
    # Lengths and budgets.
    "equal lengths": (
        "strategies:\n  - max_length: 8\n  - max_length: 8\n",
        3,
        "strategies[1].max_length",
        "8 is not above 8",
    ),
    "descending": (
        "strategies:\n  - max_length: 9\n  - max_length: 8\n",
        3,
        "strategies[1].max_length",
        "8 is not above 9",
    ),
    "small budget": (
        one_entry("tokens_per_microbatch: 511"),
        3,
        "strategies[0].tokens_per_microbatch",
        "write 512 or more",
    ),
    # Choices and names.
    "other samples": (
        "strategies: []\nsamples: rows\n",
        2,
        "samples",
        "'rows' is not known; write documents",
    ),
    "null samples": ("strategies: []\nsamples:\n", 2, "samples", "has no value; write documents"),
    "other overlong": (
        "strategies: []\noverlong: cut\n",
        2,
        "overlong",
        "'cut' is not known; write split or error or truncate or drop",
    ),
    "batch without module": (
        "strategies: []\nget_batch: get_batch\n",
        2,
        "get_batch",
        "write pkg.mod:function or null",
    ),
    "switch as a list": ("strategies: []\nswitch: []\n", 2, "switch", "a list stands where a map is due"),
    "switch key": (
        "strategies: []\nswitch:\n  chunk: 256\n",
        3,
        "switch.chunk",
        "unknown key 'chunk'; did you mean chunk_mb?",
    ),
    "no such precision": (
        "strategies: []\nswitch: {fold_dtype: fp16}\n",
        2,
        "switch.fold_dtype",
        "'fp16' is not known; write main_grad or bf16",
    ),
    "no chunk": ("strategies: []\nswitch: {chunk_mb: 0}\n", 2, "switch.chunk_mb", "0 is less than 1"),
    "half a chunk": ("strategies: []\nswitch: {chunk_mb: 0.5}\n", 2, "switch.chunk_mb", "'0.5' is not a whole number"),
    "prefetch as a truth": (
        "strategies: []\nswitch: {prefetch: true}\n",
        2,
        "switch.prefetch",
        "'true' is not known; write auto or always or never",
    ),
    "other transport": (
        "strategies: []\nswitch: {transport: mpi}\n",
        2,
        "switch.transport",
        "'mpi' is not known; write auto or nccl or gloo",
    ),
    "group limit": (
        "strategies: []\nswitch: {max_group_mb: none}\n",
        2,
        "switch.max_group_mb",
        "'none' is not a whole",
    ),
    "merge": ("strategies: []\nmerge: always\n", 2, "merge", "auto"),
    "batch path": ("strategies: []\nget_batch: a/b.py:f\n", 2, "get_batch", "write pkg.mod:function or null"),
}
for _often in ("-1", "1.5", "yes", '"10"', "9999999999"):
    BAD[f"watchdog_s {_often}"] = (f"strategies: []\nwatchdog_s: {_often}\n", 2, "watchdog_s", "write ")
BAD["untested"] = (
    "strategies: []\nallow_untested: [fp16]\n",
    2,
    "allow_untested[0]",
    "'fp16' is not known; write fp8 or megatron",
)
for _often in ("-1", "1.5", "yes", '"10"', "9999999999"):
    BAD[f"verify_every {_often}"] = (f"strategies: []\nverify_every: {_often}\n", 2, "verify_every", "write ")
BAD["untested alone"] = ("strategies: []\nallow_untested: fp8\n", 2, "allow_untested", "where a list is due")
for _folder in ("/tmp/a", "../a", "a/../../b", "~/a", ".", '""'):
    BAD[f"trace {_folder}"] = (f"strategies: []\ntrace: {_folder}\n", 2, "trace", "write a ")
BAD["trace map"] = ("strategies: []\ntrace: {folder: a}\n", 2, "trace", "write a single value")
BAD["ep"] = (one_entry("ep: 1"), 3, "strategies[0].ep", "is not available in this version")
BAD["recompute"] = (one_entry("recompute: some"), 3, "strategies[0].recompute", "none or selective or full")
BAD["recompute layers"] = (
    one_entry("recompute: selective\n    recompute_layers: 2"), 4, "strategies[0].recompute_layers", "write 'recompute: full'"
)  # fmt: skip
BAD["no recompute layers"] = (
    one_entry("recompute: full\n    recompute_layers: 0"), 4, "strategies[0].recompute_layers", "at least 1"
)  # fmt: skip


def test_a_folder_for_timelines_is_read(tmp_path: Path) -> None:
    texts = ("", "trace: null\n", "trace: runs/a\n")
    configs = [load_config(write(tmp_path, f"strategies: []\n{text}")) for text in texts]
    assert [each.trace for each in configs] == [None, None, "runs/a"]
    assert configs[0].digest() == configs[1].digest() != configs[2].digest()


def test_steps_between_self_checks_are_read(tmp_path: Path) -> None:
    texts = ("", "verify_every: null\n", "verify_every: 0\n", "verify_every: 500\n")
    configs = [load_config(write(tmp_path, f"strategies: []\n{text}")) for text in texts]
    assert [each.verify_every for each in configs] == [None, None, None, 500]
    assert configs[0].digest() == configs[2].digest() != configs[3].digest()


def test_when_the_watchdog_speaks_is_read(tmp_path: Path) -> None:
    texts = ("", "watchdog_s: null\n", "watchdog_s: 0\n", "watchdog_s: 120\n")
    configs = [load_config(write(tmp_path, f"strategies: []\n{text}")) for text in texts]
    assert [each.watchdog_s for each in configs] == [120, None, None, 120]
    assert [each.watchdog_line for each in configs] == [None, 2, 2, 2]
    assert configs[0].digest() == configs[3].digest() != configs[1].digest()


def test_how_a_strategy_recomputes_and_interleaves_is_read(tmp_path: Path) -> None:
    text = """\
strategies:
  - {max_length: 8, recompute: none}
  - {max_length: 16, pp: 2, vpp: 3, recompute: full, recompute_layers: 2}
  - {max_length: 32, recompute: selective}
"""
    first, second, third = load_config(write(tmp_path, text)).strategies
    assert first.recompute == Recompute(granularity="none") and first.vpp is None
    assert second.recompute == Recompute(granularity="full", layers=2) and second.vpp == 3
    assert third.recompute == Recompute(granularity="selective")


def test_how_switches_move_is_read_and_told_apart(tmp_path: Path) -> None:
    text = "strategies: []\nswitch: {chunk_mb: 64, prefetch: never, transport: gloo, max_group_mb: 2048, fold_dtype: bf16}\n"
    read = load_config(write(tmp_path, text))
    assert read.switch == SwitchConfig(
        chunk_mb=64, prefetch="never", transport="gloo", max_group_mb=2048, fold_dtype="bf16"
    )
    # Half of fp32, and never more than main_grad itself.
    assert [read.switch.fold_itemsize(size) for size in (8, 4, 2)] == [2, 2, 2]
    assert [SwitchConfig().fold_itemsize(size) for size in (8, 4, 2)] == [8, 4, 2]
    unlimited = load_config(write(tmp_path, "strategies: []\nswitch: {max_group_mb: null}\n"))
    assert unlimited.switch == load_config(write(tmp_path, "strategies: []\n")).switch == SwitchConfig()
    assert read.digest() != unlimited.digest() and read != unlimited


@pytest.mark.parametrize(("text", "line", "key", "message"), BAD.values(), ids=BAD)
def test_every_mistake_is_one_line_with_its_place(
    tmp_path: Path, text: str | bytes, line: int, key: str, message: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    said = str(error.value)
    assert said.startswith(f"{path}:{line}: {key}")
    assert message in said
    assert len(said.splitlines()) == 1
    assert len(said) < len(str(path)) + 300


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir()], ids=["missing", "folder"])
def test_a_file_that_cannot_be_read(tmp_path: Path, make: Any) -> None:
    path = tmp_path / "hotspa.yaml"
    make(path)
    with pytest.raises(
        ConfigError, match=r"hotspa.yaml: file: cannot be read \((No such file|Is a directory).*check the path"
    ):
        load_config(path)


def test_a_file_without_end() -> None:
    with pytest.raises(ConfigError, match=f"file: is larger than {SIZE_LIMIT} bytes"):
        load_config("/dev/zero")


@settings(deadline=None)
@given(st.text(alphabet=" \t\n-:[]{},'\"#&*!|>?%@`ab12~\r\x85\u2028", max_size=60))
def test_no_text_gets_past_with_another_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = write(tmp_path_factory.getbasetemp(), text)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert len(str(error.value).splitlines()) == 1


@settings(deadline=None)
@given(st.integers(1, 2**31 - 1))
def test_decimal_numbers_are_read_as_written(tmp_path_factory: pytest.TempPathFactory, number: int) -> None:
    path = write(tmp_path_factory.getbasetemp(), f"strategies: [{{max_length: {number}}}]")
    assert load_config(path).strategies[0].max_length == number


def test_digest_follows_the_contents_and_nothing_else(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD))
    (tmp_path / "b").mkdir()
    moved = load_config(write(tmp_path / "b", "# another comment\n" + GOOD.replace("tp: 1\n", "tp: 1\n    cp: 1\n")))
    assert moved == config and moved.digest() == config.digest()
    digests = {config.digest()}
    for field in dataclasses.fields(HotSPaConfig):
        changed: dict[str, Any] = {
            "strategies": config.strategies[:1],
            "home_tokens_per_microbatch": None,
            "home_sizes": (("vpp", 2),),
            "home_recompute": Recompute(granularity="none"),
            "overlong": "split",
            "merge": "auto",
            "check_plans": True,
            "get_batch": None,
            "allow_untested": ("fp8",),
        }
        if field.name in changed:
            digests.add(dataclasses.replace(config, **{field.name: changed[field.name]}).digest())
    for name in ("max_length", "tp", "cp", "pp", "vpp", "tokens_per_microbatch", "recompute"):
        changes: dict[str, Any] = {name: 77 if name != "recompute" else Recompute(granularity="full", layers=1)}
        entry = dataclasses.replace(config.strategies[0], **changes)
        digests.add(dataclasses.replace(config, strategies=(entry, *config.strategies[1:])).digest())
    assert len(digests) == 17


def resolved(tmp_path: Path, text: str, *, home: Strategy = HOME, **changes: Any) -> ResolvedConfig:
    return resolve(load_config(write(tmp_path, text)), shape=dataclasses.replace(SHAPE, **changes), home=home)


def test_resolve(tmp_path: Path) -> None:
    text = """\
strategies:
  - {max_length: 509, tp: 1}
  - {max_length: 1021, tp: 2, cp: 2}
  - {max_length: 2048, tp: 4}
  - {max_length: 4096, tp: 2, pp: 2, tokens_per_microbatch: 9000}
"""
    config = resolved(tmp_path, text)
    assert [str(each.strategy) for each in config.strategies] == [
        "tp1-cp1-pp1-dp8",
        "tp2-cp2-pp1-dp2",
        "tp4-cp1-pp1-dp2",
        "tp2-cp1-pp2-dp2",
    ]
    assert [each.kind for each in config.strategies] == [Kind.GUEST, Kind.GUEST, Kind.SIBLING, Kind.GUEST]
    assert [each.tokens_per_microbatch for each in config.strategies] == [509, 1024, 2048, 9000]
    assert config.strategies[1].alignment == Alignment(sequence=4, total=4)
    assert config.strategies[3].layers == (range(6), range(6, 12))
    assert (config.home.strategy, config.home.kind, config.home.max_length) == (HOME, Kind.HOME, 4096)
    assert config.home.tokens_per_microbatch == 4096


def test_only_home_and_siblings_keep_the_uneven_split(tmp_path: Path) -> None:
    home = Strategy(tp=1, cp=2, pp=4, dp=1)
    text = "strategies: [{max_length: 8, pp: 4}, {max_length: 16, pp: 4, tp: 2}]"
    config = resolved(tmp_path, text, home=home, layers_in_first_stage=3)
    uneven = (range(3), range(3, 6), range(6, 9), range(9, 12))
    assert config.home.layers == config.strategies[0].layers == uneven
    config = resolved(tmp_path, text, home=home, num_layers=16, layers_in_first_stage=1)
    assert [len(stage) for stage in config.strategies[0].layers] == [1, 5, 5, 5]
    assert [len(stage) for stage in config.strategies[1].layers] == [4, 4, 4, 4]


def test_virtual_stages_are_homes_where_its_pipeline_is(tmp_path: Path) -> None:
    home = Strategy(tp=1, cp=2, pp=2, dp=2, vpp=3)
    text = "strategies: [{max_length: 8, pp: 2}, {max_length: 16, pp: 2, vpp: 1}, {max_length: 32, pp: 4}]"
    config = resolved(tmp_path, text, home=home)
    assert [(each.strategy.vpp, each.kind) for each in config.strategies] == [
        (3, Kind.SIBLING),
        (1, Kind.GUEST),
        (1, Kind.GUEST),
    ]
    assert config.home.layers == config.strategies[0].layers == tuple(range(low, low + 2) for low in range(0, 12, 2))
    assert config.home.stages == ((0, 1, 4, 5, 8, 9), (2, 3, 6, 7, 10, 11))


IMPOSSIBLE: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "heads": ("tp: 8", {}, ":3: strategies[0].tp: ", "12 attention heads do not divide over tp 8; legal tp: 1, 2, 4"),
    "groups": (
        "tp: 4",
        {"num_query_groups": 6},
        ":3: strategies[0].tp: ",
        "6 query groups neither divide over tp 4 nor divide it; legal tp: 1, 2",
    ),
    "ffn": ("tp: 4", {"ffn_hidden_size": 50}, ":3: strategies[0].tp: ", "ffn_hidden_size 50 does not divide over tp 4"),
    "hidden": ("tp: 4", {"hidden_size": 98}, ":3: strategies[0].tp: ", "hidden_size 98 does not divide over tp 4"),
    "fused qkv": (
        "tp: 4",
        {"num_query_groups": 1, "kv_channels": 3},
        ":3: strategies[0].tp: ",
        "the 42 rows of the fused QKV do not divide over tp 4",
    ),
    "vocabulary": (
        "tp: 4",
        {"padded_vocab_size": 1026},
        ":3: strategies[0].tp: ",
        "vocabulary of 1026 does not divide over tp 4; give Megatron --make-vocab-size-divisible-by 128",
    ),
    "layers": ("pp: 8", {}, ":3: strategies[0].pp: ", "over pp 8 stages; legal pp: 1, 2, 3, 4, 6, 12"),
    "world of 8": ("tp: 3", {}, ":2: strategies[0]: ", "legal tp * cp * pp: 1, 2, 4, 8"),
    "larger than the world": (
        "cp: 16",
        {},
        ":2: strategies[0]: ",
        "cp 16 * pp 1 = 16 ranks; legal tp * cp * pp: 1, 2, 4, 8",
    ),
    "virtual stages": (
        "pp: 2\n    vpp: 4",
        {},
        ":4: strategies[0].vpp: ",
        "12 layers do not divide over 4 virtual stages of pp 2; legal vpp: 1, 2, 3, 6",
    ),
    "virtual stages without a pipeline": (
        "vpp: 2",
        {},
        ":3: strategies[0].vpp: ",
        "need a pipeline, but pp is 1; remove vpp",
    ),
    "layers of virtual stages": ("pp: 8\n    vpp: 2", {}, ":3: strategies[0].pp: ", "legal pp: 1, 2, 3, 4, 6, 12"),
    "recomputed layers": (
        "pp: 2\n    vpp: 3\n    recompute: full\n    recompute_layers: 3",
        {},
        ":6: strategies[0].recompute_layers: ",
        "3 is more than the 2 layers of a stage of tp1-cp1-pp2-dp4-vpp3",
    ),
    "too long by one": (
        "tp: 1",
        {"seq_length": 511},
        ":2: strategies[0].max_length: ",
        "512 is longer than --seq-length 511",
    ),
    "padded over the budget": (
        "cp: 8\n    tokens_per_microbatch: 513",
        {},
        ":4: strategies[0].tokens_per_microbatch: ",
        "513 cannot hold one sequence of max_length 513",
    ),
}


@pytest.mark.parametrize(("entry", "changes", "place", "message"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_strategy_that_does_not_fit_is_refused_with_what_would(
    tmp_path: Path, entry: str, changes: dict[str, Any], place: str, message: str
) -> None:
    text = one_entry(entry)
    if "513" in entry:
        text = text.replace("512", "513")
    home = Strategy(tp=1, cp=1, pp=1, dp=8)
    with pytest.raises(ConfigError) as error:
        resolved(tmp_path, text, home=home, **changes)
    said = str(error.value)
    assert said.startswith(f"{tmp_path / 'hotspa.yaml'}{place}")
    assert message in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("home", "changes", "text", "message"),
    [
        ("tp8-cp1-pp1-dp1", {}, "", "command line: --tensor-model-parallel-size: 12 attention heads do not"),
        ("tp4-cp1-pp1-dp1", {"padded_vocab_size": 6}, "", "command line: --tensor-model-parallel-size: the padded"),
        ("tp1-cp1-pp8-dp1", {}, "", "command line: --pipeline-model-parallel-size: 12 layers do not divide"),
        ("tp1-cp1-pp1-dp8", {"layers_in_last_stage": 2}, "", "have no meaning at pp 1; remove them"),
        (
            "tp4-cp1-pp1-dp1",
            {},
            "home: {tokens_per_microbatch: 4095}",
            ":2: home.tokens_per_microbatch: 4095 cannot hold",
        ),
    ],
)
def test_home_that_does_not_fit(tmp_path: Path, home: str, changes: dict[str, Any], text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolved(tmp_path, f"strategies: []\n{text}\n", home=Strategy.parse(home), **changes)
    assert message in str(error.value)


def test_vocabulary_fix_serves_every_strategy(tmp_path: Path) -> None:
    text = "strategies: [{max_length: 8, tp: 3}, {max_length: 9, tp: 4}]"
    home = Strategy(tp=2, cp=1, pp=1, dp=6)
    with pytest.raises(ConfigError, match="--make-vocab-size-divisible-by 384"):
        resolved(tmp_path, text, home=home)
    resolved(tmp_path, text, home=home, padded_vocab_size=2 * 384)


@settings(deadline=None)
@given(
    heads=st.integers(1, 24),
    groups=st.integers(1, 24),
    channels=st.integers(1, 8),
    ffn=st.integers(1, 96),
    hidden=st.integers(1, 96),
    sequence_parallel=st.booleans(),
)
def test_legal_tps_are_what_the_rules_allow(
    heads: int, groups: int, channels: int, ffn: int, hidden: int, sequence_parallel: bool
) -> None:
    shape = dataclasses.replace(
        SHAPE,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=channels,
        ffn_hidden_size=ffn,
        hidden_size=hidden,
        sequence_parallel=sequence_parallel,
    )
    legal = legal_tps(shape, ranks=16)
    assert legal[0] == 1
    for tp in (1, 2, 4, 8, 16):
        fits = (
            heads % tp == 0
            and (groups % tp == 0 or tp % groups == 0)
            and ((heads + 2 * groups) * channels) % tp == 0
            and ffn % tp == 0
            and (hidden % tp == 0 or not sequence_parallel)
        )
        assert (tp in legal) == fits == (tp_problem(shape, tp) is None)


def test_a_file_made_for_another_home_is_refused_with_the_flags_to_give(tmp_path: Path) -> None:
    """Under another home its siblings would be guests, and its budgets more than fits."""
    plain = load_config(write(tmp_path, "strategies: []\n")).digest()
    path = write(tmp_path, "strategies: []\nhome: {tp: 1, cp: 8, pp: 1}\n")
    made_for = Strategy.from_world(8, tp=1, cp=8, pp=1)
    assert resolve(load_config(path), shape=SHAPE, home=made_for).home.strategy == made_for
    with pytest.raises(ConfigError) as caught:
        resolve(load_config(path), shape=SHAPE, home=Strategy.from_world(8, tp=1, cp=4, pp=1))
    said = str(caught.value)
    assert said.startswith(
        f"{path}:2: home.cp: the file was made for a home of cp 8, but the command line's is tp1-cp4-pp1-dp2"
    )
    assert "--tensor-model-parallel-size 1 --context-parallel-size 8 --pipeline-model-parallel-size 1" in said
    assert load_config(path).digest() != plain


PINNED = """\
strategies: []
home: {tp: 4, cp: 1, pp: 2, vpp: 3, recompute: full, recompute_layers: 1}
"""
PINNED_HOME = Strategy(tp=4, cp=1, pp=2, dp=1, vpp=3)
SIZES = "--tensor-model-parallel-size 4 --context-parallel-size 1 --pipeline-model-parallel-size 2"
VIRTUAL = "--num-virtual-stages-per-pipeline-rank 3"
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"


def refused_home(tmp_path: Path, text: str, home: Strategy, recompute: Recompute) -> str:
    config = load_config(write(tmp_path, text))
    with pytest.raises(ConfigError) as caught:
        resolve(config, shape=SHAPE, home=home, recompute=recompute)
    said = str(caught.value)
    assert len(said.splitlines()) == 1
    return said.removeprefix(f"{tmp_path / 'hotspa.yaml'}:2: ").removesuffix(
        ", or have the file made anew for this home (hotspa plan --keep-home)"
    )


def full(layers: int | None = None) -> Recompute:
    return Recompute(granularity="full", layers=layers)


NONE, SELECTIVE = Recompute(granularity="none"), Recompute(granularity="selective")


@pytest.mark.parametrize(
    ("home", "recompute", "said"),
    [
        (
            "tp4-cp1-pp2-dp1",
            full(1),
            (
                "home.vpp: the file was made for a home of vpp 3, but the command line's is tp4-cp1-pp2-dp1; "
                f"give Megatron {SIZES} {VIRTUAL}"
            ),
        ),
        (
            "tp4-cp1-pp2-dp1-vpp2",
            full(1),
            (
                "home.vpp: the file was made for a home of vpp 3, but the command line's is tp4-cp1-pp2-dp1-vpp2; "
                f"give Megatron {SIZES} {VIRTUAL} and remove --num-layers-per-virtual-pipeline-stage"
            ),
        ),
        (
            "tp4-cp1-pp2-dp1-vpp3",
            NONE,
            (
                "home.recompute: the file was made for a home of recompute full of 1 layers, but the command line's is "
                f"tp4-cp1-pp2-dp1-vpp3 recompute none; give Megatron {SIZES} {VIRTUAL} {BLOCK} and remove "
                "--num-layers-per-virtual-pipeline-stage"
            ),
        ),
        (
            "tp4-cp1-pp2-dp1-vpp3",
            full(),
            (
                "home.recompute: the file was made for a home of recompute full of 1 layers, but the command line's is "
                f"tp4-cp1-pp2-dp1-vpp3 recompute full; give Megatron {SIZES} {VIRTUAL} {BLOCK} and remove "
                "--num-layers-per-virtual-pipeline-stage"
            ),
        ),
        (
            "tp2-cp1-pp2-dp2",
            SELECTIVE,
            (
                "home.tp: the file was made for a home of tp 4, vpp 3, recompute full of 1 layers, but the command line's is "
                f"tp2-cp1-pp2-dp2 recompute selective; give Megatron {SIZES} {VIRTUAL} {BLOCK} and remove --recompute-activations"
            ),
        ),
    ],
)
def test_a_file_is_for_the_virtual_stages_and_the_recomputation_of_its_home(
    tmp_path: Path, home: str, recompute: Recompute, said: str
) -> None:
    """Other virtual stages make guests of home's siblings; without its recomputation home's budget does not fit."""
    path = write(tmp_path, PINNED)
    assert resolve(load_config(path), shape=SHAPE, home=PINNED_HOME, recompute=full(1)).home.strategy == PINNED_HOME
    assert refused_home(tmp_path, PINNED, Strategy.parse(home), recompute) == said


@pytest.mark.parametrize(
    ("text", "home", "recompute", "change"),
    [
        ("recompute: none", "tp4-cp1-pp2-dp1", full(), ("remove --recompute-granularity --recompute-method "
         "--recompute-num-layers")),
        ("recompute: none", "tp4-cp1-pp2-dp1", SELECTIVE, "remove --recompute-granularity --recompute-activations"),
        ("recompute: selective", "tp4-cp1-pp2-dp1", full(2), ("give Megatron --recompute-granularity selective and remove "
         "--recompute-method --recompute-num-layers")),
        ("vpp: 1", "tp4-cp1-pp2-dp1-vpp3", NONE, ("remove --num-virtual-stages-per-pipeline-rank "
         "--num-layers-per-virtual-pipeline-stage")),
        ("pp: 1", "tp4-cp1-pp2-dp1-vpp3", NONE, ("give Megatron --pipeline-model-parallel-size 1 and remove "
         "--num-virtual-stages-per-pipeline-rank --num-layers-per-virtual-pipeline-stage")),
    ],
)  # fmt: skip
def test_flags_that_make_another_home_are_to_be_removed(
    tmp_path: Path, text: str, home: str, recompute: Recompute, change: str
) -> None:
    said = refused_home(tmp_path, f"strategies: []\nhome: {{{text}}}\n", Strategy.parse(home), recompute)
    assert said.split("; ")[1] == change


def test_a_file_that_leaves_home_out_is_for_any(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "strategies: []\nhome: {tp: 4, cp: 1, pp: 2}\n"))
    for vpp, recompute in ((1, NONE), (3, full()), (2, SELECTIVE)):
        home = Strategy(tp=4, cp=1, pp=2, dp=1, vpp=vpp)
        assert resolve(config, shape=SHAPE, home=home, recompute=recompute).home.strategy == home
