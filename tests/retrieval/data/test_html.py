"""HTML as browsers read it: pages in the manner of wikis, blogs, documentation sites, code hosts and old sites, and broken markup."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.data.source import open_corpus

for library in ("selectolax", "bs4", "markdownify"):
    pytest.importorskip(library)

WIKI = """<!DOCTYPE html>
<html class="client-nojs vector-toc-available" lang="en" dir="ltr">
<head>
<meta charset="UTF-8">
<title>Heron - Wikilike</title>
<script>(function(){var className="client-js";document.documentElement.className=className;}());</script>
</head>
<body class="skin-vector ns-0"><a class="mw-jump-link" href="#bodyContent">Jump to content</a>
<nav class="vector-main-menu"><ul><li><a href="/wiki/Main">Main page</a></li></ul></nav>
<main id="content"><h1 id="firstHeading"><span class="mw-page-title-main">Heron</span></h1>
<div id="siteSub" class="noprint">From Wikilike</div>
<table class="infobox"><tbody><tr><th colspan="2">Heron</th></tr>
<tr><th scope="row">Order</th><td><a href="/wiki/P">Pelecaniformes</a></td></tr></tbody></table>
<p>The <b>herons</b> are long-legged <a href="/wiki/Bird">birds</a><sup id="cite_ref-1"><a href="#cite_note-1">[1]</a></sup> in the family
<i>Ardeidae</i>.</p>
<h2 id="Diet">Diet</h2><span class="mw-editsection">[<a href="/edit">edit</a>]</span>
<ul><li>fish</li><li>frogs<ul><li>small ones</li></ul></li></ul>
<ol class="references"><li id="cite_note-1"><span class="reference-text">Field guide.</span></li></ol>
</main></body></html>"""
BLOG = """<!DOCTYPE html><html lang="de-DE"><head><meta charset="UTF-8" />
<title>Reiher am See &#8211; Blog</title>
<style id='wp-block-library-inline-css'>.a>b{color:#fff}</style></head>
<body class="post-template-default single">
<noscript><iframe src="https://gtm.invalid" height="0"></iframe>Bitte JavaScript einschalten</noscript>
<header id="masthead"><p class="site-title"><a href="/">Blog</a></p><nav id="site-navigation"><ul><li>Start</ul></nav></header>
<article id="post-7"><h1 class="entry-title">Reiher am See</h1>
<div class="entry-content"><p>Gestern sah ich einen Reiher.<br />Er stand still.
<p>Danach flog er fort.
<figure class="wp-block-image"><img src="a.jpg" alt="Reiher"/><figcaption>Der Reiher</figcaption></figure>
<blockquote class="wp-block-quote"><p>Geduld.</p><cite>Alter Fischer</cite></blockquote></div></article>
<aside id="secondary"><section><h2>Archive</h2><ul><li>Mai<li>Juni</ul></section></aside><button>Oben</button>
<div id="cookie-notice"><span>Cookies</span><button>OK</button><button>Nein</button></div></body></html>"""
DOCUSAURUS = (
    '<!doctype html><html lang="en" class="docs-wrapper" data-hydrated><head><meta charset="UTF-8"><title>Install | Tool</title>'
    '<script defer src="/a.js"></script></head><body class="navigation-with-keyboard"><svg style="display:none"><defs></defs></svg>'
    '<nav class="navbar">Docs</nav><main><div class="theme-doc-markdown markdown"><header><h1>Install</h1></header>'
    '<p>Run <code>npm install heron</code>:</p><div class="codeBlockContainer"><pre tabindex="0"><code>'
    '<span class="token-line">npm install heron<br></span><span class="token-line">heron start<br></span></code></pre>'
    '<button>Copy</button></div><h2 id="next">Next steps<a href="#next" class="hash-link">\u200b</a></h2>'
    '<div><div>note</div><div><p>Read on.</p></div></div><ul><li><a href="/a">First</a><li><a href="/b">Second</a></ul>'
    "</div></main></body></html>"
)
SPHINX = """<!DOCTYPE html>
<html class="writer-html5" lang="en"><head><meta charset="utf-8" /><title>heron.api &mdash; Heron 2.0 documentation</title></head>
<body class="wy-body-for-nav"><div class="wy-grid-for-nav">
<nav data-toggle="wy-nav-shift">Contents</nav>
<section><div role="main"><section id="api"><h1>API<a class="headerlink" href="#api" title="Link to this heading">\uf0c1</a></h1>
<dl class="py function"><dt class="sig"><span class="sig-name">wade</span><span class="sig-paren">(</span><em>depth</em>)</dt>
<dd><p>Wade into water.</p>
<table class="docutils"><tbody><tr><td><p>depth</p></td><td><p>metres</p></td></tr></tbody></table></dd></dl>
<table class="highlighttable"><tr><td class="linenos"><pre>1
2</pre></td><td class="code"><pre><span></span>wade(1)
<span class="k">wade</span>(2)
</pre></td></tr></table></section></div><footer>Built with Sphinx</footer></section></div></body></html>"""
CODE_HOST = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>heron/README.md at main</title></head><body>
<div class="js-header-wrapper"><a href="#start">Skip to content</a></div>
<turbo-frame id="repo"><react-app><include-fragment></include-fragment>
<ul class="UnderlineNav"><li>Code</li><li>Issues<span class="Counter">7</span></li></ul>
<article class="markdown-body"><div class="markdown-heading"><h1 tabindex="-1">Heron</h1>
<a id="user" class="anchor" href="#heron"><svg></svg></a></div>
<p>A tool for <strong>patient</strong>people.</p><div class="highlight"><pre>pip install heron</pre></div>
<table><thead><tr><th>Option</th><th>Meaning</th></tr></thead><tbody><tr><td>-v</td><td>verbose</td></tr></tbody></table></article></react-app></turbo-frame>
<template id="t"><div>never shown</div></template></body></html>"""
HUGO = """<!DOCTYPE html><html><head><title>Posts</title><meta name=generator content="Hugo"></head><body>
<main><article class=summary><a href=/p/1/><h2>First post</h2><p>About wings</p></a></article>
<article class=summary><a href=/p/2/><h2>Second post</h2>
<p>About feathers</p></a></article></main><footer><span>c</span> <span>2024</span></footer></body></html>"""
MINIFIED = (
    "<!doctype html><html lang=en><meta charset=utf-8><title>Pump</title><link rel=stylesheet href=a.css><h1>Pump</h1><p>Grease the "
    "<b>zebrafish</b> bearing.<ul><li>daily<li>weekly</ul><table><tr><th>Part<th>Oil<tr><td>axle<td>5 ml</table><dl><dt>Bar<dd>A unit."
    "<dt>Rpm<dd>Another.</dl><p>Done<select><option>kPa<option>psi</select>"
)
OLD = """<HTML><HEAD><TITLE>Welcome</TITLE></HEAD><BODY BGCOLOR=#FFFFFF>
<CENTER><TABLE WIDTH=760 BORDER=0><TR><TD COLSPAN=2><FONT SIZE=5><B>The Heron Page</FONT></B></TD></TR>
<TR><TD WIDTH=150 VALIGN=top><A HREF="a.html">News</A><BR><A HREF="b.html">Links</A></TD><TD>
<H1>Welcome</H1><P>My herons.<P>They eat:<UL><LI>fish<LI>frogs</UL>
<TABLE BORDER=1><TR><TD>Grey</TD><TD>90 cm</TD></TR><TR><TD>Purple<TD>80 cm</TABLE>
<XMP><wing></XMP></TD></TR></TABLE></CENTER><ADDRESS>Bo</ADDRESS><I>Last<P>changed</I> 2001</BODY></HTML>"""
FRAMES = """<html><head><title>Frames</title></head><frameset cols="20%,80%"><frame src="menu.html"><frame src="main.html">
<noframes><body><h1>Herons</h1><p>This page has frames.</body></noframes></frameset></html>"""
XHTML = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.0 Strict//EN" "http://www.w3.org/TR/xhtml1/DTD/xhtml1-strict.dtd">
<html xmlns="http://www.w3.org/1999/xhtml" xml:lang="en"><head><title>Marsh</title><script type="text/javascript" src="a.js"/></head>
<body><div id="top"/><h1>Marsh</h1><p><a id="x"/>Reeds &amp; water.<br/>Mud.</p><p><![CDATA[1 < 2]]></p></body></html>"""
AMP = """<!doctype html><html ⚡><head><meta charset="utf-8"><title>Amp</title><style amp-boilerplate>body{}</style>
<noscript><style amp-boilerplate>body{animation:none}</style></noscript></head><body>
<amp-sidebar id="s"><ul><li>Menu</li></ul></amp-sidebar>
<article><h1>Fast heron</h1><amp-img src="a.jpg"><noscript><img src="a.jpg"></noscript></amp-img><p>It is quick.</p>
<amp-accordion><section expanded><h4>More</h4><p>And calm.</p></section></amp-accordion></article></body></html>"""

PAGES = {
    "wiki": (
        WIKI,
        "Jump to content Heron From Wikilike Heron Order Pelecaniformes The herons are long-legged birds [1] in the family Ardeidae"
        " Diet edit fish frogs small ones 1. Field guide",
        "Main page|className",
    ),
    "blog": (
        BLOG,
        "Blog Reiher am See Gestern sah ich einen Reiher. Er stand still. Danach flog er fort. Der Reiher Geduld. Alter Fischer"
        " Archive Mai Juni Oben Cookies OK Nein",
        "Start|color|JavaScript|gtm",
    ),
    "docusaurus": (
        DOCUSAURUS,
        "Install Run npm install heron : npm install heron heron start Copy Next steps note Read on. First Second",
        "Docs|navbar",
    ),
    "sphinx": (SPHINX, "API wade (depth) Wade into water. depth metres 1 2 wade(1) wade(2) Built with Sphinx", "Contents|Link to"),
    "code host": (
        CODE_HOST,
        "Skip to content Code Issues7 Heron A tool for patientpeople pip install heron Option Meaning -v verbose",
        "never",
    ),
    "hugo": (HUGO, "First post About wings Second post About feathers c 2024", "generator"),
    "minified": (
        MINIFIED,
        "Pump Grease the zebrafish bearing. daily weekly Part Oil axle 5 ml Bar A unit. Rpm Another. Done kPa psi",
        "stylesheet",
    ),
    "old": (
        OLD,
        "The Heron Page News Links Welcome My herons. They eat: fish frogs Grey 90 cm Purple 80 cm wing Bo Last changed 2001",
        "FFFFFF",
    ),
    "frames": (FRAMES, "Herons This page has frames.", "menu"),
    "xhtml": (XHTML, "Marsh Reeds & water. Mud. 1 < 2", "DTD|a.js"),
    "amp": (AMP, "Menu Fast heron It is quick. More And calm.", "boilerplate|animation"),
}


def words(text: str) -> list[str]:
    """The words of a text; where Markdown puts signs is where a page shows an edge or another style."""
    plain = re.sub(r"\]\([^)]*\)", "] ", text).replace("**", "").replace("*", "")
    return re.findall(r"\w+", plain)


def read(folder: Path, html: str, name: str = "page.html") -> list[tuple[str, str]]:
    """The titles and texts of a page's passages."""
    (folder / name).write_text(html, encoding="utf-8")
    return [(document.title, document.text) for document in open_corpus(folder)]


@pytest.mark.parametrize("page", PAGES)
def test_the_text_of_a_page_is_whole_and_in_order(page: str, tmp_path: Path) -> None:
    html, expected, hidden = PAGES[page]
    text = "\n".join(part for _, part in read(tmp_path, html))
    assert words(text) == words(expected)
    assert not re.search(rf"{hidden}|[\ue000-\ue002]", text)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_without_its_optional_tags_reads_alike(page: str, tmp_path: Path) -> None:
    html, expected, _ = PAGES[page]
    if page in ("xhtml", "frames"):  # XHTML has none, and a set of frames needs its own
        pytest.skip("no tag of this page is optional")
    # Not </p>, without which text that follows belongs to the paragraph, and nothing whose parent would end elsewhere.
    stripped = re.sub(r"(?i)</?(?:html|head|body|tbody)(?=[\s>])[^>]*>|</(?:li|td|th|tr|dt|dd|option|thead)>", "", html)
    assert words("\n".join(part for _, part in read(tmp_path, stripped))) == words(expected)


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<aside>aside</aside><button>Click</button>", "aside\n\nClick"),
        ("<button>Yes</button><button>No</button>", "Yes  No"),
        ("<header>a</header>b<footer>c</footer>", "a\n\nb\n\nc"),
        ("<ul><li>a<ul><li>b</ul>c</ul>", "* a\n  + b\n  c"),
        ("<div>a<li>b<li>c</div>d", "a\n- b\n- c\n\nd"),
        ("<dl>a<dd>b</dl>", "a\n:   b"),
        ("a<b>\nb\n</b>c<i> </i>d <a name=x>e </a>f", "a\n**b**\nc d e f"),
        ("<a href=1><h3>A</h3>b</a><a href=2><h3>C</h3>d</a>", "### A\n\nb\n\n### C\n\nd"),
        ("fore<b>ground</b><wbr>er <span>a</span>b<sub>2</sub><!-- c -->d<script>e</script>f", "fore**ground**er ab2df"),
        ("a<nav>menu</nav>b", "a b"),
        ("<nav>a<nav>b<svg><svg>c</svg></svg></nav></nav><datalist><datalist>d</datalist></datalist>e<svg><xmp>f</xmp></svg>", "e"),
        ("<title>T</title><p>a<title>b</title>", "a"),
        ("<p>a<svg><title>icon</title></svg>b", "a b"),
        ("<b><p>a</b>b</p><table><tr>c<td>d</table>", "**a**b\n\nc\n\n|  |\n| --- |\n| d |"),
        ('<p title="<p>">a<textarea><p>b</textarea>', "a <p>b "),
        ("<noscript><p>a</noscript><template>b</template><iframe>c</iframe><video>d</video>e", "e"),
        ("<pre>\n  a\n\n\n  b</pre>", "```\n  a\n\n\n  b\n```"),
        ("<p>a<script>'</script>'<p>b", "a'\n\nb"),
        ("<plaintext><p>a", "<p>a"),
        ("<font>a</p>b</font> c<div style='clear: both'></div>d<h2></h2>e", "a\n\nb c\n\nd\n\ne"),
        ("<p>a <?php echo 1 ?>b", "a b"),
    ],
)
def test_blocks_do_not_run_together_and_words_are_not_torn(html: str, text: str, tmp_path: Path) -> None:
    assert "".join(part for _, part in read(tmp_path, html)).strip() == text.strip()


