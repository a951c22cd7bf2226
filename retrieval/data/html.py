"""HTML as browsers read it, converted to Markdown.

A parser that follows the HTML standard (Lexbor) finds the structure of a page, whatever end tags are missing or misplaced; markdownify
turns that into Markdown. What a browser with scripts does not show, and navigation, is left out.

Source: https://html.spec.whatwg.org/multipage/ (parsing, and the display of elements in section 15.3).
"""

from __future__ import annotations

import html
import re
import warnings
from bisect import bisect_right
from typing import Any, NamedTuple, cast

from quiver.retrieval.data.passages import line_starts

# Marks are characters of a private area, which are removed from pages: the number of a line between them. The first form is in text, the
# second in tags, and in what only looks like a tag.
_LINE_MARK = re.compile("\ue000([0-9]+)\ue001")
_TAG_MARK = re.compile(" \ue002([0-9]+)\ue001")
_MARKS = re.compile("[\ue000-\ue002]")
_HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
_CELLS = ("table", "thead", "tbody", "tfoot", "tr", "td", "th", "caption")
# Blocks that markdownify knows, and those that become a div, which it would let run together with their neighbours.
_KNOWN_BLOCKS = ("p", *_HEADINGS, "li", "pre", "td", "th", "blockquote", "div", "section", "article", "dt", "dd", "figcaption", "caption")
_OTHER_BLOCKS = (
    *("address", "aside", "center", "details", "dialog", "fieldset", "figure", "footer", "form", "header", "hgroup", "legend", "main"),
    *("search", "summary", "optgroup", "option"),
)
_RENAMED = {**dict.fromkeys(_OTHER_BLOCKS, "div"), "menu": "ul", "dir": "ul", "listing": "pre"}
_BLOCKS = frozenset({*_KNOWN_BLOCKS, *_RENAMED, *_CELLS, "ul", "ol", "dl", "hr"})
_BOXES = ("button", "select", "textarea", "input", "meter", "progress")  # inline, with an edge around them
_VOID = frozenset({"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"})
_HIDDEN = ("script", "style", "template", "noframes", "noembed", "head", "title", "datalist")
_REPLACED = ("nav", "svg", "iframe", "audio", "video", "canvas")  # navigation, and boxes whose text shows only in old browsers
_RAW = ("xmp", "plaintext")  # their content is text, whatever it looks like
_LAYOUT = ("table", "pre", "form", *_HEADINGS)  # a table with one of these in a cell arranges a page, and its rows are not data
_PARAGRAPHS = ("p", "div", "section", "article", *_HEADINGS)
_INLINE = ("a", "b", "strong", "em", "i", "del", "s", "sub", "sup", "code", "kbd", "samp", "q")
_DEEPEST = 100  # elements within each other that are converted: a browser stops at 512, Python's stack before

_BLOCK_TAG = re.compile(rf"<(?:{'|'.join((*_KNOWN_BLOCKS, *_OTHER_BLOCKS))})(?=[\s/>])", re.IGNORECASE)
_NOSCRIPT = re.compile(r"<(/?)noscript(?=[\s/>])", re.IGNORECASE)
# Of what a parser wrote, in which no attribute holds a >. Instructions, such as those of PHP, are comments to a browser.
_TAG = re.compile(r"<(/?)([a-zA-Z][^\s/>]*)[^>]*>|<!--.*?-->|<\?[^>]*>", re.DOTALL)
_XML = re.compile(r"\s*<\?xml\b")
_CDATA = re.compile(r"<!\[CDATA\[(.*?)\]\]>", re.DOTALL)
_CLOSED_TAG = re.compile(r"<([A-Za-z][^\s<>/]*)((?:\s(?:[^<>\"']|\"[^\"]*\"|'[^']*')*?)?)/>")


class ConvertedPage(NamedTuple):
    """A page as Markdown, its title, and the first character of lines with the line of the source that they come from, ascending."""

    text: str
    places: list[tuple[int, int]]
    title: str


def convert_html(source: str, *, xml: bool = False, headers: bool = False) -> ConvertedPage:
    """Convert a page; raises ImportError if selectolax, beautifulsoup4 or markdownify is not installed.

    Args:
        source: Its HTML.
        xml: Whether it is XHTML, in which every element may be closed by ``/>``; otherwise an XML declaration at its start says so.
        headers: Whether the first row of a table is its header if none is marked.
    """
    from bs4 import BeautifulSoup

    clean = _MARKS.sub("", source)
    if xml or _XML.match(clean):
        clean = _to_html(clean)
    # The line is added to the start tag of each block, as an attribute without a value; it cannot end a quoted value that looks like a tag.
    starts = line_starts(clean)
    page, title = _parse(_BLOCK_TAG.sub(lambda tag: f"{tag[0]} \ue002{bisect_right(starts, tag.start())}\ue001", clean))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a page looks like XML or like a file's name
        soup = BeautifulSoup(_flatten(page), "html.parser")
    _prepare(soup)
    marked = _TAG_MARK.sub("", _converter(headers).convert_soup(soup))
    places, length = [(0, 1)], 0
    for line in marked.splitlines(keepends=True):
        if marks := _LINE_MARK.findall(line):  # a heading's or a list's sign is before the mark, so the place is that of the whole line
            places.append((length, int(marks[0])))
        length += len(_LINE_MARK.sub("", line))
    return ConvertedPage(_LINE_MARK.sub("", marked), places, title)


