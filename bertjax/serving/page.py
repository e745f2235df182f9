"""A page to try a checkpoint in a browser: what it says of a text, with probabilities, and what its heads attend to."""

import html
import json
from collections.abc import Sequence

import numpy as np

from bertjax.common.errors import UserError
from bertjax.embedding.task import similarity_of
from bertjax.library import Model

MOST_PIECES = 128  # longer texts' attention is not shown
EXAMPLES = {  # by method
    "fill_mask": "the man went to the [MASK] to buy a [MASK] of milk .",
    "classify": "a fine film",
    "tag": "Ada Lovelace lived in London .",
    "answer": "Who wrote it? | It was written by Ada Lovelace.",
    "embed": "a text to compare\nanother text",
}


def of(model: Model, methods: Sequence[str], has_attention: bool) -> str:
    """Returns the page as HTML."""
    about = {"methods": methods, "examples": EXAMPLES, "attention": has_attention}
    about["embed"] = {} if model.makes_vectors else {"pool": "mean"}
    about["similarity"] = similarity_of(model.source.settings)
    given = json.dumps(about).replace("<", "\\u003c")
    return _PAGE.replace("ABOUT", given).replace("CHECKPOINT", html.escape(model.path))


def attention(model: Model, text: str) -> dict:
    """Returns the pieces of a text, and their attention `[layers, heads, queries, keys]` in thousandths.

    Raises `UserError` if it has too many.
    """
    from bertjax.reporting import insight

    count = len(model.tokenizer.framed(model.tokenizer.encode_with_masks(text)))
    if count > MOST_PIECES:
        raise UserError(f"the text has {count} tokens; attention is shown of up to {MOST_PIECES}")
    pieces, probabilities = insight.attention(model.source, text)
    return {"pieces": pieces, "attention": np.rint(1000 * np.asarray(probabilities)).astype(int).tolist()}


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>CHECKPOINT</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; max-width: 900px; margin: 2em auto; padding: 0 1em; color: #222 }
textarea { width: 100%; box-sizing: border-box; font: inherit; padding: .5em }
button, select { font: inherit; padding: .3em .8em; margin: .4em .4em .4em 0 }
table { border-collapse: collapse; margin: .6em 0 } td { padding: .1em .7em .1em 0; vertical-align: middle }
.bar { display: inline-block; height: .8em; background: #4c72b0 } .error { color: #b00020 } .note { color: #666 }
.piece { display: inline-block; padding: .1em .3em; margin: .1em; border-radius: .2em; cursor: default }
mark { background: #cfe3ff; padding: 0 .15em }
</style>
<h1>CHECKPOINT</h1>
<form id="form"><textarea id="text" rows="4" aria-label="text"></textarea>
<div id="buttons"></div></form>
<div id="result" aria-live="polite"></div>
<script>
const about = ABOUT, text = document.getElementById("text"), result = document.getElementById("result");
const notes = {answer: "question | text, a line each", embed: "a text a line", classify: "a text a line; pairs with |"};
function add(parent, kind, content, options) {
  const made = document.createElement(kind);
  if (content !== undefined) made.textContent = content;
  Object.assign(made, options || {});
  parent.appendChild(made);
  return made;
}
async function ask(path, body) {
  const answer = await fetch(path, {method: "POST", body: JSON.stringify(body)});
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}
function bars(pairs) {
  const table = add(result, "table");
  for (const [name, share] of pairs) {
    const row = add(table, "tr");
    add(row, "td", name);
    add(row, "td", (100 * share).toFixed(1) + " %");
    add(add(row, "td"), "span", "", {className: "bar"}).style.width = 300 * share + "px";
  }
}
const shown = {
  fill_mask(found) {
    add(result, "p", found.text);
    found.masks.forEach((mask, number) => {
      add(result, "p", "[MASK] " + (number + 1), {className: "note"});
      bars(mask.map(each => [each.word, each.probability]));
    });
  },
  classify(found) {
    add(result, "p", String(found.label ?? found.labels ?? found.score));
    if (found.probabilities) bars(Object.entries(found.probabilities).sort((a, b) => b[1] - a[1]));
  },
  tag(found) {
    const line = add(result, "p");
    found.words.forEach((word, number) => {
      add(line, found.tags[number] === "O" ? "span" : "mark", word, {title: found.tags[number]});
      add(line, "span", found.tags[number] === "O" ? " " : " " + found.tags[number] + " ", {className: "note"});
    });
  },
  answer(found) {
    add(result, "p", found.answer || "no answer");
    if (found.probability !== undefined) bars([["probability", found.probability]]);
  },
};
function similarities(vectors, lines) {
  const isDot = about.similarity === "dot";
  const size = v => isDot ? 1 : Math.sqrt(v.reduce((sum, x) => sum + x * x, 0));
  const pairs = vectors.slice(1).map((v, i) =>
    [lines[i + 1], v.reduce((sum, x, j) => sum + x * vectors[0][j], 0) / (size(v) * size(vectors[0]))]);
  add(result, "p", vectors.length + " vectors of " + vectors[0].length + " numbers");
  if (pairs.length) { add(result, "p", about.similarity + " with the first", {className: "note"}); bars(pairs); }
}
function heads(found) {
  const layers = found.attention, choose = add(result, "p");
  const layer = add(choose, "select", undefined, {title: "layer"});
  const head = add(choose, "select", undefined, {title: "head"});
  layers.forEach((_, i) => add(layer, "option", "layer " + (i + 1), {value: i}));
  layers[0].forEach((_, i) => add(head, "option", "head " + (i + 1), {value: i}));
  add(result, "p", "Point at a piece: what it attends to is dark.", {className: "note"});
  const line = add(result, "p", undefined, {id: "pieces"});
  const pieces = found.pieces.map(piece => add(line, "span", piece, {className: "piece"}));
  const draw = query => pieces.forEach((piece, key) => {
    const share = layers[layer.value][head.value][query][key] / 1000;
    piece.style.background = "rgba(76, 114, 176, " + Math.sqrt(share) + ")";
    piece.title = (100 * share).toFixed(1) + " %";
    piece.style.outline = key === query ? "2px solid #4c72b0" : "";
  });
  pieces.forEach((piece, query) => piece.addEventListener("mouseover", () => draw(query)));
  layer.onchange = head.onchange = () => draw(0);
  draw(0);
}
async function run(method) {
  result.replaceChildren();
  const lines = text.value.split("\\n").filter(line => line.trim());
  try {
    if (method === "attention") return heads(await ask("/attention", {texts: [lines.join(" ")]}));
    const parts = line => line.split("|").map(part => part.trim());
    const inputs = method === "answer"
      ? {questions: lines.map(parts).map(([question, context]) => ({question, context}))}
      : {texts: method === "classify" ? lines.map(line => line.includes("|") ? parts(line) : line) : lines};
    if (method === "embed") Object.assign(inputs, about.embed);
    const {results} = await ask("/" + method, inputs);
    if (method === "embed") similarities(results, lines); else results.forEach(shown[method]);
  } catch (error) { add(result, "p", error.message, {className: "error"}); }
}
const buttons = document.getElementById("buttons");
for (const method of [...about.methods, ...(about.attention ? ["attention"] : [])])
  add(buttons, "button", method.replace("_", " "), {type: "button", id: method, title: notes[method] || "",
    onclick: () => run(method)});
text.value = about.examples[about.methods[0]];
document.getElementById("form").onsubmit = event => { event.preventDefault(); run(about.methods[0]); };
</script></html>
"""
