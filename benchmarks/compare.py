"""Plain, sequential, overlapped and automatic decoding of the same prompts, interleaved.

    python benchmarks/compare.py TARGET DRAFTER --json out.json
        [--requests 1 2 4 8 16] [--drafts 1 2 4] [--tokens 32] [--repetitions 3] [--settle 20]

Three engines stay loaded: stock vLLM on all cores, stock vLLM on the target's cores alone, and
MineDraft with the target on all cores but the last, where the drafter is. Before anything is
measured `auto` decodes each number of requests for --settle seconds, as a server that has run for a
while has. Every repetition runs all settings once, in turn, so that a machine
whose speed drifts slows all of them alike; ratios are taken within a repetition. For each setting
the report holds V (model time of a decode step), t (drafter time of a round), and what they say:
at N requests two halves win iff 2 max(V(N/2), t(N/2)) < V(N) + t(N).
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

PROMPTS = (
    "Explain how a bicycle stays upright.",
    "Write a short poem about the sea.",
    "List five uses of a paper clip.",
    "What is the difference between weather and climate?",
    "Describe a day in the life of a baker.",
    "How do I boil an egg?",
    "Why do leaves change colour in autumn?",
    "Give me advice for a first job interview.",
)
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "enable_prefix_caching": False,
}
STOCK = ("plain", "plain, target's cores")
DRAFTER_ARGS = "--dtype float32 --max-model-len 1024 --no-enable-prefix-caching"


class Runner:
    """A process that holds one engine and runs what it is told."""

    def __init__(self, job: dict[str, Any], threads: int) -> None:
        from minedraft import devices

        cores = tuple(sorted(devices.available_cores()))
        environment = os.environ | devices.cpu_environment(cores)
        environment |= {"OMP_NUM_THREADS": str(threads), "VLLM_LOGGING_LEVEL": "ERROR"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, **setting: Any) -> dict[str, Any]:
        """The result of one run."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(setting) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise SystemExit("an engine ended; see its messages above")

    def stop(self) -> None:
        """Ends the engine."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(30)


def serve(job: dict[str, Any]) -> None:
    """The process of a Runner."""
    from vllm import SamplingParams

    from minedraft.llm import LLM
    from minedraft.verifier.stats import Stats

    llm = LLM(job["target"], **job["options"], **ENGINE)
    tokenizer = llm.get_tokenizer()
    ids = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in PROMPTS
    ]
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    for line in sys.stdin:
        setting = json.loads(line)
        drafted = setting["mode"] not in STOCK
        if drafted:
            scheduler._modes.most_drafts = setting.get("drafts", 0)
            scheduler._modes.setting = setting["mode"]
            scheduler._stats = stats = Stats()
            busy, waited = (
                scheduler._client.counters.drafter_busy_s,
                scheduler._client.counters.waited_s,
            )
        params = SamplingParams(temperature=0, max_tokens=setting["tokens"], ignore_eos=True)
        outputs, steps = {}, []
        started = time.perf_counter()
        for index in range(setting["requests"]):
            prompt = {"prompt_token_ids": ids[index % len(ids)]}
            engine.add_request(str(index), prompt, params)
        while engine.has_unfinished_requests():
            step = time.perf_counter()
            for output in engine.step():
                outputs[int(output.request_id)] = list(output.outputs[0].token_ids)
            steps.append(time.perf_counter() - step)
        result: dict[str, Any] = {"seconds": time.perf_counter() - started}
        result["token_ids"] = [outputs[i] for i in range(setting["requests"])]
        if drafted:
            counters = scheduler._client.counters
            rounds = max(1, stats.decode_steps)
            result["verify_s"] = stats.decode_model_s / rounds
            result["rows"] = stats.decode_rows / rounds
            result["draft_s"] = (counters.drafter_busy_s - busy) / rounds
            result["waited_s"] = counters.waited_s - waited
            result["busy_s"] = counters.drafter_busy_s - busy
            result["tokens_per_verification"] = stats.emitted / max(1, stats.verifications)
            result["steps_by_mode"] = stats.steps_by_mode
            result["choice"] = str(scheduler._modes.choice)
        else:
            result["verify_s"] = statistics.median(steps)
        print(json.dumps(result), flush=True)


def provenance() -> dict[str, Any]:
    """What one needs to know to repeat the run."""
    import minedraft
    from minedraft.verifier import contract

    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return {
        "command": sys.argv,
        "versions": {
            "minedraft": minedraft.__version__,
            "torch": version("torch"),
            "vllm": str(contract.installed_version()),
        },
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg(),
        "git": git.stdout.strip(),
    }


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All settings of all repetitions, interleaved."""
    from minedraft import devices
    from minedraft.placement import format_cores, place_on_cpu

    placement = place_on_cpu(devices.available_cores())
    every = tuple(sorted({*placement.target_cores, *placement.drafter_cores}))
    most = max(options.drafts)
    job = {"target": options.target}
    plain = {"mode": "off", "target_cores": format_cores(every)}
    alone = {"mode": "off", "target_cores": format_cores(placement.target_cores)}
    drafted = {
        "draft_model": options.drafter,
        "drafter_args": DRAFTER_ARGS,
        "num_speculative_tokens": most,
        "wait_for_first_drafts": True,
    }
    runners = {
        "plain": Runner({**job, "options": plain}, len(every)),
        STOCK[1]: Runner({**job, "options": alone}, len(placement.target_cores)),
        "drafted": Runner({**job, "options": drafted}, len(placement.target_cores)),
    }
    settings: list[dict[str, Any]] = []
    for requests in options.requests:
        settings += [{"mode": mode, "requests": requests} for mode in (*STOCK, "auto")]
        for drafts in options.drafts:
            settings += [
                {"mode": mode, "requests": requests, "drafts": drafts}
                for mode in ("sequential", "overlap")
            ]
    for runner in runners.values():
        runner.run(mode="auto" if runner is runners["drafted"] else "plain", requests=2, tokens=8)
    for requests in options.requests:
        until = time.monotonic() + options.settle
        while time.monotonic() < until:
            result = runners["drafted"].run(mode="auto", requests=requests, tokens=options.tokens)
        say(f"settled at {requests}: {result['choice']}")
    rows = []
    for repetition in range(options.repetitions):
        for setting in settings:
            runner = runners.get(setting["mode"], runners["drafted"])
            result = runner.run(**setting, tokens=options.tokens)
            rows.append({"repetition": repetition, **setting, **result})
            say(f"{repetition} {setting}: {result['seconds']:.2f} s {result.get('choice', '')}")
    for runner in runners.values():
        runner.stop()
    return rows


