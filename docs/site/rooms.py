"""Draws the rooms of bertjax from its imports: python docs/site/rooms.py [--count]

Writes docs/rooms.svg, and in docs/code.md the first sentence of the docstring of each room. With --count, writes no
file, and prints the numbers of rooms, layers, upward imports, cycles, and lines of `__init__.py`.
"""

import ast
import graphlib
import pathlib
import sys
import tomllib
from html import escape

import grimp

ROOT = pathlib.Path(__file__).parents[2]
PICTURE, PAGE = ROOT / "docs/rooms.svg", ROOT / "docs/code.md"
BEGIN, END = "<!-- rooms: python docs/site/rooms.py -->\n", "<!-- end of the rooms -->\n"
# In the SVG, in pixels.
WIDTH, BOX_WIDTH, BOX_HEIGHT, ROW, MARGIN = 900, 126, 30, 56, 12
# Centers of boxes as shares of the width, chosen so that no arrow passes behind a box; others are in the middle.
CENTERS = {
    "cli": 0.47, "serving": 0.1, "library": 0.66, "planner": 0.47, "reporting": 0.88, "export": 0.28, "launch": 0.6,
    "embedding": 0.1, "finetuning": 0.3, "pretraining": 0.52, "inference": 0.42, "models": 0.4, "text": 0.2,
    "distributed": 0.75, "config": 0.55, "common": 0.42,
}  # fmt: skip

Imports = dict[str, set[str]]


def layers() -> list[list[str]]:
    """Returns the rooms from the top, as the contract of import-linter in pyproject.toml lists them.

    The first layer of the contract has the modules that keep old names working. These modules are not a room.
    """
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (rows,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [row.split(" | ") for row in rows[1:]]


def imports_of_modules() -> Imports:
    """Returns {module: modules that it imports}, with imports in functions and for types."""
    graph = grimp.build_graph("bertjax", cache_dir=None)
    return {module: set(graph.find_modules_directly_imported_by(module)) for module in sorted(graph.modules)}


def imports_of_rooms(modules: Imports) -> Imports:
    """Returns {room: rooms that it imports}; a room is a folder or a module in `bertjax/`."""
    rooms: Imports = {}
    for module, imported in modules.items():
        for room in rooms_of(module):
            others = {other for name in imported for other in rooms_of(name)}
            rooms[room] = rooms.get(room, set()) | others - {room}
    return rooms


def rooms_of(module: str) -> list[str]:
    """Returns the room of a module in a list, which is empty for `bertjax`."""
    return module.split(".")[1:2]


def reduced(imports: Imports) -> Imports:
    """Returns the imports of each room without the rooms that its other imports already import."""
    below: Imports = {}
    for room in graphlib.TopologicalSorter(imports).static_order():
        below[room] = imports.get(room, set()).union(*(below[other] for other in imports.get(room, ())))
    return {
        room: {other for other in others if not any(other in below[third] for third in others)}
        for room, others in imports.items()
    }


def sentence_of(room: str) -> str:
    """Returns the first sentence of the docstring of a room."""
    path = ROOT / "bertjax" / room
    text = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(text.read_text())) or ""
    return docstring.split("\n\n")[0].replace("\n", " ")


def drawn(rows: list[list[str]], imports: Imports) -> str:
    """Returns the SVG: a row for each layer, and an arrow for each import that other imports do not imply."""
    places = {
        room: (WIDTH * CENTERS.get(room, 0.5), MARGIN + ROW * number + BOX_HEIGHT / 2)
        for number, row in enumerate(rows)
        for room in row
    }
    height = ROW * (len(rows) - 1) + BOX_HEIGHT + 2 * MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="14" role="img">',
        "<title>The rooms of bertjax: each imports the rooms below it</title>",
        '<defs><marker id="end" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#78909c"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for room, others in sorted(imports.items()):
        for other in sorted(others):
            (x, y), (to_x, to_y) = places[room], places[other]
            lines.append(
                f'<line x1="{x:.0f}" y1="{y + BOX_HEIGHT / 2:.0f}" x2="{to_x:.0f}" y2="{to_y - BOX_HEIGHT / 2:.0f}" '
                'stroke="#78909c" stroke-width="1.3" marker-end="url(#end)"/>'
            )
    for room, (x, y) in places.items():
        left, top = x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2
        lines += [
            f'<rect x="{left:.0f}" y="{top:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5" fill="#e8eaf6" '
            'stroke="#3f51b5"/>',
            f'<text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle" fill="#1a237e">{escape(room)}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def listed(rows: list[list[str]]) -> str:
    """Returns the rooms, from the top, with the sentence of each, as Markdown."""
    return "".join(f"- **`{room}`**: {sentence_of(room)}\n" for row in rows for room in row)


def page(rows: list[list[str]]) -> str:
    """Returns docs/code.md with the sentences of the rooms."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{listed(rows)}\n{END}{after}"


def cycles(imports: Imports) -> list[list[str]]:
    """Returns the groups of modules that import each other, directly or through other modules of the group."""
    below: Imports = {}
    for module in imports:
        seen, waiting = set(), [*imports[module]]
        while waiting:
            if (other := waiting.pop()) not in seen:
                seen.add(other)
                waiting += imports.get(other, ())
        below[module] = seen
    groups = {frozenset(other for other in below[m] if m in below.get(other, ())) for m in imports if m in below[m]}
    return sorted(map(sorted, groups))


def count(rows: list[list[str]]) -> list[str]:
    """Returns lines with the numbers of the imports."""
    modules = imports_of_modules()
    rooms, floor = imports_of_rooms(modules), {room: row for row, names in enumerate(rows) for room in names}
    drawn_rooms = {room: others & floor.keys() for room, others in rooms.items() if room in floor}
    upward = [
        f"{room} -> {other}" for room, others in drawn_rooms.items() for other in others if floor[other] <= floor[room]
    ]
    doors = sorted((len(path.read_text().splitlines()), path) for path in (ROOT / "bertjax").rglob("__init__.py"))
    return [
        f"{len(modules)} modules with {sum(map(len, modules.values()))} imports, {len(floor)} rooms on {len(rows)} "
        "layers",
        f"upward imports of rooms: {len(upward)} {', '.join(upward)}".rstrip(),
        f"cycles of rooms: {len(cycles(rooms))}; cycles of modules: {len(cycles(modules))}",
        f"__init__.py: {len(doors)}, with {sum(lines for lines, _ in doors)} lines; the longest has {doors[-1][0]} "
        f"({doors[-1][1].relative_to(ROOT)})",
    ]


def picture(rows: list[list[str]]) -> str:
    """Returns the content of docs/rooms.svg."""
    names = {room for row in rows for room in row}
    imports = {room: others & names for room, others in imports_of_rooms(imports_of_modules()).items() if room in names}
    return drawn(rows, reduced(imports))


if __name__ == "__main__":
    if "--count" in sys.argv[1:]:
        print("\n".join(count(layers())))
    else:
        PICTURE.write_text(picture(layers()))
        PAGE.write_text(page(layers()))
