"""Encodings, and documents of other programs: office files, e-books and messages, also damaged, encrypted and hostile ones."""

from __future__ import annotations

import datetime
import gzip
import io
import os
import re
import socket
import zipfile
from collections.abc import Callable, Mapping
from email.message import EmailMessage
from pathlib import Path

import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.data.source import SourceOptions, open_corpus
from quiver.retrieval.records import Document

RUSSIAN = "Съешь ещё этих мягких французских булок, да выпей же чаю. Ветер дует с моря."  # noqa: RUF001 - Cyrillic
KOREAN = "서울특별시는 대한민국의 수도이자 최대 도시이다. 한강이 도시를 가로지른다."
JAPANESE = "東京は日本の首都であり、世界最大の都市の一つです。ひらがなとカタカナ。"
CHINESE = "北京是中华人民共和国的首都,也是全国的政治中心。长城在北边。"
POLISH = "Zażółć gęślą jaźń, czyli polski tekst z wieloma znakami, który każdy zna."
GERMAN = "Größe und Österreich: Zürich über alles – „schön“."  # noqa: RUF001 - a dash
CZECH = "Žluté květy rostou u řeky. Příliš šťastný kůň běžel domů, křičel a řehtal."
HUNGARIAN = "Székesfehérvár őrzője összel érkezett; öt perc múlva gyűrűt húzott fel, és örült a tűznek, ő és a fűtő."
TURKISH = "Güneş doğdu, çocuklar ışıkta oynuyor; yağmur yağıyor, kuşlar uçuyor."  # noqa: RUF001 - Turkish
CROATIAN = "Sva ljudska bića rađaju se slobodna; obdarena su sviješću. Šećer, čaša, žena."
FRENCH = "Le café était fermé ; à Genève, nous avons déjà mangé. Où êtes-vous ?"
PAGE = '<html><head>{}</head><body><p title="é">{}</p></body></html>'


def texts(root: Path, options: SourceOptions = SourceOptions()) -> list[str]:  # noqa: B008 - frozen
    return [document.text.strip() for document in open_corpus(root, options)]