def report(rows: list[dict[str, Any]]) -> None:
    """A table: medians over repetitions, ratios to plain within a repetition."""
    plain = {(r["repetition"], r["requests"]): r for r in rows if r["mode"] == "plain"}
    keys = sorted({(r["requests"], r.get("drafts", 0), r["mode"]) for r in rows})
    print(
        "  N  K  mode                   tokens/s  / plain (min..max)   V ms   t ms  rows  tok/ver "
        "hidden same"
    )
    medians: dict[tuple[int, int, str], dict[str, float]] = {}
    for key in keys:
        requests, drafts, mode = key
        mine = [r for r in rows if (r["requests"], r.get("drafts", 0), r["mode"]) == key]
        speed = [sum(map(len, r["token_ids"])) / r["seconds"] for r in mine]
        base = [plain[r["repetition"], requests] for r in mine]
        ratio = [p["seconds"] / r["seconds"] for p, r in zip(base, mine, strict=True)]
        same = all(p["token_ids"] == r["token_ids"] for p, r in zip(base, mine, strict=True))
        median = {
            name: statistics.median(r.get(name, 0.0) for r in mine)
            for name in ("verify_s", "draft_s", "rows", "tokens_per_verification")
        }
        medians[key] = median
        busy = sum(r.get("busy_s", 0.0) for r in mine)
        hidden = max(0.0, 1 - sum(r.get("waited_s", 0.0) for r in mine) / busy) if busy else 0.0
        print(
            f"{requests:3} {drafts:2}  {mode:21} {statistics.median(speed):9.1f} "
            f"{statistics.median(ratio):8.2f} ({min(ratio):.2f}..{max(ratio):.2f}) "
            f"{1000 * median['verify_s']:9.1f} {1000 * median['draft_s']:6.1f} "
            f"{median['rows']:5.1f} {median['tokens_per_verification']:7.2f} "
            f"{hidden:6.0%}  {'yes' if same else 'NO'}"
        )
    predict(rows, medians)


def predict(
    rows: list[dict[str, Any]], medians: dict[tuple[int, int, str], dict[str, float]]
) -> None:
    """The inequality against what was seen: sequential time over overlapped time."""
    print("\n  N  K  2max(V,t) of halves  V+t of all  predicted  seen (median)")
    for requests, drafts, mode in sorted(medians):
        if mode != "overlap":
            continue
        half, whole = medians[requests, drafts, mode], medians[requests, drafts, "sequential"]
        two = 2 * max(half["verify_s"], half["draft_s"])
        one = whole["verify_s"] + whole["draft_s"]
        times = {
            m: {
                r["repetition"]: r["seconds"]
                for r in rows
                if (r["requests"], r.get("drafts", 0), r["mode"]) == (requests, drafts, m)
            }
            for m in ("sequential", "overlap")
        }
        seen = [times["sequential"][i] / times["overlap"][i] for i in times["overlap"]]
        print(
            f"{requests:3} {drafts:2} {1000 * two:17.1f} {1000 * one:13.1f} {one / two:10.2f} "
            f"{statistics.median(seen):10.2f}"
        )


def main() -> None:
    """Runs the benchmark, or reports a result again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", nargs="?")
    parser.add_argument("drafter", nargs="?")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--settle", type=float, default=20.0, help="seconds")
    parser.add_argument("--json", type=Path, help="where to keep the result with its provenance")
    options = parser.parse_args()
    if options.serve:
        return serve(json.loads(options.serve))
    if options.drafter is None:
        parser.error("give a target and a drafter")
    before = provenance()
    rows = measure(options)
    if options.json:
        options.json.write_text(json.dumps({"provenance": before, "runs": rows}))
    report(rows)
    return None


if __name__ == "__main__":
    main()