def test_headings_of_tables_that_arrange_a_page_are_headings(tmp_path: Path) -> None:
    assert read(tmp_path, OLD)[1][0] == "page.html > Welcome"


def test_a_sign_that_links_to_a_heading_is_not_part_of_it(tmp_path: Path) -> None:
    assert read(tmp_path, SPHINX)[0][0] == "page.html > heron.api — Heron 2.0 documentation > API"


def test_elements_nested_without_end_lose_no_text(tmp_path: Path) -> None:
    html = "".join(f"<{'div' if number % 2 else 'span'}>w{number} " for number in range(3000)) + "</div>" * 3000 + "end"
    text = "".join(part for _, part in read(tmp_path, html))
    assert re.findall(r"w\d+|end", text) == [*(f"w{number}" for number in range(3000)), "end"]


def test_lines_are_those_of_the_source_whatever_ends_them(tmp_path: Path) -> None:
    for number, end in enumerate(("\n", "\r\n", "\r")):
        (tmp_path / f"{number}.html").write_bytes(f"<h1>A</h1>{end}<p>a{end}b{end}<H2 class=x>B</H2>{end}c".encode())
    found = [((document.metadata or {})["line"], (document.metadata or {})["end_line"]) for document in open_corpus(tmp_path)]
    assert found[::2] == [(1, 2)] * 3
    assert [line for line, _ in found[1::2]] == [4] * 3


def test_a_page_of_a_title_alone_has_no_passage_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "b.md").write_text("words")
    assert [title for title, _ in read(tmp_path, "<!doctype html><title>Only a title</title><div id=app></div>")] == ["b.md"]
    assert "files read: 1; html files without text (frames, or text that scripts write): 1 (such as page.html)" in caplog.text
    with pytest.raises(InputError, match=r"page\.html: the file has no text \(frames, or text that scripts write\)"):
        list(open_corpus(tmp_path / "page.html"))
