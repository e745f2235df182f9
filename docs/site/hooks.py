"""Hooks of mkdocs: add generated pages and pages of other folders, and rewrite links to files outside of docs/."""

import json
import pathlib
import posixpath
import re
import sys

from mkdocs.structure.files import File

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import reference

ROOT = reference.ROOT
# Path in the site -> path in the repository, of pages that are not a Markdown file of docs/.
MIRRORED = {
    "tutorials/python.md": "docs/tutorials/python.ipynb",
    "results/comparisons.md": "experiments/ablations/RESULTS.md",
    "results/benchmarks.md": "experiments/benchmarks/RESULTS.md",
} | {
    f"results/{picture.name}": f"{picture.relative_to(ROOT)}"
    for folder in ("ablations", "benchmarks")
    for picture in sorted((ROOT / "experiments" / folder).glob("*.png"))
}
GITHUB, COLAB = "https://github.com/", "https://colab.research.google.com/github"
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_CELLS, _CODE = re.compile(r"^\|.*$", re.MULTILINE), re.compile(r"`[^`]*`")


def on_config(config):
    config.mdx_configs["toc"]["slugify"] = anchor
    return config


def anchor(title: str, separator: str = "-") -> str:
    """Returns the anchor of a heading, as code hosts make it."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", separator)


def on_files(files, config):
    for path, text in reference.pages().items():
        files.append(File.generated(config, path, content=text))
    for path, source in MIRRORED.items():
        if source.endswith(".ipynb"):
            file = File.generated(config, path, content=notebook_page(ROOT / source))
        else:
            file = File.generated(config, path, abs_src_path=str(ROOT / source))
        files.append(file)
    return files


def notebook_page(path: pathlib.Path) -> str:
    """Returns the cells of a notebook as Markdown, with a link to the notebook after the first cell."""
    parts = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    parts.insert(1, f"[Download this page as a Jupyter notebook]({path.name}).")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown, page, config, files):
    here = page.file.src_uri
    folder = posixpath.dirname(MIRRORED.get(here, f"docs/{here}"))  # The links of a page are relative to its folder.
    paths = {source: path for path, source in MIRRORED.items()}

    def moved(link: re.Match) -> str:
        text, target = link.groups()
        path, hash, anchor = target.partition("#")
        source = posixpath.normpath(posixpath.join(folder, path))
        if not path or "://" in target or not (ROOT / source).exists():  # mkdocs reports links to missing files
            return link[0]
        if source == MIRRORED.get(here):  # a link to the file of this page, which the site also contains
            return link[0]
        if source in paths or (source.startswith("docs/") and source.endswith(".md")):
            place = paths.get(source, source.removeprefix("docs/"))
            return f"[{text}]({posixpath.relpath(place, posixpath.dirname(here) or '.')}{hash}{anchor})"
        if config.repo_url:
            kind = "tree" if (ROOT / source).is_dir() else "blob"
            link = f"[{text}]({config.repo_url.rstrip('/')}/{kind}/main/{source}{hash}{anchor})"
            if source.endswith(".ipynb") and config.repo_url.startswith(GITHUB):
                name = config.repo_url.removeprefix(GITHUB).rstrip("/")
                link += f" ([open it in Colab]({COLAB}/{name}/blob/main/{source}))"
            return link
        return text if source in text else f"{text} (`{source}`)"

    if not here.startswith("reference/"):
        markdown = _LINK.sub(moved, markdown)
    # In the code of a table's cell, mkdocs shows the backslash that code hosts want before a bar.
    return _CELLS.sub(lambda row: _CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), markdown)
