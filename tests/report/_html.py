"""A page as a parser sees it."""

import json
from html.parser import HTMLParser

VOID = {"meta", "img", "br", "input", "link", "hr"}
# SVG's own, which close themselves.
VOID |= {"path"}


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.open, self.scripts, self.text, self.wrong = [], [], {}, [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        if not self.open or self.open[-1] != tag:
            # A table's header may leave out nothing here: every element that is opened is closed.
            self.wrong.append((tag, self.open[-3:]))
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.setdefault(len([1 for tag, _ in self.elements if tag == "script"]), []).append(data)
        elif self.open and self.open[-1] != "style":
            self.text.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())

    @property
    def data(self):
        return json.loads("".join(self.scripts[1]))
