"""Trains the same small GPT twice on the same documents: all under one strategy, and by length groups.

Exit code: 0 where both runs have the same losses, 1 where they have not, 2 where a run failed.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Final, NoReturn

from examples.demo import corpus, report, training
from hotspa_megatron.config import load_config

_SWITCH: Final = re.compile(r"\bswitch \S+ -> \S+: .*")
_RUN_LIMIT_S: Final = 900.0


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The demo's command line."""
    parser = argparse.ArgumentParser(prog="scripts/demo.sh", description=__doc__)
    parser.add_argument("--iterations", type=int, default=12, metavar="N", help="training steps of each run (12)")
    parser.add_argument("--batch", type=int, default=24, metavar="N", help="documents of one step (24)")
    parser.add_argument("--out", type=Path, default=Path("demo_out"), metavar="DIR", help="where files go (demo_out)")
    parser.add_argument("--config", type=Path, default=training.REPOSITORY / "examples" / "demo.yaml", metavar="FILE",
                        help="the length groups of the second run (examples/demo.yaml)")  # fmt: skip
    parser.add_argument("--break", dest="broken", choices=["fold"], metavar="fold",
                        help="drop the guests' gradients in the second run: the demo must then fail")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.iterations < 1 or options.batch < 1:
        parser.error("--iterations and --batch take numbers of at least 1")
    return options


def prepare(out: Path) -> Path:
    """Write the corpus and say what it is; returns its prefix."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").unlink(missing_ok=True)  # a report of another run must not outlive a failure of this one
    shutil.rmtree(out / "cache", ignore_errors=True)  # Megatron's index cache does not notice a changed corpus
    texts = list(corpus.documents(corpus.standard_library()))
    if not texts:
        raise RuntimeError(f"{corpus.standard_library()} holds no Python source to train on")
    facts = corpus.statistics_of(texts)
    print(
        f"corpus: {facts.documents:,} functions and classes of Python {platform.python_version()}'s standard library, "
        f"{facts.tokens / 1e6:.1f} M tokens; length: median {facts.median}, 95 % under {facts.percentile_95 + 1:,}, "
        f"longest {facts.longest:,}"
    )
    corpus.write(texts, out / "corpus")
    return out / "corpus"


def follow(
    name: str,
    *,
    options: argparse.Namespace,
    arguments: list[str],
    config: Path,
    static: tuple[report.Step, ...] | None,
) -> tuple[report.Step, ...]:
    """One run, its steps and switches printed as they happen; with ``static``, beside that run's."""
    out: Path = options.out
    steps_path, log = out / f"{name}.steps.jsonl", out / f"{name}.log"
    steps_path.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    steps: list[report.Step] = []
    command = training.command_line(arguments, config=config, broken=options.broken if static is not None else None)
    env = training.environment(step_log=steps_path)
    with training.started(command, env=env, log=log) as process:
        for index, line in training.lines_of(process, log, steps_path, limit_s=_RUN_LIMIT_S):
            if index == 0:
                switch = _SWITCH.search(line)
                if switch:
                    print(f"    {switch.group()}", flush=True)
                continue
            step = report.parse_step(line)
            beside = static[len(steps)] if static is not None and len(steps) < len(static) else None
            steps.append(step)
            print(report.step_line(step, total=options.iterations, static=beside), flush=True)
            if static is not None:
                print("\n".join(report.segment_lines(step)), flush=True)
    if process.returncode != 0 or len(steps) != options.iterations:
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        print("\n".join(f"    | {line}" for line in training.last_words(text)), file=sys.stderr)
        raise RuntimeError(
            f"the {name} run ended with code {process.returncode} after {len(steps)} of {options.iterations} steps; "
            f"its whole output is in {log}"
        )
    return tuple(steps)


def interrupt(*_: object) -> NoReturn:
    """Let a termination leave through the same doors as Ctrl-C."""
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; returns its exit code."""
    options = parse_arguments(arguments)
    options.out, options.config = options.out.resolve(), options.config.resolve()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    began = time.monotonic()
    try:
        load_config(options.config)  # a mistake in it is told now, not after the first run
        prefix = prepare(options.out)
        megatron = training.megatron_arguments(
            corpus=prefix, cache=options.out / "cache", iterations=options.iterations, batch=options.batch
        )
        static_config = training.REPOSITORY / "examples" / "static.yaml"
        print(
            f"\nrun 1, static: {training.RANKS} ranks, every sequence under the command line's tp 2, cp 2", flush=True
        )
        static = follow("static", options=options, arguments=megatron, config=static_config, static=None)
        print(f"\nrun 2, by length groups: {options.config}", flush=True)
        if options.broken:
            print(f"  broken on purpose: {options.broken}")
        hotspa = follow("hotspa", options=options, arguments=megatron, config=options.config, static=static)
        comparison = report.compare(static, hotspa, broken=options.broken)
        report.write_report(comparison, options.out / "report.json")
    except KeyboardInterrupt:
        print("\ninterrupted; all processes have been ended", file=sys.stderr)
        return 130
    except (ValueError, RuntimeError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    print()
    print("\n".join(report.summary_lines(comparison)))
    print(f"report: {options.out / 'report.json'} ({time.monotonic() - began:.0f} s)")
    return report.exit_code(comparison)


if __name__ == "__main__":
    sys.exit(main())
