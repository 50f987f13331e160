"""Properties of symbols: what a line of a trace does with memory and with the values that it reads."""

from __future__ import annotations

from enum import Flag, auto


class Property(Flag):
    """A symbol has any number of these. :mod:`passes.analysis.symbols` knows those of Thunder's symbols; a symbol of
    ours carries its own among its tags."""

    NONE = 0
    FREE = auto()  # computes nothing: a line for the reader, for Python's names, or one whose time is a link's
    VIEW = auto()  # the results share the memory of the first argument (a reshape copies if its strides demand it)
    INDEX = auto()  # a view if it is indexed by numbers and slices, a look-up if by a tensor
    CAST = auto()  # the arguments in another dtype or on another device; nothing is moved if they have these already
    COPY = auto()  # the first argument in new memory; the same memory if it is laid out as asked already
    LOOK_UP = auto()  # reads no more of its table, the first argument, than it writes
    CONSTANT = auto()  # makes a tensor out of numbers, the same one each time
    RANDOM = auto()  # may draw random numbers
    IN_PLACE = auto()  # changes an argument
    STATEFUL = auto()  # reads and changes tensors that outlive the step and are not among its arguments

    @property
    def is_alias(self) -> bool:
        """True if the results hold the values of the first argument, perhaps in the same memory."""
        return bool(self & (Property.VIEW | Property.INDEX | Property.CAST | Property.COPY))
