"""Lines per file and function of the product code, longest first: a place to look, not a limit."""

import ast
from pathlib import Path

FILE_LINES, FUNCTION_LINES = 400, 60


def main() -> None:
    files, functions = [], []
    for path in sorted(Path("src").rglob("*.py")):
        text = path.read_text()
        files.append((text.count("\n"), str(path)))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                functions.append((node.end_lineno - node.lineno + 1, f"{path}:{node.lineno} {node.name}"))
    print(f"{sum(n for n, _ in files)} lines in {len(files)} files")
    for title, rows, look in (("files", files, FILE_LINES), ("functions", functions, FUNCTION_LINES)):
        print(f"longest {title} (look from {look} on):")
        for lines, name in sorted(rows, reverse=True)[:6]:
            print(f"  {lines:5}{' *' if lines > look else '  '} {name}")


if __name__ == "__main__":
    main()
