"""Errors with a meaning of their own. A user's mistake is a plain ValueError."""

import os

MAX_MESSAGE_CHARS = 600  # names in a hostile file can be megabytes long; a log line should not be


class CorruptFile(ValueError):
  """A file that breaks the rules of its own format: truncated, damaged or hostile.

  The message is always one printable line, `<file>: <what>: <rule>. <way out>`, whatever bytes
  the file put into a name.

  Args:
    file: the path of the file.
    what: the tensor, key, entry or offset at fault.
    rule: the rule that it breaks, with the numbers.
    way_out: what the reader of the line can do, a sentence.
  """

  def __init__(
    self,
    file: str | os.PathLike[str],
    what: str,
    rule: str,
    way_out: str = "Download or copy the file again.",
  ):
    super().__init__(str(file), what, rule, way_out)  # in args, so that the error pickles
    self.file = str(file)
    self.what = what
    self.rule = rule
    self.way_out = way_out

  def __str__(self) -> str:
    text = f"{self.file}: {self.what}: {self.rule.rstrip('.')}."
    if len(text) > MAX_MESSAGE_CHARS:
      text = text[: MAX_MESSAGE_CHARS // 2] + " ... " + text[-MAX_MESSAGE_CHARS // 2 :]
    line = f"{text} {self.way_out}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
