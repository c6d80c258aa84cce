"""The shapes that every picture is made of: well-formed, escaped, short numbers."""

import xml.etree.ElementTree as ElementTree

from fivefold.render.svg import circle, document, line, path, rect, text

SVG = "{http://www.w3.org/2000/svg}"


def test_a_document_is_well_formed_and_has_its_shapes():
    shapes = [
        rect(0, 0, 50.123, 20, "F0.0 <&>", fill="#3366cc"),
        line(0, 0, 1, 1, stroke="#ddd"),
        path([(0, 0), (1, 1), (2, 0)], "Z", fill="none"),
        circle(5, 5, 2.6, fill_opacity=0.55),
        text(4, 14, 'rank 0 & "1" <2>', text_anchor="end"),
    ]
    root = ElementTree.fromstring(document(200, 100, shapes, title="a & b", font_size=12))
    assert root.attrib["viewBox"] == "0 0 200 100"
    assert root.attrib["font-size"] == "12"
    assert root.findtext(f"{SVG}title") == "a & b"
    paper, drawn = root.findall(f"{SVG}rect")
    assert paper.attrib == {"width": "200", "height": "100", "fill": "white"}
    assert drawn.findtext(f"{SVG}title") == "F0.0 <&>"
    assert drawn.attrib["width"] == "50.12"
    assert [one.attrib["d"] for one in root.findall(f"{SVG}path")] == ["M0 0L1 1", "M0 0L1 1L2 0Z"]
    assert root.find(f"{SVG}circle").attrib["fill-opacity"] == "0.55"
    assert root.findtext(f"{SVG}text") == 'rank 0 & "1" <2>'


def test_names_may_hold_anything():
    odd = "a\x1b[31m<script>\u2028\x00b"
    root = ElementTree.fromstring(document(9, 9, [text(0, 0, odd), rect(0, 0, 1, 1, odd)], title=odd))
    found = [root.findtext(f"{SVG}{tag}") for tag in ("title", "text", f"rect[2]/{SVG}title")]
    assert found == ["a?[31m<script>??b"] * 3


def test_what_is_none_is_left_out():
    assert text(1, 2, "x", font_weight=None) == '<text x="1" y="2">x</text>'