@pytest.mark.parametrize(
    ("name", "content", "label", "codec"),
    [
        ("a.html", PAGE.format('<meta charset="euc-kr">', KOREAN), "", "cp949"),
        ("a.html", PAGE.format("<META CONTENT='text/html; charset=Shift_JIS' HTTP-EQUIV=Content-Type>", JAPANESE), "", "cp932"),
        ("a.html", PAGE.format("<!-- <meta charset=koi8-r> --><meta charset=windows-1251>", RUSSIAN), "", "cp1251"),
        ("a.html", PAGE.format("<meta charset=gb2312>", CHINESE + "镕"), "", "gb18030"),
        ("a.html", PAGE.format("<meta charset=iso-8859-1>", GERMAN), "", "cp1252"),
        ("a.html", PAGE.format("<meta charset=x-sjis>", JAPANESE + "①"), "", "cp932"),
        ("a.html", PAGE.format("<meta charset=iso-2022-jp>", JAPANESE), "", "iso2022_jp"),
        ("a.xhtml", '<?xml version="1.0" encoding="EUC-JP"?>' + PAGE.format("<title/>", JAPANESE), "", "euc_jp"),
        ("a.html", PAGE.format("<meta charset=utf-16>", GERMAN), "", "utf-8"),
        ("a.py", "#!/usr/bin/python\n# -*- coding: cp1251 -*-\nx = '{}'\n", RUSSIAN, "cp1251"),
        ("a.py", "# vim: set fileencoding=koi8-r :\nx = '{}'\n", RUSSIAN, "koi8-r"),
        ("a.rb", "# encoding: euc-jp\nx = '{}'\n", JAPANESE, "euc_jp"),
        ("a.css", '@charset "windows-1250";\na::after {{ content: "{}" }}\n', POLISH, "cp1250"),
        ("a.org", "# -*- mode: org; coding: iso-8859-2-unix -*-\n{}\n", POLISH, "iso8859-2"),
        ("a.tex", "\\usepackage[latin1]{{inputenc}}\n{}\n", FRENCH, "cp1252"),
    ],
)
def test_the_encoding_that_a_file_declares_is_used(tmp_path: Path, name: str, content: str, label: str, codec: str) -> None:
    if "html" in name:
        pytest.importorskip("selectolax")
    whole = content.format(label) if label else content
    (tmp_path / name).write_bytes(whole.replace("é", "" if codec != "utf-8" else "é").encode(codec))
    expected = label or whole[whole.index('">', whole.index("<p")) + 2 : whole.index("</p>")]
    assert expected.replace("é", "") in "".join(texts(tmp_path)).replace("é", "")


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        *((RUSSIAN, codec) for codec in ("utf-8-sig", "utf-16", "utf-32", "cp1251", "koi8-r")),
        *((KOREAN, "cp949"), (JAPANESE, "cp932"), (CHINESE, "gb18030"), (POLISH, "cp1250"), (GERMAN, "cp1252"), (FRENCH, "cp1252")),
        *((RUSSIAN, codec) for codec in ("iso8859-5", "mac-cyrillic", "cp866")),
        *((CZECH, "cp1250"), (HUNGARIAN, "cp1250"), (TURKISH, "cp1254"), (CROATIAN, "cp1250")),
        *(
            (JAPANESE, "iso-2022-jp"),
            ("Þetta er þýðing á íslensku, góðan daginn.", "cp1252"),
            ("Smørrebrød på café, blåbær på Ærø", "cp1252"),
        ),
        *(("São João não comeu pães à noite; ações do Müller.", "cp1252"), ("Škoda fährt für über fünf Städte, schöne Äcker", "cp1252")),
        *(("naïve", "cp1252"), ("plain text without a mark", "utf-16-le"), ("plain text without a mark", "utf-16-be")),
    ],
)
def test_the_encoding_of_a_text_that_declares_none_is_found(
    tmp_path: Path, text: str, codec: str, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_bytes(f"{text}\n".encode(codec))
    assert texts(tmp_path) == [text] * 3
    told = [record.getMessage() for record in caplog.records if "read as" in record.getMessage()]
    assert len(told) == (codec != "utf-8-sig")
    assert all("guess: 3 (such as 0.txt)" in line or "utf" in codec or "2022" in codec for line in told)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ((f"{GERMAN}\n" * 3).encode() + b"one stray byte: \xff\n", f"{GERMAN}\n" * 3 + "one stray byte: \ufffd"),
        (f"{RUSSIAN} \ufffd".encode() + b"\xd0", f"{RUSSIAN} \ufffd\ufffd"),
        (b"# coding: euc-kr\n" + (KOREAN * 2).encode("euc-kr") + b"\xff\n", f"# coding: euc-kr\n{KOREAN * 2}\ufffd"),
        (b"# coding: ascii\n" + GERMAN.encode(), f"# coding: ascii\n{GERMAN}"),
        (b"# coding: latin1\n" + RUSSIAN.encode(), f"# coding: latin1\n{RUSSIAN}"),
        (b"# coding: gb2312\n" + CHINESE.encode(), f"# coding: gb2312\n{CHINESE}"),
        (b"# coding: utf-8\n" + (f"{FRENCH}\n" * 2).encode("cp1252"), f"# coding: utf-8\n{FRENCH}\n{FRENCH}"),
        (b"# coding: hex, rot13 or no-such-thing\n" + GERMAN.encode(), f"# coding: hex, rot13 or no-such-thing\n{GERMAN}"),
        ("x".encode("utf-16") + b"\x41", "x\ufffd"),
    ],
)
def test_a_wrong_byte_or_declaration_costs_only_itself(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "a.py").write_bytes(content)
    if expected == "x\ufffd":
        with pytest.raises(InputError, match=r"a\.py: not text"):
            texts(tmp_path / "a.py")
    else:
        assert "\n".join(texts(tmp_path)) == expected


