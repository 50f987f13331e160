import sys

from passes.compat.jit import add_note, notes_of


def test_notes(monkeypatch):
    error, cause = RuntimeError("wrapped"), ValueError("first")
    error.__cause__ = cause
    for e, note in ((error, "one\ntwo"), (cause, "three")):
        add_note(e, note)
    if sys.version_info >= (3, 11):
        assert (str(error), notes_of(error)) == ("wrapped", "\none\ntwo\nthree")
    monkeypatch.setattr(sys, "version_info", (3, 10))
    old = RuntimeError("message", 3)
    add_note(old, "note")
    assert old.args == ("message\nnote", 3)
    assert notes_of(old) == ""
