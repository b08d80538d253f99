"""framed gives the template of a page that stands alone: no script, no request, light and dark, desk and phone.
frame.html is what is around every such page, and asks for `title`, `asked` and `sections`, each an id and a name.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from importlib.resources import files

from jinja2 import DictLoader, Environment, StrictUndefined, Template


@cache
def framed(package: str, name: str) -> Template:
    """Of a file in that package which extends frame.html."""
    pages = {"frame.html": _text("kvrelay.plan", "frame.html"), name: _text(package, name)}
    environment = Environment(autoescape=True, undefined=StrictUndefined, loader=DictLoader(pages))
    environment.globals |= {"version": version("kvrelay"), "css": _text("kvrelay.plan", "page.css")}
    return environment.get_template(name)


def _text(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")