@pytest.mark.parametrize("codec", ["utf-32", "cp1251", "cp949", "cp932"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv.gz"])
def test_tables_in_any_encoding_are_read_and_it_is_said_once(
    tmp_path: Path, name: str, codec: str, caplog: pytest.LogCaptureFixture
) -> None:
    text = {"cp949": KOREAN, "cp932": JAPANESE}.get(codec, RUSSIAN).replace(",", "")
    separator = "," if "csv" in name else "\t"
    content = "".join(f"{number}{separator}{text}\r\n" for number in ("id", *range(1, 40))).replace(text, "text", 1).encode(codec)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    corpus = open_corpus(tmp_path / name)
    assert list(corpus) == list(corpus) == [Document(str(number), text) for number in range(1, 40)]
    assert sum("not UTF-8; read as" in record.getMessage() for record in caplog.records) == (codec != "utf-32")


def zipped(parts: Mapping[str, str]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in parts.items():
            archive.writestr(name, text)
    return file.getvalue()


W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'


def make_docx(body: str, prologue: str = "") -> bytes:
    types = "application/vnd.openxmlformats-officedocument.wordprocessingml"
    package = "http://schemas.openxmlformats.org/package/2006"
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    styles = "".join(
        f'<w:style w:type="paragraph" w:styleId="{name.replace(" ", "")}"><w:name w:val="{name}"/></w:style>'
        for name in ("Title", "heading 1", "heading 2")
    )
    level = '<w:lvl w:ilvl="0"><w:numFmt w:val="bullet"/></w:lvl>'
    numbers = f'<w:abstractNum w:abstractNumId="0">{level}</w:abstractNum><w:num w:numId="1"><w:abstractNumId w:val="0"/></w:num>'
    parts = {"document": f"<w:body>{body}</w:body>", "styles": styles, "numbering": numbers}
    overrides = "".join(
        f'<Override PartName="/word/{n}.xml" ContentType="{types}.{n.replace("document", "document.main")}+xml"/>' for n in parts
    )
    relations = "".join(f'<Relationship Id="{n}" Type="{office}/{n}" Target="{n}.xml"/>' for n in ("styles", "numbering"))
    return zipped(
        {
            "[Content_Types].xml": f'<Types xmlns="{package}/content-types"><Default Extension="rels"'
            f' ContentType="application/vnd.openxmlformats-package.relationships+xml"/>{overrides}</Types>',
            "_rels/.rels": f'<Relationships xmlns="{package}/relationships"><Relationship Id="d" Type="{office}/officeDocument"'
            ' Target="word/document.xml"/></Relationships>',
            "word/_rels/document.xml.rels": f'<Relationships xmlns="{package}/relationships">{relations}</Relationships>',
            **{f"word/{n}.xml": f"{prologue}<w:{n} {W}>{inner}</w:{n}>" for n, inner in parts.items()},
        }
    )


def paragraph(text: str, style: str = "", extra: str = "") -> str:
    styled = f"<w:pStyle w:val={style!r}/>" if style else ""
    return f'<w:p><w:pPr>{styled}{extra}</w:pPr><w:r><w:t xml:space="preserve">{text}</w:t></w:r></w:p>'


def make_pptx() -> bytes:
    pptx = pytest.importorskip("pptx")
    deck = pptx.Presentation()
    slide = deck.slides.add_slide(deck.slide_layouts[1])
    slide.shapes.title.text = "Pumps"
    slide.placeholders[1].text_frame.text = "Grease\nCheck"
    slide.placeholders[1].text_frame.paragraphs[1].level = 1
    slide.notes_slide.notes_text_frame.text = "Say hello"
    slide = deck.slides.add_slide(deck.slide_layouts[5])
    slide.shapes.title.text = "Oil"
    table = slide.shapes.add_table(2, 2, 0, 0, 900, 900).table
    for number, text in enumerate(("part", "oil", "axle", "5 ml")):
        table.cell(number // 2, number % 2).text = text
    slide.shapes.add_group_shape().shapes.add_textbox(0, 0, 9, 9).text_frame.text = "in a group"
    file = io.BytesIO()
    deck.save(file)
    return file.getvalue()


def make_xlsx() -> bytes:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.active.title = "Parts"
    for row in (["Price list"], [], ["name", "price", "since"], ["axle", 1.5, datetime.date(2024, 5, 1)], ["bolt", 3, None]):
        book.active.append(row)
    book.create_sheet("Nothing")
    book.create_sheet("Corner")["XFD1048576"] = "far"
    file = io.BytesIO()
    book.save(file)
    return file.getvalue()


def make_epub(encrypted: bool = False) -> bytes:
    namespace = "urn:oasis:names:tc:opendocument:xmlns:container"
    container = f'<container xmlns="{namespace}"><rootfiles><rootfile full-path="O/c.opf"/></rootfiles></container>'
    items = '<item id="a" href="t/ch%201.xhtml"/><item id="b" href="t/ch2.xhtml"/><item id="css" href="s.css"/>'
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf"><metadata xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>The Book</dc:title>'
    )
    package += f'</metadata><manifest>{items}</manifest><spine><itemref idref="b"/><itemref idref="a"/></spine></package>'
    page = '<?xml version="1.0"?><!DOCTYPE html><html><head><title/></head><body><a id="x"/><h1>{}</h1><p>{}</p></body></html>'
    parts = {"mimetype": "application/epub+zip", "META-INF/container.xml": container, "O/c.opf": package}
    parts |= {"O/t/ch 1.xhtml": page.format("One", "größer"), "O/t/ch2.xhtml": page.format("Two", "second"), "O/s.css": "p {}"}
    if encrypted:
        parts["META-INF/encryption.xml"] = '<e><CipherReference xmlns="x" URI="O/t/ch2.xhtml"/></e>'
    return zipped(parts)


def make_eml() -> bytes:
    inner = EmailMessage()
    inner["Subject"], inner["From"] = "Re: the pump", "cy@example.org"
    inner.set_content("<p>It <b>drips</b>.</p>", subtype="html")
    message = EmailMessage()
    message["Subject"], message["From"], message["To"] = "Größe der Pumpe", "Bo <bo@example.org>", "al@example.org"
    message["Date"] = "Mon, 06 May 2024 10:00:00 +0200"
    message.set_content("Hello,\n\nthe pump is 3 m.\n")
    message.add_alternative("<p>the same</p>", subtype="html")
    message.add_attachment(b"%PDF", maintype="application", subtype="pdf", filename="plan.pdf")
    message.add_attachment(inner)
    return message.as_bytes()


DOCX = (
    paragraph("The Pump", "Title")
    + paragraph("Intro.")
    + paragraph("Install", "heading1")
    + "".join(paragraph(text, extra='<w:numPr><w:ilvl w:val="0"/><w:numId w:val="1"/></w:numPr>') for text in ("one", "two"))
    + "<w:tbl>"
    + "".join(f"<w:tr><w:tc>{paragraph(a)}</w:tc><w:tc>{paragraph(b)}</w:tc></w:tr>" for a, b in (("part", "oil"), ("axle", "5 ml")))
    + f"</w:tbl>{paragraph('Deep', 'heading2')}<w:p><w:ins><w:r><w:t>added later</w:t></w:r></w:ins></w:p>"
)
OFFICE: dict[str, tuple[Callable[[], bytes], list[tuple[str, str]]]] = {
    "a.docx": (
        lambda: make_docx(DOCX),
        [
            ("a.docx > The Pump", "# The Pump\n\nIntro."),
            ("a.docx > Install", "# Install\n\n* one\n* two\n\n| part | oil |\n| --- | --- |\n| axle | 5 ml |"),
            ("a.docx > Install > Deep", "## Deep\n\nadded later"),
        ],
    ),
    "a.pptx": (
        make_pptx,
        [
            ("a.pptx > Pumps", "# Pumps\n\n* Grease\n  * Check\n\n> Say hello"),
            ("a.pptx > Oil", "# Oil\n\n| part | oil |\n| --- | --- |\n| axle | 5 ml |\n\nin a group"),
        ],
    ),
    "a.xlsx": (
        make_xlsx,
        [
            (
                "a.xlsx > Parts",
                "# Parts\n\nPrice list\n\n| name | price | since |\n| --- | --- | --- |\n| axle | 1.5 | 2024-05-01 |\n| bolt | 3 |  |",
            ),
            ("a.xlsx > Corner", "# Corner\n\nfar"),
        ],
    ),
    "a.epub": (make_epub, [("a.epub > The Book > Two", "# Two\n\nsecond"), ("a.epub > The Book > One", "# One\n\ngrößer")]),
    "a.eml": (
        make_eml,
        [
            (
                "a.eml > Größe der Pumpe",
                "# Größe der Pumpe\n\nFrom: Bo <bo@example.org>\nTo: al@example.org\nDate: 2024-05-06T10:00:00+02:00\n\n"
                "Hello,\n\nthe pump is 3 m.\n\nAttachments: plan.pdf",
            ),
            ("a.eml > Größe der Pumpe > Re: the pump", "## Re: the pump\n\nFrom: cy@example.org\n\nIt **drips**."),
        ],
    ),
}
LIBRARIES = {"a.docx": "mammoth", "a.pptx": "pptx", "a.xlsx": "openpyxl", "a.epub": "bs4", "a.eml": "bs4"}


@pytest.mark.parametrize("name", OFFICE)
def test_headings_lists_and_tables_of_documents_become_markdown(name: str, tmp_path: Path) -> None:
    pytest.importorskip(LIBRARIES[name])
    make, expected = OFFICE[name]
    (tmp_path / name).write_bytes(make())
    assert [(document.title, document.text.strip()) for document in open_corpus(tmp_path)] == expected


def test_passages_name_slides_rows_and_who_wrote_a_message(tmp_path: Path) -> None:
    for name in ("a.pptx", "a.xlsx", "a.eml"):
        pytest.importorskip(LIBRARIES[name])
        (tmp_path / name).write_bytes(OFFICE[name][0]())
    eml, _, *slides, first, last = [document.metadata or {} for document in open_corpus(tmp_path)]
    assert (eml["from"], eml["date"]) == ("Bo <bo@example.org>", "2024-05-06T10:00:00+02:00")
    assert [(slide["page"], slide["end_page"]) for slide in slides] == [(1, 1), (2, 2)]
    assert [(sheet["line"], sheet["end_line"]) for sheet in (first, last)] == [(1, 5), (1048576, 1048576)]


BOMB = '<!DOCTYPE w [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;"><!ENTITY f SYSTEM "file:///etc/passwd">]>'


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        *((name, lambda: b"PK\x03\x04 damaged", "cannot be read (") for name in OFFICE if name != "a.eml"),
        *((name, lambda: zipped({"a": "b"}), "cannot be read (") for name in OFFICE if name != "a.eml"),
        *(
            (f"a.{kind}", lambda: b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1 cipher", "needs a password, or is in the format of Office 97")
            for kind in ("docx", "xlsx")
        ),
        ("a.docx", lambda: make_docx(paragraph("&b;"), BOMB), "defines XML entities"),
        ("a.docx", lambda: make_docx(paragraph("w")).replace(b"word/styles.xml", b"word/stales.xml")[:-30], "cannot be read ("),
        ("a.pptx", lambda: zipped({"x.xml": " " * (130 << 20)}), "would unpack to 130 MiB"),
        ("a.epub", lambda: make_epub(encrypted=True), "encrypted (DRM)"),
        ("a.eml", lambda: b"no message", "not an e-mail message"),
        ("a.docx", lambda: make_docx(paragraph(" ")), "the file has no text"),
    ],
)
def test_damaged_encrypted_and_hostile_documents_are_told(
    name: str, make: Callable[[], bytes], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip(LIBRARIES[name])
    (tmp_path / name).write_bytes(make())
    with pytest.raises(InputError, match=rf"{name}: .*{re.escape(message)}") as caught:
        texts(tmp_path / name)
    assert "\n" not in str(caught.value)
    (tmp_path / "b.txt").write_text("words")
    assert texts(tmp_path) == ["words"]
    assert f"1 (such as {name})" in caplog.text


def test_a_pdf_of_pictures_needs_ocr_and_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pypdf = pytest.importorskip("pypdf")
    for number in range(5):
        writer = pypdf.PdfWriter()
        writer.add_blank_page(200, 200)
        writer.write(tmp_path / f"{number}.pdf")
    (tmp_path / "a.ipynb").write_text('{"cells": []}')
    (tmp_path / "b.md").write_text("words")
    (tmp_path / "c.md").write_text("")
    assert texts(tmp_path) == ["words"]
    (line,) = [record.getMessage() for record in caplog.records if "files read" in record.getMessage()]
    assert "files read: 2;" in line
    assert "need OCR, for instance by ocrmypdf): 5 (such as 0.pdf, 1.pdf, 2.pdf)" in line
    assert "notebook files without text: 1 (such as a.ipynb)" in line
    with pytest.raises(InputError, match=r"0\.pdf: the file has no text \(the pages are pictures, such as scans, and need OCR"):
        texts(tmp_path / "0.pdf")


@pytest.mark.skipif(os.name == "nt", reason="needs named pipes")
def test_pipes_sockets_and_devices_are_left_out_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # names of sockets must be short
    (tmp_path / "a.md").write_text("words")
    os.mkfifo("pipe.txt")
    Path("link.py").symlink_to("pipe.txt")
    Path("zero.html").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket.md")
        assert texts(tmp_path) == ["words"]
    assert "pipes, sockets and devices left out: 4 (such as link.py)" in caplog.text