def _to_html(xhtml: str) -> str:
    """Write what only XML has as HTML: elements without content, which HTML would leave open, and character data."""
    plain = _CDATA.sub(lambda data: html.escape(data[1], quote=False), xhtml)
    return _CLOSED_TAG.sub(lambda tag: tag[0] if tag[1].lower() in _VOID else f"<{tag[1]}{tag[2]}></{tag[1]}>", plain)


def _parse(source: str) -> tuple[str, str]:
    """The body of a page without what is not shown, as HTML in which every element is closed, and the title."""
    from selectolax.lexbor import LexborHTMLParser

    # A browser with scripts reads <noscript> as it reads <noframes>: as text without structure, which it does not show.
    page = LexborHTMLParser(_NOSCRIPT.sub(r"<\1noframes", source))
    named = next((node for node in page.css("title") if node.parent is None or node.parent.tag != "svg"), None)
    title = " ".join(_TAG_MARK.sub("", named.text()).split()) if named is not None else ""
    if page.css_first("frameset") is not None:  # its frames are other files; the page's own text is for browsers without frames
        page = LexborHTMLParser("".join(node.text() for node in page.css("noframes")))
    for node in reversed(page.css(", ".join((*_HIDDEN, *_REPLACED, *_RAW)))):  # inner ones first: a removed node frees those in it
        if node.tag in _HIDDEN:
            node.decompose()
        else:
            node.replace_with(f"\n{node.text()}\n" if node.tag in _RAW else " ")
    return (page.body.html or "" if page.body is not None else ""), title


def _flatten(page: str) -> str:
    """Remove comments, and the tags of elements that are nested too deeply; their text stays."""
    depth = 0

    def keep(tag: re.Match[str]) -> str:
        nonlocal depth
        name = tag[2]
        if name is None:
            return ""
        if name in _VOID:
            return tag[0]
        depth -= bool(tag[1])
        kept = depth < _DEEPEST
        depth += not tag[1]
        return tag[0] if kept else "\n" if name in _BLOCKS else ""

    return _TAG.sub(keep, page)


def _prepare(soup: Any) -> None:
    """Put marks into the text, and give markdownify the elements that it knows."""
    for table in soup("table"):
        if table.get("role") in ("presentation", "none") or table.find(list(_LAYOUT)):
            for tag in (table, *(each for each in table(list(_CELLS)) if each.find_parent("table") is table)):
                tag.name = "div"
    for tag in soup.find_all(True):
        tag.name = _RENAMED.get(tag.name, tag.name)
        if tag.name in _HEADINGS:
            for link in tag("a", href=re.compile("^#")):
                if not re.search(r"\w", link.get_text()):
                    link.extract()  # a sign such as ¶ that links to the heading itself
        if tag.name in _BOXES:
            tag.insert_before(" ")
            tag.insert_after(" ")
        elif mark := next((name for name in tag.attrs if name[0] == "\ue002"), ""):
            _insert_mark(tag, mark.replace("\ue002", "\ue000"))


def _insert_mark(tag: Any, mark: str) -> None:
    """Put a mark before the text of a block, unless another block begins there."""
    from bs4.element import NavigableString

    first = next((each for each in tag.children if not isinstance(each, NavigableString) or each.strip()), None)
    if isinstance(first, NavigableString):
        text = str(first)
        first.replace_with(mark + (text if tag.name == "pre" else text.lstrip()))
    elif first is not None and first.name not in _BLOCKS:
        first.insert_before(mark)


def _converter(headers: bool) -> Any:
    """A converter that keeps the white space around and between elements, where words would run together otherwise."""
    from markdownify import MarkdownConverter

    class Converter(MarkdownConverter):
        def get_conv_fn(self, tag_name: str) -> Any:
            convert = cast(Any, super()).get_conv_fn(tag_name)
            if convert is None or tag_name not in (*_INLINE, *_PARAGRAPHS, "ul", "ol", "li", "dd"):
                return convert

            def keep_edges(element: Any, text: str, parent_tags: Any) -> str:
                core = text.strip()
                if tag_name in _PARAGRAPHS:
                    return "\n\n" if not core and "_inline" not in parent_tags else str(convert(element, text, parent_tags))
                if tag_name in _INLINE:
                    if not core or "\n\n" in text or (tag_name == "a" and not element.get("href")):
                        return text  # nothing to emphasize, or blocks, which emphasis and links would join
                    before, after = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
                    return f"{before}{convert(element, core, parent_tags)}{after}"
                converted: str = convert(element, text.strip("\n"), parent_tags)
                if tag_name in ("li", "dd"):
                    return f"\n{converted}"
                return converted if converted.endswith("\n") else f"{converted}\n"  # text may follow

            return keep_edges

        def convert_br(self, el: Any, text: str, parent_tags: Any) -> str:
            return f"\n{text}" if "pre" in parent_tags else cast(Any, super()).convert_br(el, text, parent_tags)

    return Converter(heading_style="ATX", strip=["img"], escape_asterisks=False, escape_underscores=False, table_infer_header=headers)
