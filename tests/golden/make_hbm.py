"""Writes tests/golden/hbm.json, the memory of the shipped configs on TPUs and GPUs: python tests/golden/make_hbm.py
[PART]

Compiles all configs, two or three minutes each on two cores; with an argument only configs whose names contain it, such
as "large v5litepod" or "packed". Needs libtpu, for GPUs ("h100") jax[cuda12]. Review the difference before you commit
it: it shows the changes of memory.
"""

import hashlib
import importlib
import json
import pathlib
import sys

import jax

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
PATH = ROOT / "tests/golden/hbm.json"
TPUS = ("v4-8", "v5litepod-4", "v5litepod-16", "v6e-8")
NAMES = [
    *(f"{model} {tpu}" for model in ("base", "large", "base packed") for tpu in TPUS),
    "small:tiny v5litepod-16",  # a test compiles it again
    *(f"{model} {gpus}" for model in ("base", "large", "modern:150m") for gpus in ("h100-1", "h100-8")),
    "small:tiny h100-8",  # a test compiles it again
]
REAL_TOKENS = (0.92, 0.75)  # the share of Wikipedia's and books' sequences, see experiments/benchmarks/RESULTS.md


def load(name: str):
    """Returns the config of a row: that of experiments/large.py for "large v4-8"."""
    experiment, *packed, _ = name.split()
    experiment, _, argument = experiment.partition(":")
    config = importlib.import_module(f"experiments.{experiment}").get_config(*filter(None, [argument]))
    config.packing = packed == ["packed"]
    if experiment == "modern":  # 32,768 tokens of a GPU at a time
        gpus = target(name).chips
        for stage in config.stages.values():
            if stage is not None:
                stage.microbatches = 144 // gpus * round(stage.length / 1024)
    if argument == "tiny":
        config.model.vocab_size = 2048  # which halves the time to compile
    return config


def target(name: str):
    from bertjax.distributed.topology import accelerator

    return accelerator(name.split()[-1])


def measure(name: str, stages: list[int] | None = None) -> list[dict]:
    """Measures each stage, or some: MiB a chip, GFLOPs and estimated microseconds of a step."""
    from bertjax.planner.plan import plan

    config = load(name)
    shares = REAL_TOKENS if config.packing else ()
    return [row(name, p) for p in plan(config, target(name), stages, shares)]


def row(name: str, p) -> dict:
    return {
        "stage": p.stage,
        "config": fingerprint(name),
        "params_mib": p.params_bytes >> 20,
        "optimizer_mib": p.optimizer_bytes >> 20,
        "hbm_used_mib": p.hbm_used_bytes and p.hbm_used_bytes >> 20,
        "hbm_available_mib": p.hbm_available_bytes >> 20,
        "fits": p.fits,
        "remat": p.remat,
        "unroll": p.unroll,
        "gflops_per_step": p.flops_per_step // 10**9,
        "estimated_step_microseconds": p.fits and round(1e6 * p.estimated_step_seconds),
    }


def fingerprint(name: str) -> str:
    """Returns a hash of the inputs of the programs of a row; a row with another hash has to be measured again."""
    config = json.loads(load(name).to_json())
    config["stages"] = sorted(config["stages"].values(), key=lambda stage: stage["length"])
    fields = ("batch_size", "microbatches", "stages", "model", "dtype", "grad_dtype", "remat", "unroll", "mesh")
    used = [*(config[field] for field in fields), config["optimizer"]["name"], *[REAL_TOKENS] * config["packing"]]
    return hashlib.sha256(json.dumps(used, sort_keys=True).encode()).hexdigest()[:8]


def main(part: str = "") -> None:
    jax.config.update("jax_platforms", "cpu")
    table = json.loads(PATH.read_text()) if PATH.exists() else {}
    for name in NAMES:
        if part in name:
            table[name] = measure(name)
            print(name, table[name], flush=True)
            rows = (
                f' "{name}": [\n  ' + ",\n  ".join(map(json.dumps, table[name])) + "\n ]"
                for name in NAMES
                if name in table
            )
            PATH.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main(*sys.argv[1:2])
